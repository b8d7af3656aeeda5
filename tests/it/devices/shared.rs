//! Arrays that are parts of one buffer, and commands of the host's that are submitted late.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use mla_support::paint::Problem;
use wgpu_mla::{Compiled, MlaPrefill, MlaPrefillArgs, PrefillExtent, PrefillSequence, Query};

use super::*;

/// From a part to the next: what any device aligns the offsets of bindings to, with poison between them.
const ALIGN: u64 = 256;

fn setup(gpu: &Gpu, setup: Setup<'_>) -> Gpu {
    Gpu::with(&adapter(gpu), gpu.device(), gpu.queue(), &setup)
}

fn shared(gpu: &Gpu) -> Gpu {
    setup(gpu, Setup { shared_buffers: true, ..Setup::default() })
}

/// Parts of one buffer: where each begins, and the bytes of all.
fn parts(bytes: &[u64]) -> (Vec<u64>, u64) {
    let mut end = ALIGN;
    let begins = bytes.iter().map(|bytes| {
        let begin = end;
        end = (begin + bytes).next_multiple_of(ALIGN) + ALIGN;
        begin
    });
    (begins.collect(), end)
}

/// The arguments of a decode on parts of one buffer, its elements of `bytes` bytes from `begins` on.
fn decode_args<'a>(
    problem: &Problem,
    buffer: &'a wgpu::Buffer,
    begins: &[u64],
) -> MlaDecodeArgs<&'a wgpu::Buffer> {
    let spec = &problem.spec;
    let mut args = MlaDecodeArgs::dense(spec, buffer, buffer, buffer, buffer, problem.softmax_scale);
    let heads = spec.shape.num_heads;
    let q = View::dense(buffer, heads, spec.shape.row_elems());
    args.query = Query::Whole(View { offset: begins[0] / spec.query.bytes() as u64, ..q });
    args.kv.offset = begins[1];
    args.out.offset = begins[2] / spec.out.bytes() as u64;
    args.lse.offset = begins[3] / 4;
    args
}

/// All arrays of a decode in one buffer: the bits are those of buffers of their own, and nothing around them is written.
fn a_decode_of_one_buffer() -> Outcome {
    let rig = Rig::shared()?;
    let problem = small(&[(37, 1), (90, 2)]);
    let loaded = rig.load(problem.clone());
    let step = rig.step(&problem, FIXED);
    rig.run(&step, &loaded);
    let [out, lse] = rig.bits(&loaded);

    let gpu = shared(&rig.gpu);
    let mla = gpu.compile(problem.spec).expect("a decode");
    let sizes = [problem.q.len(), problem.kv.len(), out.len(), lse.len()].map(|bytes| bytes as u64);
    let (begins, all) = parts(&sizes);
    let buffer = gpu.buffer(all).expect("a buffer");
    let mut bytes = vec![0xA5; all as usize];
    for (begin, part) in begins.iter().zip([&problem.q, &problem.kv]) {
        bytes[*begin as usize..][..part.len()].copy_from_slice(part);
    }
    gpu.upload(&buffer, 0, &bytes).expect("uploaded");
    let args = decode_args(&problem, &buffer, &begins);
    let binding = mla.bind(&args, problem.total_q() as u32).expect("parts of one buffer");
    let mut step = mla.step(Capacity::default()).expect("a step");
    mla.prepare(&mut step, (&plan(&mla, &problem, FIXED), pages(&problem))).expect("prepared");
    mla.run(&step, &binding).expect("runs");
    for (begin, part) in begins[2..].iter().zip([&out, &lse]) {
        bytes[*begin as usize..][..part.len()].copy_from_slice(part);
    }
    assert!(gpu.download(&buffer, all).expect("downloaded") == bytes, "other bits");

    // Where arrays overlap, and without the choice, it is refused, with the cure.
    let error = |mla: &Compiled<MlaDecode, Gpu>, args| mla.bind(args, 3).expect_err("refused");
    let mut overlapping = args.clone();
    overlapping.out.offset = begins[0] / 4;
    assert_eq!(error(&mla, &overlapping), Error::Aliased { a: "q_nope", b: "out" });
    let mut overlapping = args.clone();
    overlapping.lse.offset = begins[3] / 4 - ALIGN / 4 - 8;
    assert_eq!(error(&mla, &overlapping), Error::Aliased { a: "lse", b: "out" });
    let refused = error(&rig.mla, &args);
    assert_eq!(refused, Error::Aliased { a: "q_nope", b: "out" });
    assert!(refused.to_string().contains("Setup::shared_buffers"), "{refused}");
    Ok(())
}

