//! Times `kv_copy_pages`, `kv_calibrate` and `batch_tables`. Each shape is checked first: copied pages byte for byte, the counts of a
//! calibration with the oracle, tables by the append and the decodes that use them. A wrong one is not timed, and the run ends with status
//! 1.
//!
//! ```text
//! cargo bench --bench small_ops -- [--only TEXT].. [--replays N] [--json FILE] [--full | --test] [--list]
//! cargo bench --bench small_ops --features cuda -- --backend cuda
//! ```
//! BENCHMARKS.md says what the figures mean.

#[allow(dead_code)]
mod support;

/// Its file is in `benches/small_ops`.
mod small_ops {
    pub mod tables;
}

use mla_support::reference::kv_calibrate;
use serde_json::{Value, json};
use small_ops::tables::{self, DeviceTables};
use support::Result;
use support::args::Args;
use support::ceiling::Kind;
use support::clock::Timing;
use support::device::{Layers, Timed};
use support::paint::Paint;
use support::record::{Records, figure, micros, timing_fields};
use wgpu_mla::{
    CalibrationStats, Dtype, KvCalibrate, KvCalibrateArgs, KvCopyPages, KvSpec, KvView, MlaShape, Slabs, View,
};

const PAGE_SIZE: u32 = 64;
const LATENT: u32 = 512;
const ROPE: u32 = 64;
const PAGE_ELEMS: u64 = PAGE_SIZE as u64 * (LATENT + ROPE) as u64;
const INPUT: Dtype = Dtype::Bf16;
/// Elements above 0.134 saturate, as some do.
const K_SCALE: f32 = 0.0003;

/// Least total bytes of the rotated buffers: more than any card's L2, so that each call misses it.
const ROTATED_BYTES: u64 = 300_000_000;

#[derive(Clone, Copy)]
enum Shape {
    Copy { cache: Dtype, pages: u32 },
    Calibrate { tokens: u32 },
    Tables(tables::Shape),
}

impl Shape {
    fn name(&self) -> String {
        match self {
            Self::Copy { cache, pages } => format!("kv_copy_pages {pages} pages {cache}"),
            Self::Calibrate { tokens } => format!("kv_calibrate {tokens} tokens {INPUT}"),
            Self::Tables(shape) => shape.name(),
        }
    }

    /// The sizes in the table for cards, or in a small one for a slow device or a test.
    fn all(args: &Args, is_small: bool) -> Vec<Self> {
        let (pages, tokens, batches): (&[u32], &[u32], &[[u32; 2]]) =
            match (args.test, is_small && !args.full) {
                (true, _) => (&[1, 3], &[5], &[[3, 200], [1, 300]]),
                (_, true) => (&[1, 64], &[64, 1024], &[[8, 1024], [1, 4096]]),
                _ => (&[1, 64, 1024], &[64, 8192], &[[64, 8192], [1, 131_072]]),
            };
        let copy = |cache| pages.iter().map(move |&pages| Self::Copy { cache, pages });
        let copies = [Dtype::Bf16, Dtype::E4m3].into_iter().flat_map(copy);
        let calibrations = tokens.iter().map(|&tokens| Self::Calibrate { tokens });
        let tables =
            batches.iter().map(|&[sequences, bound]| Self::Tables(tables::Shape { sequences, bound }));
        copies.chain(calibrations).chain(tables).filter(|shape| args.wants(&shape.name())).collect()
    }
}

/// GB/s of a kernel that only reads, and of one that only copies.
struct Ceilings {
    read: f64,
    copy: f64,
}

/// What a call moves, and which ceiling that is compared with.
struct Moved {
    bytes: u64,
    ceiling: Kind,
}

fn main() {
    support::on_cards!(run);
}

