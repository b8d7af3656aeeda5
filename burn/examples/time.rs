//! What going through burn costs: host time a call, and device time over that of the bare op.
//!
//! ```text
//! cargo run --release --example time -- [SEQUENCES] [TOKENS] [HEADS]      64 8192 16
//! ```

use std::time::Instant;

use burn::tensor::{DType, Distribution, Tensor};
use wgpu_mla_burn::wgpu_mla::gpu::Gpu;
use wgpu_mla_burn::wgpu_mla::{
    Batch, Compiled, Device, Dtype, KvSpec, KvView, MlaDecode, MlaDecodeArgs, MlaShape, PagePool, Plan,
    SplitPolicy, Step, softmax_scale, wgpu,
};
use wgpu_mla_burn::{CacheOptions, MlaAttentionConfig, MlaDevice, PagedCache, Scales};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Calls of a measurement.
const CALLS: u32 = 200;

fn main() -> Outcome {
    let mut numbers = std::env::args().skip(1).map(|word| word.parse::<u32>());
    let mut number = |usual| numbers.next().unwrap_or(Ok(usual));
    let (sequences, tokens, num_heads) = (number(64)?, number(8192)?, number(16)?);
    let on = MlaDevice::new()?;
    println!("{}, {sequences} x {tokens}, {num_heads} heads, f16", on.gpu().describe());

    let shape = MlaShape { num_heads, kv_lora_rank: 512, qk_rope_head_dim: 64 };
    let num_pages = sequences * tokens.div_ceil(64);
    let kv = KvSpec { layout: Dtype::F16.into(), page_size: 64, num_pages };
    let spec = MlaDecode { shape, kv, query: Dtype::F16, out: Dtype::F16 };
    let cache = on.gpu().buffer(spec.cache_bytes())?;
    let mut pool = PagePool::new(kv)?;
    let seqs: Vec<_> = (0..sequences).map(|_| pool.add()).collect();
    pool.append_batch(&seqs.iter().map(|&seq| (seq, tokens)).collect::<Vec<_>>())?;

    let scale = softmax_scale(128, 64, 1.0, 1.0)?;
    let plain = Gpu::on(on.gpu().adapter().ok_or("no adapter")?, on.gpu().device(), on.gpu().queue());
    let bare = device_time(&plain, spec, &cache, &pool, &seqs, scale)?;
    let shared = device_time(on.gpu(), spec, &cache, &pool, &seqs, scale)?;
    println!("device, the bare op:                      {bare:8.1} us");
    println!("device, bound as burn's buffers have to:  {shared:8.1} us, {:.3} x", shared / bare);

    let (mla, step) = prepared(on.gpu(), spec, &pool, &seqs)?;
    let dims = [sequences as usize, num_heads as usize, 576];
    let q = Tensor::<3>::random(dims, Distribution::Default, on.device()).cast(DType::F16);
    let view = KvView::dense(&cache, &spec);
    let scales = Scales { softmax_scale: scale, k_scale: 1.0 };
    let call = || on.mla_decode(&mla, &step, q.clone(), &view, scales).map(drop);
    let [host, whole] = timed(&on, call)?;
    println!(
        "mla_decode on tensors: host {host:8.1} us a call, until done {whole:8.1} us, {:.3} x",
        whole / bare
    );

    // One new token of one sequence: next to no device time, so that the host's is seen.
    let config = MlaAttentionConfig::new(2048, num_heads as usize, 512, 128, 64, 128);
    let layer = config.init(on.device());
    let mut cache = PagedCache::new(&on, &config, [&layer], &CacheOptions::default())?;
    let dtype = layer.kv_b_proj.weight.val().dtype();
    let sequence = cache.pool().add();
    cache.begin(&mut [(sequence, 1)])?;
    let ones = |dim| Tensor::<2>::ones([1, dim], on.device()).cast(dtype);
    let (q, kv_c, kv_a, x) = (ones(num_heads as usize * 192), ones(512), ones(576), ones(2048));
    let [host, whole] = timed(&on, || cache.attend(0, q.clone(), kv_c.clone(), kv_a.clone()).map(drop))?;
    println!("PagedCache::attend:    host {host:8.1} us a layer, until done {whole:8.1} us");
    let [host, whole] = timed(&on, || layer.forward(x.clone(), &cache, 0).map(drop))?;
    println!("MlaAttention::forward: host {host:8.1} us a layer, until done {whole:8.1} us");
    Ok(())
}

fn prepared(
    gpu: &Gpu,
    spec: MlaDecode,
    pool: &PagePool,
    seqs: &[wgpu_mla_burn::wgpu_mla::SeqId],
) -> Outcome<(Compiled<MlaDecode, Gpu>, Step<MlaDecode, Gpu>)> {
    let mla = gpu.compile(spec)?;
    let starts: Vec<i32> = (0..=seqs.len() as i32).collect();
    let lens = pool.seq_lens(seqs)?;
    let plan = Plan::new(&spec, &mla.tiling(), &Batch::new(&lens, &starts), SplitPolicy::Auto)?;
    let mut step = mla.step(Default::default())?;
    mla.prepare(&mut step, (&plan, pool.block_table(seqs, -1)?.page_table()))?;
    Ok((mla, step))
}

/// Microseconds of the op, of many in one submit.
fn device_time(
    gpu: &Gpu,
    spec: MlaDecode,
    cache: &wgpu::Buffer,
    pool: &PagePool,
    seqs: &[wgpu_mla_burn::wgpu_mla::SeqId],
    scale: f32,
) -> Outcome<f64> {
    let tokens = seqs.len() as u32;
    let (mla, step) = prepared(gpu, spec, pool, seqs)?;
    println!("{}", mla.why());
    let buffers = [spec.query_bytes(tokens), spec.out_bytes(tokens), spec.lse_bytes(tokens)]
        .map(|bytes| gpu.buffer(bytes));
    let [q, out, lse] = buffers;
    let (q, out, lse) = (q?, out?, lse?);
    let binding = mla.bind(&MlaDecodeArgs::dense(&spec, &q, cache, &out, &lse, scale), tokens)?;
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let begin = Instant::now();
        gpu.submit(|mut pass| (0..CALLS).try_for_each(|_| mla.record_on(&mut pass, &step, &binding)))?;
        gpu.download(&lse, 4)?;
        best = best.min(begin.elapsed().as_secs_f64());
    }
    Ok(best * 1e6 / f64::from(CALLS))
}

/// Microseconds a call: until the host has made all of them, and until they are done.
fn timed(on: &MlaDevice, mut call: impl FnMut() -> wgpu_mla_burn::Result<()>) -> Outcome<[f64; 2]> {
    let mut best = [f64::INFINITY; 2];
    for _ in 0..5 {
        on.device().sync()?;
        let begin = Instant::now();
        for _ in 0..CALLS {
            call()?;
        }
        let host = begin.elapsed().as_secs_f64();
        on.device().sync()?;
        let whole = begin.elapsed().as_secs_f64();
        best = [best[0].min(host), best[1].min(whole)];
    }
    Ok(best.map(|seconds| seconds * 1e6 / f64::from(CALLS)))
}
