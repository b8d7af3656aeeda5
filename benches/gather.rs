//! Times `kv_gather`. Each shape is compared byte for byte with the oracle first; a wrong one is not timed, and the run ends with status 1.
//!
//! ```text
//! cargo bench --bench gather -- [--only TEXT].. [--replays N] [--json FILE] [--full | --test] [--list]
//! cargo bench --bench gather --features cuda -- --backend cuda
//! ```
//! BENCHMARKS.md says what the figures mean.

#[allow(dead_code)]
mod support;

use mla_support::reference::{GatherPages, kv_gather};
use serde_json::json;
use support::Result;
use support::args::Args;
use support::ceiling::Kind;
use support::device::{Layers, Timed};
use support::paint::Paint;
use support::record::{Records, figure, micros, timing_fields};
use wgpu_mla::{
    Dtype, GatherBatch, GatherRange, KvGather, KvGatherArgs, KvSpec, KvView, MlaShape, PageTable, Slabs, View,
};

const PAGE_SIZE: u32 = 64;
const LATENT: u32 = 512;
const ROPE: u32 = 64;
/// No power of two.
const K_SCALE: f32 = 0.37;
/// The first token gathered: in the middle of a page.
const BEGIN: u32 = 5;

/// Least total bytes of the rotated buffers: more than any card's L2, so that each call misses it.
const ROTATED_BYTES: u64 = 300_000_000;

#[derive(Clone, Copy)]
struct Shape {
    cache: Dtype,
    output: Dtype,
    tokens: u32,
}

impl Shape {
    fn name(&self) -> String {
        format!("{} tokens {} to {}", self.tokens, self.cache, self.output)
    }

    fn spec(&self) -> KvGather {
        let shape = MlaShape { num_heads: 1, kv_lora_rank: LATENT, qk_rope_head_dim: ROPE };
        let num_pages = (self.tokens + BEGIN).div_ceil(PAGE_SIZE);
        let kv = KvSpec { layout: self.cache.into(), page_size: PAGE_SIZE, num_pages };
        KvGather { shape, kv, output: self.output }
    }

    /// Pages in a random order.
    fn block_table(&self) -> Vec<i32> {
        let pages = i64::from(self.spec().kv.num_pages);
        (0..pages).map(|i| ((i * 7919 + 3) % pages) as i32).collect()
    }

    fn range(&self) -> GatherRange {
        GatherRange { sequence: 0, begin: BEGIN, tokens: self.tokens, out_row: 0 }
    }

    fn layer_elems(&self) -> u64 {
        self.spec().kv.num_slots() * u64::from(LATENT + ROPE)
    }

    /// Bytes read and written by one gather, the table included.
    fn bytes(&self) -> u64 {
        let row = u64::from(LATENT + ROPE) * (self.cache.bytes() + self.output.bytes()) as u64;
        u64::from(self.tokens) * row + u64::from(self.spec().kv.num_pages) * 12
    }
}

fn main() {
    support::on_cards!(run);
}

fn run<D: Timed>(gpu: &D, args: &Args) -> Result<()> {
    let tokens: &[u32] = match (args.test, gpu.is_small() && !args.full) {
        (true, _) => &[5, 128],
        (_, true) => &[4096],
        _ => &[4096, 131_072],
    };
    let pairs = [
        (Dtype::E4m3, Dtype::Bf16),
        (Dtype::E4m3, Dtype::F16),
        (Dtype::E4m3, Dtype::E4m3),
        (Dtype::Bf16, Dtype::Bf16),
    ];
    let shape = |&(cache, output)| tokens.iter().map(move |&tokens| Shape { cache, output, tokens });
    let shapes = pairs.iter().flat_map(shape);
    let shapes: Vec<Shape> = shapes.filter(|shape| args.wants(&shape.name())).collect();
    if args.list {
        shapes.iter().for_each(|shape| println!("{}", shape.name()));
        return Ok(());
    }
    let (ceiling, bytes) = gpu.ceiling(Kind::Copy, args.test)?;
    let mut records = Records::new("gather", gpu.facts());
    records.note("copy_ceiling_gb_s", ceiling);
    records.note("copy_ceiling_bytes", 2 * bytes);
    println!(
        "# kv_gather on {}\n\nus: device time, many gathers in a pass or graph; alone: a pass or launch for each. \
         GB/s: read and written; ceiling: share of this run's copy ceiling, {} GB/s.\n",
        gpu.name(),
        figure(ceiling)
    );
    println!(
        "| shape | us | min | alone | GB/s | ceiling | host | bytes |\n|---|---|---|---|---|---|---|---|"
    );
    for shape in &shapes {
        match time(gpu, shape, ceiling, args) {
            Ok(record) => records.add(record),
            Err(error) => records.fail(&shape.name(), error.as_ref()),
        }
    }
    records.save(args.json.as_deref())
}

