//! Host time of a decode step: plan, prepare, and record with its share of `finish`.

use std::time::Instant;

use wgpu_mla::gpu::Gpu;
use wgpu_mla::{Backend, Batch, Dtype, KvSpec, Layer, MlaShape, MlaSpec, PagePool, PageTable, Plan, Policy};

use super::{Result, median};

const BATCH: usize = 64;
const LAYERS: usize = 61;
const STEPS: usize = 300;

pub fn run() -> Result<()> {
    let gpu = Gpu::new()?;
    println!("# {}: batch {BATCH}, page 64, ctx up to 8192, {LAYERS} layers", gpu.name());
    let spec = MlaSpec {
        shape: MlaShape { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64 },
        kv: KvSpec { dtype: Dtype::Bf16, page_size: 64, num_pages: 64 * 129 },
        query: Dtype::Bf16,
        out: Dtype::Bf16,
    };
    // One page of real memory would do: nothing is submitted, only prepared and recorded.
    let elems = spec.kv.num_slots() * u64::from(spec.shape.row_elems());
    let kv = gpu.buffer(elems * 2)?;
    let q = gpu.buffer((BATCH * 16 * 576 * 2) as u64)?;
    let out = gpu.buffer((BATCH * 16 * 512 * 2) as u64)?;
    let lse = gpu.buffer((BATCH * 16 * 4) as u64)?;
    let mla = gpu.decode(&spec, None)?;
    let layer = Layer::dense(&spec, &q, &kv, &out, &lse, 0.1);
    let bindings =
        (0..LAYERS).map(|_| mla.bind(BATCH as u32, &layer)).collect::<std::result::Result<Vec<_>, _>>()?;

    let mut pool = PagePool::new(spec.kv)?;
    let sequences: Vec<_> = (0..BATCH).map(|_| pool.add()).collect();
    for (i, &seq) in sequences.iter().enumerate() {
        pool.append(seq, 8192 - STEPS as u32 - i as u32)?;
    }
    let starts: Vec<i32> = (0..=BATCH as i32).collect();
    let (mut plan, mut step) = (Plan::default(), mla.step(Default::default())?);
    let (mut plans, mut prepares, mut records) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..STEPS {
        for &seq in &sequences {
            pool.append(seq, 1)?;
        }
        let lens = pool.seq_lens(&sequences)?;
        let table = pool.block_table(&sequences, -1)?;

        let begin = Instant::now();
        plan.update(&spec, &mla.tiling(), &Batch::new(&lens, &starts), Policy::Auto)?;
        plans.push(begin.elapsed().as_secs_f64());

        let begin = Instant::now();
        let pages = PageTable::Dense { block_table: &table.entries, max_pages: table.max_pages };
        mla.prepare(&gpu.queue, &mut step, &plan, pages)?;
        prepares.push(begin.elapsed().as_secs_f64());

        let begin = Instant::now();
        let mut encoder = gpu.device.create_command_encoder(&Default::default());
        for binding in &bindings {
            mla.record(&mut encoder, &step, binding);
        }
        let commands = encoder.finish();
        records.push(begin.elapsed().as_secs_f64() / LAYERS as f64);
        drop(commands);
        // Only the uploads are submitted.
        gpu.queue.submit([]);
        if plans.len() % 16 == 0 {
            gpu.device.poll(wgpu_mla::wgpu::PollType::wait_indefinitely())?;
        }
    }
    println!("| what | us, median | us, p99 |\n|---|---|---|");
    for (what, times) in [("plan", &mut plans), ("prepare", &mut prepares), ("record, a layer", &mut records)]
    {
        let middle = median(times);
        println!("| {what} | {:.1} | {:.1} |", middle * 1e6, times[times.len() * 99 / 100] * 1e6);
    }
    Ok(())
}
