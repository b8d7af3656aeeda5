//! Host time of a decode step: plan, prepare, and record with its share of `finish`.

use std::time::Instant;

use wgpu_mla::gpu::{Gpu, LayerBinding, MlaDecode, Step};
use wgpu_mla::{
    Backend, Batch, Dtype, KvSpec, Layer, MlaShape, MlaSpec, PageTable, Plan, Policy, Tiling, wgpu,
};

use crate::support::{Result, median};

const BATCH: usize = 64;
const LAYERS: usize = 61;
const STEPS: usize = 300;
const MAX_PAGES: usize = 8192 / 64;

pub fn run() -> Result<()> {
    let gpu = Gpu::new()?;
    println!("# {}: batch {BATCH}, page 64, ctx up to 8192, {LAYERS} layers", gpu.name());
    let spec = MlaSpec {
        shape: MlaShape { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64 },
        // Small enough for one binding of any device: nothing is attended here, so sequences may share pages.
        kv: KvSpec { dtype: Dtype::Bf16, page_size: 64, num_pages: 1024 },
        query: Dtype::Bf16,
        out: Dtype::Bf16,
    };
    let kv = gpu.buffer(spec.kv.num_slots() * u64::from(spec.shape.row_elems()) * 2)?;
    let q = gpu.buffer((BATCH * 16 * 576 * 2) as u64)?;
    let out = gpu.buffer((BATCH * 16 * 512 * 2) as u64)?;
    let lse = gpu.buffer((BATCH * 16 * 4) as u64)?;
    let mla = gpu.decode(&spec, None)?;
    let layer = Layer::dense(&spec, &q, &kv, &out, &lse, 0.1);
    let bindings =
        (0..LAYERS).map(|_| mla.bind(BATCH as u32, &layer)).collect::<std::result::Result<Vec<_>, _>>()?;

    // Planned as for a large card, so that the figure means the same on every machine.
    let tiling = Tiling { target_items: 512, min_split_tokens: 32, ..mla.tiling() };
    let block_table: Vec<i32> = (0..BATCH * MAX_PAGES).map(|i| (i * 7919 % 1024) as i32).collect();
    let starts: Vec<i32> = (0..=BATCH as i32).collect();
    let (mut plan, mut step) = (Plan::default(), mla.step(Default::default())?);
    let [mut plans, mut prepares, mut records, mut passes] = [const { Vec::new() }; 4];
    for turn in 0..STEPS {
        let lens: Vec<i32> = (0..BATCH).map(|i| (8192 - STEPS - i + turn) as i32).collect();

        let begin = Instant::now();
        plan.update(&spec, &tiling, &Batch::new(&lens, &starts), Policy::Auto)?;
        plans.push(begin.elapsed().as_secs_f64());

        let begin = Instant::now();
        let pages = PageTable::Dense { block_table: &block_table, max_pages: MAX_PAGES };
        mla.prepare(&gpu.queue, &mut step, &plan, pages)?;
        prepares.push(begin.elapsed().as_secs_f64());

        records.push(record(&gpu, |encoder| {
            bindings.iter().for_each(|binding| mla.record(encoder, &step, binding));
        }));
        passes.push(record(&gpu, |encoder| one_pass(encoder, &mla, &step, &bindings)));
        // Only the uploads are submitted.
        gpu.queue.submit([]);
        if turn % 16 == 15 {
            gpu.device.poll(wgpu::PollType::wait_indefinitely())?;
        }
    }
    println!("{} work items, {} partial results", plan.items.len(), plan.num_slots);
    println!("| what | us, median | us, p99 |\n|---|---|---|");
    for (what, times) in [
        ("plan", &mut plans),
        ("prepare", &mut prepares),
        ("record, a pass a layer: a layer", &mut records),
        ("record, one pass: a layer", &mut passes),
    ] {
        let middle = median(times);
        println!("| {what} | {:.1} | {:.1} |", middle * 1e6, times[times.len() * 99 / 100] * 1e6);
    }
    Ok(())
}

fn one_pass(encoder: &mut wgpu::CommandEncoder, mla: &MlaDecode, step: &Step, bindings: &[LayerBinding]) {
    let mut pass = encoder.begin_compute_pass(&Default::default());
    bindings.iter().for_each(|binding| mla.record_in(&mut pass, step, binding));
}

/// Seconds a layer to record and finish; the commands are dropped.
fn record(gpu: &Gpu, record: impl FnOnce(&mut wgpu::CommandEncoder)) -> f64 {
    let begin = Instant::now();
    let mut encoder = gpu.device.create_command_encoder(&Default::default());
    record(&mut encoder);
    let commands = encoder.finish();
    let seconds = begin.elapsed().as_secs_f64() / LAYERS as f64;
    drop(commands);
    seconds
}
