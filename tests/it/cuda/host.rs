//! What the host may do around calls: refill memory that it lent, and make another context current.

use std::sync::Arc;

use super::decodes::check_decode;
use super::uploaded;
use mla_support::graph::cuda;
use mla_support::paint::{Make, sequences};
use mla_support::suite::run::dense_table;
use mla_support::{Ignored, Outcome};
use wgpu_mla::cuda::Cuda;
use wgpu_mla::cuda::cudarc::driver::{CudaContext, sys};
use wgpu_mla::{
    Batch, Capacity, DecodeOptions, Device, Dtype, Error, HeadProject, HeadProjectArgs, KvCopyPages, KvSpec,
    KvView, MlaDecodeArgs, MlaPrefill, MlaPrefillArgs, MlaShape, Plan, PrefillExtent, PrefillSequence,
    Result, Slabs, SplitPolicy, View, WeightOrder, WeightView,
};

fn shape(kv_lora_rank: u32, qk_rope_head_dim: u32) -> MlaShape {
    MlaShape { num_heads: 1, kv_lora_rank, qk_rope_head_dim }
}

/// Work for some milliseconds, so that what is put on the stream after it comes late.
fn busy(cuda: &Cuda) {
    let kv = KvSpec { layout: Dtype::F32.into(), page_size: 256, num_pages: 400 };
    let bytes = cuda.buffer(400 * 256 * 576 * 4).expect("memory");
    let copy = cuda.compile(KvCopyPages { shape: shape(512, 64), kv }).expect("a copy");
    let cache = KvView {
        buffer: &bytes,
        offset: 0,
        layer_stride: 0,
        layer: 0,
        block_stride: 256 * 576 * 4,
        slabs: Slabs::ONE,
    };
    let pairs: Vec<_> = (0..200).map(|page| (page, 200 + page)).collect();
    let mut step = copy.step(200).expect("a step");
    copy.prepare(&mut step, &pairs).expect("prepared");
    let binding = copy.bind(&cache, ()).expect("binds");
    for _ in 0..200 {
        copy.record(&step, &binding).expect("recorded");
    }
}

/// Pinned memory is read by the card itself, when the stream is there; pageable memory may be.
fn memory_is_the_hosts_again_after_an_upload() -> Outcome {
    let cuda = cuda()?;
    // Less than the staging ring has, and more than twice as much.
    for bytes in [4096usize, 9 << 20] {
        // SAFETY: it is filled before it is read.
        let pinned = unsafe { cuda.stream().context().alloc_pinned_with_flags::<u8>(bytes, 0) };
        let mut pinned = pinned.expect("pinned memory");
        let mut pageable = vec![0u8; bytes];
        let [a, b] = [(); 2].map(|()| cuda.buffer(bytes as u64).expect("memory"));
        for (turn, fill) in [11u8, 22, 33].into_iter().enumerate() {
            let wanted: Vec<u8> = (0..bytes).map(|i| fill.wrapping_add((i / 4093) as u8)).collect();
            busy(&cuda);
            let memory = pinned.as_mut_slice().expect("idle");
            memory.copy_from_slice(&wanted);
            cuda.upload(&a, 0, memory).expect("uploaded");
            memory.fill(0xEE);
            pageable.copy_from_slice(&wanted);
            cuda.upload(&b, 0, &pageable).expect("uploaded");
            pageable.fill(0xEE);
            for buffer in [&a, &b] {
                let got = cuda.download(buffer, bytes as u64).expect("read");
                assert!(got == wanted, "{bytes} bytes, turn {turn}");
            }
        }
    }
    Ok(())
}

