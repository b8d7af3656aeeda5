//! Single ops on tensors, against plain operations of burn's.

mod common;

use burn::tensor::{DType, Tensor};
use common::{assert_close, on, plain_attention, random};
use wgpu_mla_burn::wgpu_mla::gpu::Gpu;
use wgpu_mla_burn::wgpu_mla::{
    Batch, Device, Dtype, KvAppend, KvSpec, KvView, MlaDecode, MlaPrefill, MlaPrefillArgs, MlaShape,
    PagePool, Plan, PrefillExtent, PrefillSequence, SplitPolicy,
};
use wgpu_mla_burn::{Error, Input, Output, Scales, burn_dtype};

const SHAPE: MlaShape = MlaShape { num_heads: 2, kv_lora_rank: 256, qk_rope_head_dim: 32 };
const ROW: usize = 288;

/// Appends the rows of two sequences and decodes a token of each, in burn's order: everything that is read is computed by operations that
/// are still queued, and what is written is used by further ones.
fn appends_and_decodes(dtype: Dtype, cache: Dtype, tolerance: f32) {
    let (on, lens) = (on(), [37u32, 9]);
    let gpu = on.gpu();
    let float = burn_dtype(dtype).expect("a float");
    let kv = KvSpec { layout: cache.into(), page_size: 16, num_pages: 8 };
    let append = gpu.compile(KvAppend { shape: SHAPE, kv, input: dtype, guard: false }).expect("an append");
    let mla = gpu.compile(MlaDecode { shape: SHAPE, kv, query: dtype, out: dtype }).expect("a decode");
    let buffer = gpu.buffer(mla.op().cache_bytes()).expect("a cache");
    let view = KvView::dense(&buffer, mla.op());
    let mut pool = PagePool::new(kv).expect("a pool");
    let seqs = lens.map(|_| pool.add());
    let requests: Vec<_> = seqs.iter().copied().zip(lens).collect();
    let batch = pool.append_batch(&requests).expect("pages");
    let slots = pool.slot_mapping(&batch.tokens).expect("slots");

    let tokens = slots.len();
    let rows = random([tokens, ROW], float, on.device()) * 0.5;
    let (kv_c, k_pe) = (rows.clone().narrow(1, 0, 256) + 0.25, rows.narrow(1, 256, 32));
    let k_scale = if cache == Dtype::E4m3 { 0.125 } else { 1.0 };
    let mut step = append.step(0).expect("a step");
    append.prepare(&mut step, &slots).expect("slots");
    on.kv_append(&append, &step, kv_c.clone(), k_pe.clone(), &view, k_scale).expect("appended");

    let starts = [0, 1, 2];
    let lens_now = pool.seq_lens(&seqs).expect("lens");
    let plan =
        Plan::new(mla.op(), &mla.tiling(), &Batch::new(&lens_now, &starts), SplitPolicy::FixedTokens(16));
    let mut step = mla.step(Default::default()).expect("a step");
    let table = pool.block_table(&seqs, -1).expect("pages");
    mla.prepare(&mut step, (&plan.expect("a plan"), table.page_table())).expect("prepared");
    let softmax_scale = 0.1;
    let mut q = random([2, 2, ROW], float, on.device()) + 0.125;
    // Each decode reads what the one before wrote.
    for round in 0..3 {
        let made =
            on.mla_decode(&mla, &step, q.clone(), &view, Scales { softmax_scale, k_scale }).expect("decoded");
        for (i, (&len, begin)) in lens.iter().zip([0, lens[0] as usize]).enumerate() {
            let latent = kv_c.clone().narrow(0, begin, len as usize);
            let keys = Tensor::cat(vec![latent.clone(), k_pe.clone().narrow(0, begin, len as usize)], 1);
            let heads = |it: Tensor<2>| {
                let [rows, dim] = it.dims();
                it.reshape([rows, 1, dim]).repeat(&[1, 2, 1])
            };
            let (out, lse) =
                plain_attention(q.clone().narrow(0, i, 1), heads(keys), heads(latent), softmax_scale);
            let name = format!("{dtype} {cache}, round {round}, sequence {i}");
            assert_close(&format!("{name}: out"), made.out.clone().narrow(0, i, 1), out, tolerance);
            assert_close(&format!("{name}: lse"), made.lse.clone().narrow(0, i, 1), lse, tolerance);
        }
        let rope = q.narrow(2, 256, 32) * 0.5;
        q = Tensor::cat(vec![made.out * 2.0 - 0.125, rope], 2);
    }
}

#[test]
fn f32_tensors() {
    appends_and_decodes(Dtype::F32, Dtype::F32, 1e-5);
}

#[test]
fn f16_tensors() {
    appends_and_decodes(Dtype::F16, Dtype::F16, 3e-3);
}

#[test]
fn an_e4m3_cache() {
    appends_and_decodes(Dtype::F32, Dtype::E4m3, 6e-2);
}

