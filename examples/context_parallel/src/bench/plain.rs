//! One rank through a `ContextParallel`, over a plain decode.

use std::time::Duration;

use mla_support::paint::Rng;
use wgpu_mla::communicator::{Communicator, InProcess};
use wgpu_mla::{
    Batch, ContextParallel, ContextParallelSpec, Dtype, Error, KvSpec, MlaDecode, MlaDecodeArgs, MlaShape,
    PageTable, Plan, SplitPolicy,
};

use super::{Bench, Launch, us};
use crate::rank::upload;

const HEADS: u32 = 16;
const PAGE: u32 = 64;

pub fn run<D: Launch>(bench: &Bench<'_, D>) -> Result<(), Error> {
    let Bench { device, .. } = *bench;
    let (sequences, len) = (D::SEQUENCES, if D::HAS_GRAPHS { 8192 } else { 1024 });
    let shape = MlaShape { num_heads: HEADS, kv_lora_rank: 512, qk_rope_head_dim: 64 };
    let kv = KvSpec { layout: Dtype::Bf16.into(), page_size: PAGE, num_pages: sequences * len / PAGE };
    let spec = MlaDecode { shape, kv, query: Dtype::Bf16, out: Dtype::F32 };
    let mut rng = Rng(3);
    let values: Vec<f32> = (0..sequences * HEADS * 576).map(|_| rng.randn()).collect();
    let q = upload(device, &Dtype::Bf16.encode_all(&values))?;
    let cache = device.buffer(spec.cache_bytes())?;
    let page: Vec<f32> = (0..PAGE * 576).map(|_| rng.randn() * 0.3).collect();
    let page = Dtype::Bf16.encode_all(&page);
    for at in 0..u64::from(kv.num_pages) {
        device.upload(&cache, at * page.len() as u64, &page)?;
    }

    let mla = device.compile(spec)?;
    let lens = vec![len as i32; sequences as usize];
    let starts: Vec<i32> = (0..=sequences as i32).collect();
    let plan = Plan::new(&spec, &mla.tiling(), &Batch::new(&lens, &starts), SplitPolicy::Auto)?;
    let table: Vec<i32> = (0..kv.num_pages as i32).collect();
    let mut step = mla.step(Default::default())?;
    mla.prepare(&mut step, (&plan, PageTable::Dense { block_table: &table, max_pages: len / PAGE }))?;

    let [out, lse] = [device.buffer(spec.out_bytes(sequences))?, device.buffer(spec.lse_bytes(sequences))?];
    let dense = MlaDecodeArgs::dense(&spec, &q, &cache, &out, &lse, 0.114_721);
    let plain = mla.bind(&dense, sequences)?;
    let alone = InProcess::group(1, Duration::from_secs(5))?;
    let alone: &dyn Communicator<D> = &alone[0];
    let mut cp = ContextParallel::new(device, ContextParallelSpec::of(&spec, 0, 1, sequences))?;
    cp.prepare(sequences)?;
    let (out, lse) = cp.partial();
    let through = mla.bind(&MlaDecodeArgs { out, lse, ..dense }, sequences)?;

    let plain = device.again(D::HAS_GRAPHS, || mla.run(&step, &plain))?;
    let through = device.again(D::HAS_GRAPHS, || {
        mla.run(&step, &through)?;
        cp.combine(alone)
    })?;
    // In turns, since clocks move.
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..3 {
        times[0].push(bench.time(&*plain)?);
        times[1].push(bench.time(&*through)?);
    }
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    bench.say(&format!(
        "\n{sequences} x {len} tokens, {HEADS} heads, bf16, on {}\n\n\
         | plain decode us | world 1 through a ContextParallel us | ratio |\n|---|---|---|\n| {} | {} | {:.3} |",
        device.name(),
        us(times[0][1]),
        us(times[1][1]),
        times[1][1] / times[0][1],
    ));
    Ok(())
}