fn run<D: DeviceTables>(gpu: &D, args: &Args) -> Result<()> {
    let shapes = Shape::all(args, gpu.is_small());
    if args.list {
        shapes.iter().for_each(|shape| println!("{}", shape.name()));
        return Ok(());
    }
    let mut records = Records::new("small_ops", gpu.facts());
    let mut measure = |kind, name: &str| -> Result<f64> {
        let (rate, bytes) = gpu.ceiling(kind, args.test)?;
        records.note(&format!("{name}_ceiling_gb_s"), rate);
        records.note(&format!("{name}_ceiling_bytes"), if kind == Kind::Copy { 2 * bytes } else { bytes });
        Ok(rate)
    };
    let ceilings = Ceilings { read: measure(Kind::Read, "read")?, copy: measure(Kind::Copy, "copy")? };
    println!(
        "# kv_copy_pages, kv_calibrate and batch_tables on {}\n\nus: device time, many calls in a pass or graph; alone: a pass or \
         launch for each. GB/s: read and written; ceiling: share of this run's ceiling, {} GB/s for copies, {} GB/s for calibrations, \
         which only read. The tables of a batch are small: no share.\n",
        gpu.name(),
        figure(ceilings.copy),
        figure(ceilings.read),
    );
    println!(
        "| shape | us | min | alone | GB/s | ceiling | host | checked |\n|---|---|---|---|---|---|---|---|"
    );
    for shape in &shapes {
        let done = match *shape {
            Shape::Copy { cache, pages } => copy_pages(gpu, shape, cache, pages, &ceilings, args),
            Shape::Calibrate { tokens } => calibrate(gpu, shape, tokens, &ceilings, args),
            Shape::Tables(batch) => time_tables(gpu, &batch, args),
        };
        match done {
            Ok(several) => several.into_iter().for_each(|record| records.add(record)),
            Err(error) => records.fail(&shape.name(), error.as_ref()),
        }
    }
    records.save(args.json.as_deref())
}

/// Prints a row, and makes its record with `fields`.
fn report(
    name: &str,
    [together, alone]: &[Timing; 2],
    moved: Option<(&Moved, &Ceilings)>,
    checked: &str,
    fields: Value,
) -> Value {
    let us = |seconds: f64| seconds * 1e6;
    let rate = moved.map(|(moved, _)| moved.bytes as f64 / together.median / 1e9);
    let ceiling = moved.map(|(moved, ceilings)| match moved.ceiling {
        Kind::Read => ceilings.read,
        Kind::Copy => ceilings.copy,
    });
    let share = rate.zip(ceiling).map(|(rate, ceiling)| rate / ceiling);
    let percent = share.map_or("-".into(), |share| format!("{} %", figure(100.0 * share)));
    print!("| {name} | {} | {} ", micros(us(together.median)), micros(us(together.min)));
    print!("| {} | {} | {percent} ", micros(us(alone.median)), figure(rate.unwrap_or(f64::NAN)));
    println!("| {} | {checked} |", figure(us(together.host)));
    let mut record = json!({ "workload": name, "us_alone": us(alone.median), "gb_s": rate, "share": share });
    if let (Some(record), Value::Object(fields)) = (record.as_object_mut(), fields) {
        record.extend(timing_fields(together));
        record.extend(fields);
    }
    record
}

/// How many layers are rotated, of which one call moves `bytes`.
fn layers<D: Timed>(gpu: &D, bytes: u64) -> u64 {
    if gpu.is_small() { 1 } else { ROTATED_BYTES.div_ceil(bytes).clamp(2, 128) }
}

fn copy_pages<D: Timed>(
    gpu: &D,
    shape: &Shape,
    cache: Dtype,
    pages: u32,
    ceilings: &Ceilings,
    args: &Args,
) -> Result<Vec<Value>> {
    let kv = KvSpec { layout: cache.into(), page_size: PAGE_SIZE, num_pages: 2 * pages };
    let layer_elems = u64::from(kv.num_pages) * PAGE_ELEMS;
    let page_bytes = PAGE_ELEMS as usize * cache.bytes();
    // Even pages to odd ones, in a random order of both.
    let mixed = |i: u32, factor: u64, first: u64| (u64::from(i) * factor + first) % u64::from(pages);
    let copies: Vec<(u32, u32)> =
        (0..pages).map(|i| (2 * mixed(i, 7919, 3) as u32, 2 * mixed(i, 101, 5) as u32 + 1)).collect();
    let moved =
        Moved { bytes: 2 * u64::from(pages) * page_bytes as u64 + u64::from(pages) * 8, ceiling: Kind::Copy };
    let num_layers = layers(gpu, moved.bytes);
    let paint = Paint::new(cache);
    let buffer = gpu.painted(&paint, num_layers * layer_elems)?;
    let layer = |layer: u64| KvView {
        buffer: &buffer,
        offset: 0,
        layer_stride: layer_elems * cache.bytes() as u64,
        layer: layer as u32,
        block_stride: page_bytes as u64,
        slabs: Slabs::ONE,
    };
    let dims = MlaShape { num_heads: 1, kv_lora_rank: LATENT, qk_rope_head_dim: ROPE };
    let op = gpu.compile(KvCopyPages { shape: dims, kv })?;
    let op = Layers::new(op, pages, &copies, (0..num_layers).map(layer))?;
    op.run_first()?;

    // The first layer, and the start of the next, which is not to be touched.
    let shown = if num_layers > 1 { layer_elems + PAGE_ELEMS } else { layer_elems };
    let mut want = paint.codes(0..shown);
    for &(from, to) in &copies {
        let page = |page: u32| page as usize * page_bytes..(page as usize + 1) * page_bytes;
        want.copy_within(page(from), page(to).start);
    }
    let got = gpu.download(&buffer, want.len() as u64)?;
    if let Some(at) = got.iter().zip(&want).position(|(got, want)| got != want) {
        return Err(format!("byte {at} of the cache, page {}, is wrong", at / page_bytes).into());
    }
    let times = gpu.time_both(args.replays(), |recorder, call| op.record(recorder, call))?;
    let fields = json!({ "cache": cache.name(), "pages": pages });
    let checked = format!("{} pages equal", kv.num_pages);
    Ok(vec![report(&shape.name(), &times, Some((&moved, ceilings)), &checked, fields)])
}