fn time<D: Timed>(gpu: &D, shape: &Shape, ceiling: f64, args: &Args) -> Result<serde_json::Value> {
    let paint = Paint::new(shape.cache);
    let copies = if gpu.is_small() { 1 } else { ROTATED_BYTES.div_ceil(shape.bytes()).clamp(2, 128) };
    let row = u64::from(LATENT + ROPE);
    let cache = gpu.painted(&paint, copies * shape.layer_elems())?;
    let out_elems = u64::from(shape.tokens) * row;
    let out = gpu.buffer(copies * out_elems * shape.output.bytes() as u64)?;
    let layer = |copy: u64| KvGatherArgs {
        kv: KvView {
            buffer: &cache,
            offset: 0,
            layer_stride: shape.layer_elems() * shape.cache.bytes() as u64,
            layer: copy as u32,
            block_stride: u64::from(PAGE_SIZE) * row * shape.cache.bytes() as u64,
            slabs: Slabs::ONE,
        },
        k_scale: if shape.cache == Dtype::E4m3 { K_SCALE } else { 1.0 },
        out: View { offset: copy * out_elems, ..View::dense(&out, 1, LATENT + ROPE) },
    };
    let table = shape.block_table();
    let batch = GatherBatch {
        pages: PageTable::Dense { block_table: &table, max_pages: table.len() as u32 },
        seq_lens: &[(shape.tokens + BEGIN) as i32],
        ranges: &[shape.range()],
    };
    let gather = gpu.compile(shape.spec())?;
    let gather = Layers::new(gather, table.len() as u32, batch, (0..copies).map(layer))?;
    gather.run_first()?;
    let right = check(gpu, shape, &paint, &out)?;

    let [together, alone] = gpu.time_both(args.replays(), |recorder, call| gather.record(recorder, call))?;
    let rate = shape.bytes() as f64 / together.median / 1e9;
    let us = |seconds: f64| seconds * 1e6;
    print!("| {} | {} | {} ", shape.name(), micros(us(together.median)), micros(us(together.min)));
    print!("| {} | {} ", micros(us(alone.median)), figure(rate));
    println!("| {} % | {} | {right} |", figure(100.0 * rate / ceiling), figure(us(together.host)));
    let mut record = json!({
        "workload": shape.name(), "cache": shape.cache.name(), "output": shape.output.name(), "tokens": shape.tokens,
        "us_alone": us(alone.median), "gb_s": rate, "share": rate / ceiling,
    });
    if let Some(fields) = record.as_object_mut() {
        fields.extend(timing_fields(&together));
    }
    Ok(record)
}

/// Compares the bytes of every row of the first gather.
fn check<D: Timed>(gpu: &D, shape: &Shape, paint: &Paint, out: &D::Buffer) -> Result<String> {
    let row_elems = (LATENT + ROPE) as usize;
    let bytes = shape.tokens as usize * row_elems * shape.output.bytes();
    let (table, mut want) = (shape.block_table(), vec![0; bytes]);
    let oracle = GatherPages {
        kv_cache: &paint.codes(0..shape.layer_elems()),
        dtype: shape.cache,
        page_size: PAGE_SIZE as usize,
        row_elems,
        block_table: &table,
        max_pages: table.len(),
        k_scale: if shape.cache == Dtype::E4m3 { K_SCALE } else { 1.0 },
    };
    kv_gather(&oracle, &[shape.range()], shape.output, &mut want);
    let got = gpu.download(out, bytes as u64)?;
    match got.iter().zip(&want).position(|(got, want)| got != want) {
        Some(at) => Err(format!("byte {at} is not the oracle's").into()),
        None => Ok(format!("{} rows equal", shape.tokens)),
    }
}