/// The same for an append and a prefill: of f32, in one buffer of zeros and ones.
fn an_append_and_a_prefill_of_one_buffer() -> Outcome {
    let gpu = shared(&mla_support::gpu()?);
    let spec = spec();
    let append = KvAppend { shape: spec.shape, kv: spec.kv, input: Dtype::F32, guard: false };
    let (latent, rope) = (spec.shape.kv_lora_rank, spec.shape.qk_rope_head_dim);
    let (begins, all) = parts(&[u64::from(latent) * 4, u64::from(rope) * 4, spec.cache_bytes()]);
    let buffer = gpu.buffer(all).expect("a buffer");
    let row = Dtype::F32.encode_all(&vec![0.5; latent as usize]);
    gpu.upload(&buffer, begins[0], &row).expect("uploaded");
    gpu.upload(&buffer, begins[1], &row[..rope as usize * 4]).expect("uploaded");
    let mut args = KvAppendArgs {
        kv_c: View { offset: begins[0] / 4, ..View::dense(&buffer, 1, latent) },
        k_pe: View { offset: begins[1] / 4, ..View::dense(&buffer, 1, rope) },
        kv: KvView { offset: begins[2], ..KvView::dense(&buffer, &spec) },
        k_scale: 1.0,
        guard: None,
    };
    gpu.once(append, &[1], &args).expect("appends");
    let bytes = gpu.download(&buffer, all).expect("downloaded");
    let cache = Dtype::F16.decode_all(&bytes[begins[2] as usize..][..spec.cache_bytes() as usize]);
    let row = (latent + rope) as usize;
    assert!(cache.iter().enumerate().all(|(at, &x)| x == if at / row == 1 { 0.5 } else { 0.0 }));
    args.kv.offset = begins[1];
    assert_eq!(gpu.once(append, &[1], &args), Err(Error::Aliased { a: "k_pe", b: "kv" }));

    // Keys of zeros: the average of values of 1.
    let dtype = Dtype::F32;
    let spec = MlaPrefill {
        num_heads: 1,
        qk_nope_head_dim: 8,
        qk_rope_head_dim: 0,
        v_head_dim: 8,
        dtype,
        out: dtype,
    };
    let (begins, all) = parts(&[2 * 32, 2 * 32, 2 * 32, 2 * 32, 2 * 4]);
    let buffer = gpu.buffer(all).expect("a buffer");
    gpu.upload(&buffer, begins[2], &dtype.encode_all(&[1.0; 16])).expect("uploaded");
    let view = |at: usize| View { offset: begins[at] / 4, ..View::dense(&buffer, 1, 8) };
    let (q_nope, k_nope, v, out) = (view(0), view(1), view(2), view(3));
    let lse = View { offset: begins[4] / 4, ..View::dense(&buffer, 1, 1) };
    let (softmax_scale, v_scale) = (0.1, 1.0);
    let mut args =
        MlaPrefillArgs { q_nope, q_pe: q_nope, k_nope, k_pe: k_nope, v, out, lse, softmax_scale, v_scale };
    gpu.once(spec, &[PrefillSequence::causal(0, 2, 0, 2)], &args).expect("attends");
    let bytes = gpu.download(&buffer, all).expect("downloaded");
    assert_eq!(dtype.decode_all(&bytes[begins[3] as usize..][..64]), [1.0; 16]);
    args.out = v;
    let room = PrefillExtent { tokens: 2, keys: 2, rows: 2 };
    let refused = gpu.compile(spec).expect("compiles").bind(&args, room).expect_err("refused");
    assert_eq!(refused, Error::Aliased { a: "v", b: "out" });
    Ok(())
}

/// A host's commands that it has not submitted yet are, before those of this crate that come after them.
fn what_a_host_has_recorded_comes_first() -> Outcome {
    let gpu = setup(&mla_support::gpu()?, Setup::default());
    let [a, b] = [1u32, 2].map(|word| {
        let buffer = gpu.buffer(4).expect("a buffer");
        gpu.upload(&buffer, 0, &word.to_le_bytes()).expect("uploaded");
        buffer
    });
    let recorded: Arc<Mutex<Option<wgpu::CommandEncoder>>> = Arc::default();
    let calls = Arc::new(AtomicU32::new(0));
    let (pending, queue, count) = (recorded.clone(), gpu.queue().clone(), calls.clone());
    let flush = move || {
        count.fetch_add(1, Ordering::Relaxed);
        if let Some(encoder) = pending.lock().unwrap_or_else(PoisonError::into_inner).take() {
            queue.submit([encoder.finish()]);
        }
    };
    assert!(gpu.flush_before_submit(flush));
    assert!(!gpu.flush_before_submit(|| ()), "there is one already");
    let copy = || {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(&a, 0, &b, 0, 4);
        *recorded.lock().unwrap_or_else(PoisonError::into_inner) = Some(encoder);
    };
    copy();
    assert_eq!(gpu.download(&b, 4).expect("downloaded"), 1u32.to_le_bytes());
    // An upload takes effect before the next submit, and so would overtake the copy.
    copy();
    gpu.upload(&a, 0, &3u32.to_le_bytes()).expect("uploaded");
    assert_eq!(gpu.download(&b, 4).expect("downloaded"), 1u32.to_le_bytes());
    gpu.submit(|_| Ok(())).expect("submitted");
    assert_eq!(calls.load(Ordering::Relaxed), 4);
    Ok(())
}

crate::tests![
    a_decode_of_one_buffer,
    an_append_and_a_prefill_of_one_buffer,
    what_a_host_has_recorded_comes_first
];
