//! Host time of a step, of a decode alone and of the whole layer: plan, prepare, and record with its share of `finish`.

use std::time::Instant;

use wgpu_mla::gpu::Gpu;
use wgpu_mla::{
    Batch, Binding, Compiled, Device, Dtype, Kernel, KvSpec, KvView, LayerBatch, LayerCapacity, LayerOptions,
    MlaDecode, MlaDecodeArgs, MlaLayer, MlaLayerArgs, MlaShape, Op, PageTable, Plan, RopeLayout, SplitPolicy,
    Step, Tiling, View, wgpu,
};

use crate::support::{Result, median};

const BATCH: usize = 64;
const LAYERS: usize = 61;
const STEPS: usize = 300;
const PAGE_SIZE: usize = 64;
const MAX_PAGES: usize = 8192 / PAGE_SIZE;
const MAX_POSITION: u32 = 8192;

const SPEC: MlaDecode = MlaDecode {
    shape: MlaShape { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64 },
    // Small enough for one binding of any device: nothing is attended here, so sequences may share pages.
    kv: KvSpec {
        layout: wgpu_mla::KvLayout::Plain(Dtype::Bf16),
        page_size: PAGE_SIZE as u32,
        num_pages: 1024,
    },
    query: Dtype::Bf16,
    out: Dtype::Bf16,
};

/// The layer of DeepSeek-V2-Lite.
const LAYER_SPEC: MlaLayer = MlaLayer {
    shape: SPEC.shape,
    qk_nope_head_dim: 128,
    v_head_dim: 128,
    kv: SPEC.kv,
    dtype: Dtype::Bf16,
    query: Dtype::Bf16,
    weight: Dtype::Bf16,
    out: Dtype::Bf16,
    rope: RopeLayout::Interleaved,
    decode_threshold: 1,
    workspace_bytes: 16 << 20,
};

pub fn run() -> Result<()> {
    let gpu = Gpu::new()?;
    println!("# {}: batch {BATCH}, page {PAGE_SIZE}, ctx up to 8192, {LAYERS} layers", gpu.name());
    let kv = gpu.buffer(SPEC.kv.num_slots() * u64::from(SPEC.shape.row_elems()) * 2)?;
    let q = gpu.buffer((BATCH * 16 * 576 * 2) as u64)?;
    let out = gpu.buffer((BATCH * 16 * 512 * 2) as u64)?;
    let lse = gpu.buffer((BATCH * 16 * 4) as u64)?;
    let mla = gpu.compile(SPEC)?;
    let args = MlaDecodeArgs::dense(&SPEC, &q, &kv, &out, &lse, 0.1);
    let bindings = bind(&mla, &args, BATCH as u32)?;

    // Planned as for a large card, so that figures of different machines compare.
    let tiling = Tiling { target_items: 512, min_split_tokens: 32, ..mla.tiling() };
    let block_table: Vec<i32> = (0..BATCH * MAX_PAGES).map(|i| (i * 7919 % 1024) as i32).collect();
    let pages = PageTable::Dense { block_table: &block_table, max_pages: MAX_PAGES as u32 };
    let starts: Vec<i32> = (0..=BATCH as i32).collect();
    let (mut plan, mut step) = (Plan::default(), mla.step(Default::default())?);
    let lens_of = |turn: usize| (0..BATCH).map(|i| (8192 - STEPS - i + turn) as i32).collect::<Vec<_>>();
    println!("| what | us, median | us, p99 |\n|---|---|---|");
    let names = ["plan", "prepare", "record, a pass a layer: a layer", "record, one pass: a layer"];
    table(&gpu, names, |turn| {
        let lens = lens_of(turn);
        Ok([
            seconds(|| Ok(plan.update(&SPEC, &tiling, &Batch::new(&lens, &starts), SplitPolicy::Auto)?))?,
            seconds(|| Ok(mla.prepare(&mut step, (&plan, pages))?))?,
            record(&gpu, |encoder| {
                bindings.iter().try_for_each(|binding| mla.record(encoder, &step, binding))
            })?,
            record(&gpu, |encoder| one_pass(encoder, &mla, &step, &bindings))?,
        ])
    })?;
    println!("| ({} work items, {} partial results) | | |", plan.items.len(), plan.num_partials);
    // Made after the decode was timed: wgpu tracks every object, so these would slow the passes measured above.
    let capacity =
        LayerCapacity { tokens: BATCH as u32, decode_tokens: BATCH as u32, ..LayerCapacity::default() };
    let layer = gpu.compile_with(LAYER_SPEC, &LayerOptions { capacity, ..LayerOptions::default() })?;
    let layer_bindings = bind_layers(&gpu, &layer, &kv, capacity)?;
    let mut step = layer.step(Default::default())?;
    table(&gpu, ["whole layer, plan and prepare", "whole layer, record, one pass: a layer"], |turn| {
        let lens = lens_of(turn);
        // Each sequence's last token: pages are shared, but these slots are distinct.
        let slot = |(seq, &len): (usize, &i32)| {
            let (page, place) = ((len as usize - 1) / PAGE_SIZE, (len as usize - 1) % PAGE_SIZE);
            i64::from(block_table[seq * MAX_PAGES + page]) * PAGE_SIZE as i64 + place as i64
        };
        let slot_mapping: Vec<i64> = lens.iter().enumerate().map(slot).collect();
        let batch = LayerBatch {
            seq_lens: &lens,
            query_start_loc: &starts,
            slot_mapping: &slot_mapping,
            pages,
            shared_prefixes: &[],
            expanded: &[],
        };
        Ok([
            seconds(|| Ok(layer.prepare(&mut step, (&batch, SplitPolicy::Auto))?))?,
            record(&gpu, |encoder| one_pass(encoder, &layer, &step, &layer_bindings))?,
        ])
    })?;
    Ok(())
}