/// Arrays of a prefill: all are parts of burn's buffers, and the keys are a transposed tensor, whose heads are strided.
#[test]
fn a_prefill() {
    let on = on();
    let (heads, tokens, nope, rope, value) = (3, 21, 32, 32, 64);
    let spec = MlaPrefill {
        num_heads: heads,
        qk_nope_head_dim: nope,
        qk_rope_head_dim: rope,
        v_head_dim: value,
        dtype: Dtype::F16,
        out: Dtype::F32,
    };
    let prefill = on.gpu().compile(spec).expect("a prefill");
    let mut step = prefill.step(0).expect("a step");
    prefill.prepare(&mut step, &[PrefillSequence::causal(0, tokens, 0, tokens)]).expect("prepared");
    let shape = |dim: u32| [tokens as usize, heads as usize, dim as usize];
    let q = random(shape(nope + rope), DType::F16, on.device());
    let k = random([heads as usize, tokens as usize, 64], DType::F16, on.device()).swap_dims(0, 1);
    // Its last dimension is strided: burn copies it.
    let v =
        random([tokens as usize, value as usize, heads as usize], DType::F16, on.device()).swap_dims(1, 2);
    let made = on.mla_prefill(&prefill, &step, [q.clone(), k.clone(), v.clone()], 0.125).expect("attended");
    let (out, lse) = plain_attention(q, k, v, 0.125);
    assert_close("out", made.out, out, 3e-3);
    assert_close("lse", made.lse, lse, 3e-3);
}

/// An input and an output are parts of one buffer of burn's, which a `Gpu` without `shared_buffers` refuses, with the cure.
#[test]
fn burn_hands_out_parts_of_one_buffer() {
    let on = on();
    let dtype = Dtype::F32;
    let spec = MlaPrefill {
        num_heads: 1,
        qk_nope_head_dim: 32,
        qk_rope_head_dim: 0,
        v_head_dim: 32,
        dtype,
        out: dtype,
    };
    let apart = Gpu::on(on.gpu().adapter().expect("burn's"), on.gpu().device(), on.gpu().queue());
    let q = Input::new("q", random([4, 32], DType::F32, on.device())).expect("a tensor of burn's");
    let outputs = [Output::new([4, 32], dtype), Output::new([4], dtype)];
    let room = PrefillExtent { tokens: 4, keys: 4, rows: 4 };
    on.on_buffers([q], outputs, |[q], [out, lse]| {
        assert!(q.buffer() == out.buffer() && q.offset() != out.offset(), "{q:?}, {out:?}");
        let rows = q.view(32);
        let args = MlaPrefillArgs {
            q_nope: rows,
            q_pe: rows,
            k_nope: rows,
            k_pe: rows,
            v: rows,
            out: out.view(32),
            lse: lse.view(1),
            softmax_scale: 0.1,
            v_scale: 1.0,
        };
        on.gpu().compile(spec)?.bind(&args, room)?;
        let refused = apart.compile(spec)?.bind(&args, room).expect_err("refused").to_string();
        assert!(refused.contains("shared_buffers"), "{refused}");
        Ok(())
    })
    .expect("ran");
}

/// Tensors that another thread made, in a queue of its own, which is not submitted yet.
#[test]
fn tensors_of_another_thread() {
    let on = on();
    let spec = MlaPrefill {
        num_heads: 1,
        qk_nope_head_dim: 32,
        qk_rope_head_dim: 0,
        v_head_dim: 32,
        dtype: Dtype::F32,
        out: Dtype::F32,
    };
    let prefill = on.gpu().compile(spec).expect("a prefill");
    let mut step = prefill.step(0).expect("a step");
    prefill.prepare(&mut step, &[PrefillSequence::causal(0, 4, 0, 4)]).expect("prepared");
    let made = std::thread::spawn(|| {
        [1.0, 2.0, 3.0].map(|scale| random([4, 1, 32], DType::F32, on.device()) * scale)
    });
    let [q, k, v] = made.join().expect("made");
    let (out, _) = plain_attention(q.clone(), k.clone(), v.clone(), 0.2);
    let made = on.mla_prefill(&prefill, &step, [q, k, v], 0.2).expect("attended");
    assert_close("out", made.out, out, 1e-5);
}

#[test]
fn what_does_not_fit_is_refused() {
    let on = on();
    let kv = KvSpec { layout: Dtype::F32.into(), page_size: 16, num_pages: 8 };
    let append =
        on.gpu().compile(KvAppend { shape: SHAPE, kv, input: Dtype::F32, guard: false }).expect("an append");
    let decode = MlaDecode { shape: SHAPE, kv, query: Dtype::F32, out: Dtype::F32 };
    let buffer = on.gpu().buffer(decode.cache_bytes()).expect("a cache");
    let view = KvView::dense(&buffer, &decode);
    let mut step = append.step(0).expect("a step");
    append.prepare(&mut step, &[3, 4]).expect("slots");
    let rows = |dims, dtype| Tensor::<2>::ones(dims, on.device()).cast(dtype);
    let refused = |kv_c| {
        let k_pe = rows([2, 32], DType::F32);
        on.kv_append(&append, &step, kv_c, k_pe, &view, 1.0).expect_err("refused")
    };
    let shape = refused(rows([3, 256], DType::F32));
    assert!(matches!(&shape, Error::Shape { what: "kv_c", got, .. } if got == &[3, 256]), "{shape}");
    let dtype = refused(rows([2, 256], DType::F16));
    assert!(matches!(dtype, Error::Dtype { what: "kv_c", want: Dtype::F32, .. }), "{dtype}");
    // burn makes its default device once.
    assert!(matches!(wgpu_mla_burn::MlaDevice::new(), Err(Error::Device { .. })));
}