/// A batch is prepared again while the launches of the one before wait: each has its own tables.
fn tables_are_staged_before_the_next_prepare() -> Outcome {
    let cuda = cuda()?;
    let kv = KvSpec { layout: Dtype::F32.into(), page_size: 1, num_pages: 4 };
    let copy = cuda.compile(KvCopyPages { shape: shape(256, 32), kv }).expect("a copy");
    let bytes =
        uploaded(&cuda, &Dtype::F32.encode_all(&[[7.0; 288], [0.0; 288], [0.0; 288], [0.0; 288]].concat()));
    let cache = KvView {
        buffer: &bytes,
        offset: 0,
        layer_stride: 0,
        layer: 0,
        block_stride: 288 * 4,
        slabs: Slabs::ONE,
    };
    let mut step = copy.step(1).expect("a step");
    let binding = copy.bind(&cache, ()).expect("binds");
    busy(&cuda);
    for to in 1..4 {
        copy.prepare(&mut step, &[(to - 1, to)]).expect("prepared");
        copy.record(&step, &binding).expect("recorded");
    }
    let got = Dtype::F32.decode_all(&cuda.download(&bytes, 4 * 288 * 4).expect("read"));
    assert_eq!(got, [7.0; 4 * 288]);
    Ok(())
}

/// A graph would copy at each launch what lies in the staging memory then.
fn uploads_within_a_capture_are_refused() -> Outcome {
    let cuda = cuda()?;
    let buffer = cuda.buffer(64).expect("memory");
    let refused = cuda.capture(|| cuda.upload(&buffer, 0, &[1; 64])).expect_err("no kernel");
    assert!(matches!(refused, Error::LayoutMismatch { .. }), "{refused:?}");
    assert!(refused.to_string().contains("within a capture"), "{refused}");
    cuda.upload(&buffer, 0, &[2; 64]).expect("uploaded");
    assert_eq!(cuda.download(&buffer, 64).expect("read"), [2; 64]);
    Ok(())
}

/// All calls on a device, each with another's context current: ops that set attributes of kernels and make tensor maps are among them.
fn works_beside(cuda: &Cuda, other: &Arc<CudaContext>) {
    let elsewhere = || other.bind_to_thread().expect("the other context");
    // Kernels that are loaded, then those that are there.
    for _ in 0..2 {
        elsewhere();
        let problem =
            Make { cache: Dtype::Bf16, sequences: sequences(&[(150, 1), (90, 2)]), ..Make::default() }
                .build();
        let spec = problem.spec;
        for candidate in cuda.variants(&spec).iter().filter(|candidate| candidate.lacks.is_none()) {
            let options = DecodeOptions { variant: Some(candidate.name.into()), ..DecodeOptions::default() };
            elsewhere();
            let decode = cuda.compile_with(spec, &options).expect(candidate.name);
            let batch = Batch::new(&problem.seq_lens, &problem.query_start_loc);
            let plan =
                Plan::new(&spec, &decode.tiling(), &batch, SplitPolicy::FixedTokens(64)).expect("a plan");
            elsewhere();
            let mut step = decode.step(Capacity::of(&plan)).expect("a step");
            elsewhere();
            let (q, kv) = (uploaded(cuda, &problem.q), uploaded(cuda, &problem.kv));
            let rows = problem.total_q() * spec.shape.num_heads as usize;
            let [out, lse] = [spec.shape.kv_lora_rank as usize, 1].map(|row| {
                elsewhere();
                cuda.buffer((rows * row * 4) as u64).expect("memory")
            });
            let args = MlaDecodeArgs {
                k_scale: problem.k_scale,
                ..MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, problem.softmax_scale)
            };
            elsewhere();
            let binding = decode.bind(&args, problem.total_q() as u32).expect("a binding");
            elsewhere();
            decode.prepare(&mut step, (&plan, dense_table(&problem))).expect("prepared");
            elsewhere();
            decode.record(&step, &binding).expect("recorded");
            elsewhere();
            check_decode(cuda, &problem, decode.rounds_weights(), [&out, &lse]);
            elsewhere();
            let graph = cuda.capture(|| {
                elsewhere();
                decode.record(&step, &binding)
            });
            let graph = graph.expect("captured");
            elsewhere();
            graph.launch().expect("launched");
            check_decode(cuda, &problem, decode.rounds_weights(), [&out, &lse]);
            elsewhere();
        }
        expands(cuda, &elsewhere).expect("a projection and a prefill");
    }
}

