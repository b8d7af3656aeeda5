//! A serving shape: a batch that decodes from 1024 tokens to 8192, sampled on the way.

use serde_json::json;
use wgpu_mla::gpu::{Gpu, LayerBinding, MlaDecode, Step};
use wgpu_mla::{Backend, Batch, Dtype, KvSpec, KvView, Layer, MlaShape, MlaSpec, PageTable, Plan, Policy};

use super::problem::{Pool, SOFTMAX_SCALE};
use super::workload::PAGE_SIZE;
use crate::support::Result;
use crate::support::args::Args;
use crate::support::clock::{Clock, Passes, is_small};
use crate::support::paint::{Canvas, Paint};
use crate::support::record::{Records, figure, micros};

/// Layers of DeepSeek-V3: tokens a second are those of a model that does nothing but this attention.
const LAYERS: f64 = 61.0;

/// A token of a bf16 cache.
const ROW_BYTES: u64 = (512 + 64) * 2;

const ROTATED_BYTES: u64 = 600_000_000;

pub struct Shape {
    concurrency: u32,
    from: u32,
    to: u32,
    /// Tokens between two samples.
    every: u32,
}

impl Shape {
    fn max_pages(&self) -> u32 {
        self.to.div_ceil(PAGE_SIZE)
    }

    pub fn name(&self) -> String {
        format!("serving H16 kv bf16 concurrency {} ctx {}..{}", self.concurrency, self.from, self.to)
    }
}

pub fn shapes(gpu: Option<&Gpu>, args: &Args) -> Vec<Shape> {
    let all = match gpu {
        None => vec![],
        Some(_) if args.test => vec![Shape { concurrency: 3, from: 64, to: 256, every: 96 }],
        Some(gpu) if is_small(gpu) && !args.full => {
            vec![Shape { concurrency: 1, from: 1024, to: 4096, every: 1024 }]
        }
        Some(_) => vec![
            Shape { concurrency: 1, from: 1024, to: 8192, every: 64 },
            Shape { concurrency: 512, from: 1024, to: 8192, every: 256 },
        ],
    };
    all.into_iter().filter(|shape| args.wants(&shape.name())).collect()
}

/// Sequences whose caches share a buffer and a binding. A batch with more than a binding holds is several of them, decoded
/// one after the other as a host would.
struct Part {
    sequences: u32,
    spec: MlaSpec,
    decode: MlaDecode,
    step: Step,
    plan: Plan,
    table: Vec<i32>,
    bindings: Vec<LayerBinding>,
}

pub fn run(gpu: &Gpu, args: &Args, ceiling: f64, records: &mut Records) -> Result<()> {
    let shapes = shapes(Some(gpu), args);
    if shapes.is_empty() {
        return Ok(());
    }
    println!(
        "\nServing: decode steps while every sequence grows; tokens/s with the attention of {LAYERS} layers alone.\n\n\
         | shape | row | samples | parts | us first, last | KV GB/s | ceiling | tokens/s |\n|---|---|---|---|---|---|---|---|"
    );
    for shape in shapes {
        let mut parts = parts(gpu, &shape, args)?;
        let clock = Clock::new(gpu, if args.test { 2 } else { args.replays().min(7) });
        let (mut seconds, mut bytes, mut points) = (0.0, 0.0, Vec::new());
        for context in (shape.from..=shape.to).step_by(shape.every as usize) {
            for part in &mut parts {
                part.prepare(gpu, context, args)?;
            }
            let timing = clock.time(Passes::One, |pass, call| {
                for part in &parts {
                    part.decode.record_in(pass, &part.step, &part.bindings[call % part.bindings.len()]);
                }
            })?;
            seconds += timing.median;
            bytes += f64::from(shape.concurrency) * f64::from(context) * ROW_BYTES as f64;
            points.push((context, timing.median * 1e6));
        }
        let rate = bytes / seconds / 1e9;
        let tokens = f64::from(shape.concurrency) * points.len() as f64 / (seconds * LAYERS);
        let row = parts[0].decode.variant();
        let (first, last) = (points[0].1, points[points.len() - 1].1);
        print!("| {} | {row} | {} | {} ", shape.name(), points.len(), parts.len());
        print!("| {}, {} | {} ", micros(first), micros(last), figure(rate));
        println!("| {} % | {} |", figure(100.0 * rate / ceiling), figure(tokens));
        records.add(json!({
            "workload": shape.name(), "row": row, "concurrency": shape.concurrency, "parts": parts.len(),
            "gb_s": rate, "share": rate / ceiling, "tokens_s": tokens, "layers": LAYERS, "us_by_context": points,
        }));
    }
    Ok(())
}

