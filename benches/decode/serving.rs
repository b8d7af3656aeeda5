//! A serving shape: a batch that decodes from 1024 tokens to 8192, sampled on the way.

use serde_json::json;
use wgpu_mla::{
    Batch, Capacity, DecodeOptions, Dtype, KvSpec, KvView, MlaDecode, MlaDecodeArgs, MlaShape, PageTable,
    Plan, SplitPolicy,
};

use super::problem::{Pool, SOFTMAX_SCALE};
use super::workload::PAGE_SIZE;
use crate::support::Result;
use crate::support::args::Args;
use crate::support::device::{Layers, Timed};
use crate::support::paint::Paint;
use crate::support::record::{Records, figure, micros};

/// Layers of DeepSeek-V3: tokens/s are those of a model that does nothing but this attention.
const LAYERS: f64 = 61.0;

/// Bytes of a token in a bf16 cache.
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

pub fn shapes(device: &impl Timed, args: &Args) -> Vec<Shape> {
    let all = match () {
        () if args.test => vec![Shape { concurrency: 3, from: 64, to: 256, every: 96 }],
        () if device.is_small() && !args.full => {
            vec![Shape { concurrency: 1, from: 1024, to: 4096, every: 1024 }]
        }
        () => vec![
            Shape { concurrency: 1, from: 1024, to: 8192, every: 64 },
            Shape { concurrency: 512, from: 1024, to: 8192, every: 256 },
        ],
    };
    all.into_iter().filter(|shape| args.wants(&shape.name())).collect()
}

/// Sequences whose caches share a buffer and a binding. A batch larger than a binding is several of them, decoded
/// one after the other as a host would.
struct Part<D: Timed> {
    layers: Layers<MlaDecode, D>,
    plan: Plan,
    table: Vec<i32>,
    /// Where each sequence's query token is.
    starts: Vec<i32>,
}

pub fn run(
    device: &impl Timed,
    shapes: &[Shape],
    args: &Args,
    ceiling: f64,
    records: &mut Records,
) -> Result<()> {
    if shapes.is_empty() {
        return Ok(());
    }
    println!(
        "\nServing: decode steps while every sequence grows; tokens/s with the attention of {LAYERS} layers alone.\n\n\
         | shape | variant | samples | parts | us first, last | KV GB/s | ceiling | tokens/s |\n|---|---|---|---|---|---|---|---|"
    );
    for shape in shapes {
        let mut parts = parts(device, shape, args)?;
        let replays = if args.test { 2 } else { args.replays().min(7) };
        let (mut seconds, mut bytes, mut points) = (0.0, 0.0, Vec::new());
        for context in (shape.from..=shape.to).step_by(shape.every as usize) {
            for part in &mut parts {
                part.prepare(context, args)?;
            }
            let timing = device.time(replays, |recorder, call| {
                parts.iter().try_for_each(|part| part.layers.record(recorder, call))
            })?;
            seconds += timing.median;
            bytes += f64::from(shape.concurrency) * f64::from(context) * ROW_BYTES as f64;
            points.push((context, timing.median * 1e6));
        }
        let rate = bytes / seconds / 1e9;
        let tokens = f64::from(shape.concurrency) * points.len() as f64 / (seconds * LAYERS);
        let variant = parts[0].layers.op.variant();
        let (first, last) = (points[0].1, points[points.len() - 1].1);
        print!("| {} | {variant} | {} | {} ", shape.name(), points.len(), parts.len());
        print!("| {}, {} | {} ", micros(first), micros(last), figure(rate));
        println!("| {} % | {} |", figure(100.0 * rate / ceiling), figure(tokens));
        records.add(json!({
            "workload": shape.name(), "variant": variant, "concurrency": shape.concurrency, "parts": parts.len(),
            "gb_s": rate, "share": rate / ceiling, "tokens_s": tokens, "layers": LAYERS, "us_by_context": points,
        }));
    }
    Ok(())
}

fn parts<D: Timed>(device: &D, shape: &Shape, args: &Args) -> Result<Vec<Part<D>>> {
    let sequence_bytes = u64::from(shape.max_pages() * PAGE_SIZE) * ROW_BYTES;
    let fit = u32::try_from(device.largest_binding() / sequence_bytes).unwrap_or(u32::MAX).max(1);
    let most = if args.test { 2 } else { fit };
    let count = shape.concurrency.div_ceil(most);
    let cut = |part: u32| shape.concurrency * part / count;
    (0..count).map(|part| Part::new(device, shape, [cut(part), cut(part + 1)], args)).collect()
}

impl<D: Timed> Part<D> {
    fn new(device: &D, shape: &Shape, [begin, end]: [u32; 2], args: &Args) -> Result<Self> {
        let sequences = end - begin;
        let num_pages = sequences * shape.max_pages();
        let spec = MlaDecode {
            shape: MlaShape { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64 },
            kv: KvSpec { layout: Dtype::Bf16.into(), page_size: PAGE_SIZE, num_pages },
            query: Dtype::Bf16,
            out: Dtype::Bf16,
        };
        let layer_stride = spec.cache_bytes();
        // Even the shortest contexts must miss the L2.
        let used = u64::from(shape.concurrency) * u64::from(shape.from) * ROW_BYTES;
        let copies = if device.is_small() { 1 } else { ROTATED_BYTES.div_ceil(used).clamp(1, 64) };
        let pool = Pool::new(device, Dtype::Bf16, layer_stride / 2 * copies)?;
        let paint = Paint::query(spec.query);
        let rows = u64::from(sequences * spec.shape.num_heads);
        let q = device.painted(&paint, rows * u64::from(spec.shape.row_elems()))?;
        let out = device.buffer(rows * u64::from(spec.shape.kv_lora_rank) * 2)?;
        let lse = device.buffer(rows * 4)?;
        let options = DecodeOptions { variant: args.variant.clone(), ..Default::default() };
        let decode = device.compile_with(spec, &options)?;
        let layers = (0..copies as u32).map(|layer| {
            let dense = MlaDecodeArgs::dense(&spec, &q, &pool.buffer, &out, &lse, SOFTMAX_SCALE);
            MlaDecodeArgs { kv: KvView { layer_stride, layer, ..dense.kv }, ..dense }
        });
        // Multiples of a prime: consecutive pages are not adjacent in memory.
        let stride = if num_pages.is_multiple_of(7919) { 1 } else { 7919 };
        let table: Vec<i32> =
            (0..u64::from(num_pages)).map(|i| (i * stride % u64::from(num_pages)) as i32).collect();
        let starts: Vec<i32> = (0..=sequences as i32).collect();
        let lens = vec![shape.from as i32; sequences as usize];
        let plan = Plan::new(&spec, &decode.tiling(), &Batch::new(&lens, &starts), SplitPolicy::Auto)?;
        let pages = PageTable::Dense { block_table: &table, max_pages: shape.max_pages() };
        let layers = Layers::new(decode, Capacity::default(), (&plan, pages), layers)?;
        Ok(Self { layers, plan, table, starts })
    }

    fn prepare(&mut self, context: u32, args: &Args) -> Result<()> {
        let Layers { op, step, .. } = &mut self.layers;
        let lens = vec![context as i32; self.starts.len() - 1];
        let mut tiling = op.tiling();
        tiling.target_items = args.items.unwrap_or(tiling.target_items);
        self.plan.update(op.op(), &tiling, &Batch::new(&lens, &self.starts), SplitPolicy::Auto)?;
        let max_pages = (self.table.len() / lens.len()) as u32;
        op.prepare(step, (&self.plan, PageTable::Dense { block_table: &self.table, max_pages }))?;
        Ok(())
    }
}