/// A projection and a prefill with tensor maps, where the card has them.
fn expands(cuda: &Cuda, elsewhere: &impl Fn()) -> Result<()> {
    let f16 = Dtype::F16;
    let spec = HeadProject {
        input: f16,
        weight: f16.into(),
        output: f16,
        num_heads: 2,
        k: 128,
        n: 128,
        order: WeightOrder::Kn,
        guard: false,
    };
    let buffer = |elements: u64| {
        elsewhere();
        cuda.buffer(elements * 2)
    };
    let (x, w, y) = (buffer(256 * 2 * 128)?, buffer(128 * 2 * 128)?, buffer(256 * 2 * 128)?);
    elsewhere();
    let project = cuda.compile(spec)?;
    let args = HeadProjectArgs {
        x: View::dense(&x, 2, 128),
        weight: WeightView { buffer: &w, offset: 0, head_stride: 128 * 128, row_stride: 128, scales: None },
        y: View::dense(&y, 2, 128),
        scale: 1.0,
        out_scale: 1.0,
        saturates: false,
        guard: None,
    };
    elsewhere();
    let binding = project.bind(&args, 256)?;
    elsewhere();
    let mut step = project.step(256)?;
    elsewhere();
    project.prepare(&mut step, 0..256)?;
    elsewhere();
    project.record(&step, &binding)?;

    let spec = MlaPrefill {
        num_heads: 2,
        qk_nope_head_dim: 128,
        qk_rope_head_dim: 64,
        v_head_dim: 128,
        dtype: f16,
        out: f16,
    };
    let (q, k, pe, v, out, lse) = (
        buffer(256 * 128)?,
        buffer(256 * 128)?,
        buffer(256 * 64)?,
        buffer(256 * 128)?,
        buffer(256 * 128)?,
        buffer(512)?,
    );
    elsewhere();
    let prefill = cuda.compile(spec)?;
    let args = MlaPrefillArgs {
        q_nope: View::dense(&q, 2, 128),
        q_pe: View::dense(&pe, 2, 64),
        k_nope: View::dense(&k, 2, 128),
        k_pe: View::dense(&pe, 2, 64),
        v: View::dense(&v, 2, 128),
        out: View::dense(&out, 2, 128),
        lse: View::dense(&lse, 2, 1),
        softmax_scale: 0.1,
        v_scale: 1.0,
    };
    elsewhere();
    let binding = prefill.bind(&args, PrefillExtent { tokens: 128, keys: 128, rows: 128 })?;
    elsewhere();
    let mut step = prefill.step(2)?;
    elsewhere();
    prefill.prepare(&mut step, &[PrefillSequence::causal(0, 128, 0, 128)])?;
    elsewhere();
    prefill.record(&step, &binding)?;
    elsewhere();
    let got = cuda.download(&out, 256 * 128 * 2)?;
    assert!(got.iter().all(|&byte| byte == 0), "the mean of zeros");
    Ok(())
}

/// On a fresh thread, and with another context of the same card current.
fn another_context_may_be_current() -> Outcome {
    let cuda = cuda()?;
    // SAFETY: it is looked for, not called.
    if unsafe { sys::culib().get::<unsafe extern "C" fn()>(b"cuCtxCreate_v4") }.is_err() {
        return Err(Ignored("the driver has no cuCtxCreate_v4".into()));
    }
    let other = CudaContext::new_non_primary(0, 0).expect("another context");
    std::thread::scope(|scope| scope.spawn(|| works_beside(&cuda, &other)).join().expect("it works"));
    std::thread::scope(|scope| {
        scope.spawn(|| works_beside(&cuda, cuda.stream().context())).join().expect("it works")
    });
    works_beside(&cuda, &other);
    Ok(())
}

/// With the context of the other card current, both ways.
fn another_card_may_be_current() -> Outcome {
    let first = cuda()?;
    let second = Cuda::new(1).map_err(|error| Ignored(format!("two cards are needed: {error}")))?;
    for (cuda, other) in [(&first, &second), (&second, &first)] {
        std::thread::scope(|scope| {
            scope.spawn(|| works_beside(cuda, other.stream().context())).join().expect("it works");
        });
    }
    Ok(())
}

crate::tests![
    memory_is_the_hosts_again_after_an_upload,
    tables_are_staged_before_the_next_prepare,
    uploads_within_a_capture_are_refused,
    another_context_may_be_current,
    another_card_may_be_current,
];