fn parts(gpu: &Gpu, shape: &Shape, args: &Args) -> Result<Vec<Part>> {
    let sequence_bytes = u64::from(shape.max_pages() * PAGE_SIZE) * ROW_BYTES;
    let caps = gpu.pipelines.caps();
    let fit = (caps.max_binding_bytes.min(caps.max_buffer_bytes) / sequence_bytes).max(1) as u32;
    let most = if args.test { 2 } else { fit };
    let count = shape.concurrency.div_ceil(most);
    let cut = |part: u32| shape.concurrency * part / count;
    (0..count).map(|part| Part::new(gpu, shape, cut(part + 1) - cut(part), args)).collect()
}

impl Part {
    fn new(gpu: &Gpu, shape: &Shape, sequences: u32, args: &Args) -> Result<Self> {
        let num_pages = sequences * shape.max_pages();
        let spec = MlaSpec {
            shape: MlaShape { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64 },
            kv: KvSpec { dtype: Dtype::Bf16, page_size: PAGE_SIZE, num_pages },
            query: Dtype::Bf16,
            out: Dtype::Bf16,
        };
        let layer_stride = spec.kv.num_slots() * u64::from(spec.shape.row_elems());
        // Even the shortest contexts are to come from memory.
        let used = u64::from(shape.concurrency) * u64::from(shape.from) * ROW_BYTES;
        let copies = if is_small(gpu) { 1 } else { ROTATED_BYTES.div_ceil(used).clamp(1, 64) };
        let pool = Pool::new(gpu, Dtype::Bf16, layer_stride * copies)?;
        let paint = Paint::query(spec.query);
        let rows = u64::from(sequences * spec.shape.num_heads);
        let q = gpu.painted(&paint, rows * u64::from(spec.shape.row_elems()))?;
        let out = gpu.buffer(rows * u64::from(spec.shape.kv_lora_rank) * 2)?;
        let lse = gpu.buffer(rows * 4)?;
        let decode = gpu.decode(&spec, args.variant.as_deref())?;
        let bindings = (0..copies as u32).map(|layer| {
            let dense = Layer::dense(&spec, &q, &pool.buffer, &out, &lse, SOFTMAX_SCALE);
            decode.bind(sequences, &Layer { kv: KvView { layer_stride, layer, ..dense.kv }, ..dense })
        });
        let bindings = bindings.collect::<std::result::Result<Vec<_>, _>>()?;
        let step = decode.step(Default::default())?;
        // Multiples of a prime: no neighbours stay neighbours.
        let stride = if num_pages.is_multiple_of(7919) { 1 } else { 7919 };
        let table = (0..u64::from(num_pages)).map(|i| (i * stride % u64::from(num_pages)) as i32).collect();
        Ok(Self { sequences, spec, decode, step, plan: Plan::default(), table, bindings })
    }

    fn prepare(&mut self, gpu: &Gpu, context: u32, args: &Args) -> Result<()> {
        let lens = vec![context as i32; self.sequences as usize];
        let starts: Vec<i32> = (0..=self.sequences as i32).collect();
        let mut tiling = self.decode.tiling();
        tiling.target_items = args.items.unwrap_or(tiling.target_items);
        self.plan.update(&self.spec, &tiling, &Batch::new(&lens, &starts), Policy::Auto)?;
        let max_pages = self.table.len() / self.sequences as usize;
        let pages = PageTable::Dense { block_table: &self.table, max_pages };
        self.decode.prepare(&gpu.queue, &mut self.step, &self.plan, pages)?;
        Ok(())
    }
}