/// Medians over many steps of what a step's parts take, in seconds.
fn table<const N: usize>(
    gpu: &Gpu,
    names: [&str; N],
    mut step: impl FnMut(usize) -> Result<[f64; N]>,
) -> Result<()> {
    let mut times = [const { Vec::new() }; N];
    for turn in 0..STEPS {
        times.iter_mut().zip(step(turn)?).for_each(|(times, took)| times.push(took));
        // Only the uploads are submitted.
        gpu.queue().submit([]);
        if turn % 16 == 15 {
            gpu.device().poll(wgpu::PollType::wait_indefinitely())?;
        }
    }
    for (what, times) in names.iter().zip(&mut times) {
        let middle = median(times);
        println!("| {what} | {:.1} | {:.1} |", middle * 1e6, times[times.len() * 99 / 100] * 1e6);
    }
    Ok(())
}

/// Binds the op once for each layer of the model.
fn bind<O: Op>(
    op: &Compiled<O, Gpu>,
    args: &O::Args<&wgpu::Buffer>,
    room: O::Extent,
) -> Result<Vec<Binding<O, Gpu>>>
where
    Gpu: Kernel<O>,
{
    Ok((0..LAYERS).map(|_| op.bind(args, room)).collect::<wgpu_mla::Result<_>>()?)
}

fn bind_layers(
    gpu: &Gpu,
    layer: &Compiled<MlaLayer, Gpu>,
    kv: &wgpu::Buffer,
    capacity: LayerCapacity,
) -> Result<Vec<Binding<MlaLayer, Gpu>>> {
    let MlaLayer { shape, qk_nope_head_dim: nope, v_head_dim: value, .. } = LAYER_SPEC;
    let MlaShape { num_heads: heads, kv_lora_rank: latent, qk_rope_head_dim: rope } = shape;
    let buffer = |rows: u32, elems: u32| gpu.buffer(u64::from(rows) * u64::from(elems) * 2);
    let q = buffer(capacity.tokens, heads * (nope + rope))?;
    let (kv_c, k_pe) = (buffer(capacity.tokens, latent)?, buffer(capacity.tokens, rope)?);
    let kv_b_proj = buffer(heads * (nope + value), latent)?;
    let cos_sin = buffer(MAX_POSITION, 2 * rope)?;
    let out = buffer(capacity.tokens, heads * value)?;
    let q_nope = View::dense(&q, heads, nope + rope);
    let args = MlaLayerArgs {
        q_nope,
        q_pe: View { offset: nope.into(), ..q_nope },
        kv_c: View::dense(&kv_c, 1, latent),
        k_pe: View::dense(&k_pe, 1, rope),
        kv: KvView::dense(kv, &SPEC),
        kv_b_proj: &kv_b_proj,
        kv_b_scales: None,
        cos_sin: &cos_sin,
        max_position: MAX_POSITION,
        out: View::dense(&out, heads, value),
        softmax_scale: 0.1,
        q_scale: 1.0,
        k_scale: 1.0,
        out_scale: 1.0,
        expanded: None,
        selection: wgpu_mla::Selection::All,
        guard: None,
    };
    bind(layer, &args, capacity)
}

fn one_pass<O: Op>(
    encoder: &mut wgpu::CommandEncoder,
    op: &Compiled<O, Gpu>,
    step: &Step<O, Gpu>,
    bindings: &[Binding<O, Gpu>],
) -> wgpu_mla::Result<()>
where
    Gpu: Kernel<O>,
{
    let mut pass = encoder.begin_compute_pass(&Default::default());
    bindings.iter().try_for_each(|binding| op.record_on(&mut pass, step, binding))
}

fn seconds(run: impl FnOnce() -> Result<()>) -> Result<f64> {
    let begin = Instant::now();
    run()?;
    Ok(begin.elapsed().as_secs_f64())
}

/// Seconds a layer to record and finish; the commands are dropped.
fn record(gpu: &Gpu, record: impl FnOnce(&mut wgpu::CommandEncoder) -> wgpu_mla::Result<()>) -> Result<f64> {
    let begin = Instant::now();
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    record(&mut encoder)?;
    let commands = encoder.finish();
    let seconds = begin.elapsed().as_secs_f64() / LAYERS as f64;
    drop(commands);
    Ok(seconds)
}