fn calibrate<D: Timed>(
    gpu: &D,
    shape: &Shape,
    tokens: u32,
    ceilings: &Ceilings,
    args: &Args,
) -> Result<Vec<Value>> {
    let rows = u64::from(tokens);
    let bytes = rows * u64::from(LATENT + ROPE) * INPUT.bytes() as u64 + 2 * CalibrationStats::BYTES;
    let moved = Moved { bytes, ceiling: Kind::Read };
    let num_layers = layers(gpu, bytes);
    let paint = Paint::new(INPUT);
    let latents = gpu.painted(&paint, num_layers * rows * u64::from(LATENT))?;
    let ropes = gpu.painted(&paint, num_layers * rows * u64::from(ROPE))?;
    let stats = (0..num_layers).map(|_| {
        let buffer = gpu.buffer(CalibrationStats::BYTES)?;
        gpu.upload(&buffer, 0, &[0; CalibrationStats::BYTES as usize])?;
        Ok(buffer)
    });
    let stats = stats.collect::<Result<Vec<_>>>()?;
    let layer = |(stats, layer): (_, u64)| {
        let view =
            |buffer, dim: u32| View { offset: layer * rows * u64::from(dim), ..View::dense(buffer, 1, dim) };
        KvCalibrateArgs { kv_c: view(&latents, LATENT), k_pe: view(&ropes, ROPE), k_scale: K_SCALE, stats }
    };
    let op = KvCalibrate {
        shape: MlaShape { num_heads: 1, kv_lora_rank: LATENT, qk_rope_head_dim: ROPE },
        input: INPUT,
    };
    let op = Layers::new(gpu.compile(op)?, (), 0..tokens, stats.iter().zip(0..).map(layer))?;
    op.run_first()?;

    let parts = [LATENT, ROPE].map(|dim| INPUT.decode_all(&paint.codes(0..rows * u64::from(dim))));
    let want = kv_calibrate(&parts.concat(), K_SCALE);
    let got = CalibrationStats::from_bytes(&gpu.download(&stats[0], CalibrationStats::BYTES)?)?;
    if got != want || want.saturated == 0 {
        return Err(format!("{got:?} instead of {want:?}").into());
    }
    let times = gpu.time_both(args.replays(), |recorder, call| op.record(recorder, call))?;
    let checked = format!("amax and counts equal, {} saturated", got.saturated);
    let fields = json!({ "input": INPUT.name(), "tokens": tokens });
    Ok(vec![report(&shape.name(), &times, Some((&moved, ceilings)), &checked, fields)])
}

fn time_tables<D: DeviceTables>(gpu: &D, shape: &tables::Shape, args: &Args) -> Result<Vec<Value>> {
    let problem = tables::Problem::new(gpu, shape)?;
    let checked = problem.check(gpu)?;
    let mut found = Vec::new();
    for (what, checked) in [(tables::What::Slots, checked.0), (tables::What::Lists, checked.1)] {
        let times = gpu.time_both(args.replays(), |recorder, _| problem.record(what, recorder))?;
        let name = format!("{} {}", shape.name(), what.name());
        let fields = json!({ "sequences": shape.sequences, "bound": shape.bound, "what": what.name() });
        found.push(report(&name, &times, None, &checked, fields));
    }
    Ok(found)
}
