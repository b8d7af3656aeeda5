//! `indexer_append` and `indexer_query`, one after the other as in a layer's step.

use mla_support::index_rows::{Codes, same_codes, same_scale};
use mla_support::reference::{IndexNorm, IndexRows, index_keys, index_queries};
use serde_json::{Value, json};
use wgpu_mla::{
    Dtype, IndexFormat, IndexSpec, IndexerAppend, IndexerAppendArgs, IndexerQuery, IndexerQueryArgs,
    IndexerQueryBatch, RopeAppendBatch, RopeFrequencies, View,
};

use crate::support::Result;
use crate::support::args::Args;
use crate::support::device::{Layers, Timed};
use crate::support::paint::Paint;
use crate::support::record::{Records, figure, micros, timing_fields};

const INPUT: Dtype = Dtype::Bf16;
const PAGE_SIZE: u32 = 64;
const MAX_POSITION: u32 = 16_384;
const EPS: f32 = 1e-6;
/// Least total bytes of the rotated buffers: more than any card's L2, so that each call misses it.
const ROTATED_BYTES: u64 = 300_000_000;

/// A batch, one new token each.
#[derive(Clone, Copy)]
struct Shape {
    tokens: u32,
    heads: u32,
}

impl Shape {
    fn name(&self) -> String {
        format!("append + query {} tokens x{} {INPUT} to e4m3", self.tokens, self.heads)
    }

    fn index(&self) -> IndexSpec {
        IndexSpec { format: IndexFormat::DEEPSEEK_V32, page_size: PAGE_SIZE, num_pages: self.tokens }
    }

    fn rows(&self) -> u64 {
        u64::from(self.tokens) * u64::from(self.heads)
    }

    /// Slots of the tokens: each in a page of its own.
    fn slots(&self) -> Vec<i64> {
        let tokens = i64::from(self.tokens);
        let slot = |token: i64| {
            (token * 7919 + 3) % tokens * i64::from(PAGE_SIZE) + token * 7 % i64::from(PAGE_SIZE)
        };
        (0..tokens).map(slot).collect()
    }

    fn positions(&self) -> Vec<i32> {
        (0..self.tokens as i32).map(|token| token * 131 % MAX_POSITION as i32).collect()
    }

    /// Bytes read and written by both, without the LayerNorm's weights and the angles.
    fn bytes(&self) -> u64 {
        let tokens = u64::from(self.tokens);
        tokens * (128 * INPUT.bytes() as u64 + 132) + self.rows() * (128 * INPUT.bytes() as u64 + 128 + 8)
    }
}

pub fn run<D: Timed>(device: &D, args: &Args, records: &mut Records) -> Result<()> {
    let tokens: &[u32] = match (args.test, device.is_small() && !args.full) {
        (true, _) => &[5],
        (_, true) => &[64],
        _ => &[1, 64, 4096],
    };
    let shapes = tokens.iter().flat_map(|&tokens| [64, 32].map(|heads| Shape { tokens, heads }));
    let shapes: Vec<_> = shapes.filter(|shape| args.wants(&shape.name())).collect();
    if args.list {
        shapes.iter().for_each(|shape| println!("{}", shape.name()));
        return Ok(());
    }
    if shapes.is_empty() {
        return Ok(());
    }
    println!(
        "# indexer_append and indexer_query on {}\n\nus: device time of both, many in a pass or graph; alone: a pass or launch for each pair. \
         append, query: of each by itself.\n",
        device.name()
    );
    println!(
        "| shape | us | min | alone | append | query | GB/s | host | checked |\n|---|---|---|---|---|---|---|---|---|"
    );
    for shape in shapes {
        match time(device, &shape, args) {
            Ok(record) => records.add(record),
            Err(error) => records.fail(&shape.name(), error.as_ref()),
        }
    }
    Ok(())
}

fn time<D: Timed>(device: &D, shape: &Shape, args: &Args) -> Result<Value> {
    let (index, heads, tokens) = (shape.index(), shape.heads, u64::from(shape.tokens));
    let (paint, floats) = (Paint::query(INPUT), Paint::new(Dtype::F32));
    let copies = if device.is_small() { 1 } else { ROTATED_BYTES.div_ceil(shape.bytes()).clamp(2, 128) };
    let k = device.painted(&paint, copies * tokens * 128)?;
    let q = device.painted(&paint, copies * shape.rows() * 128)?;
    let weights = device.painted(&floats, copies * shape.rows())?;
    let norm = device.painted(&floats, 256)?;
    let norm_bias = device.buffer(512)?;
    let cache = device.buffer(copies * index.cache_bytes())?;
    let (q_out, weights_out) =
        (device.buffer(copies * shape.rows() * 128)?, device.buffer(copies * shape.rows() * 4)?);
    let table = RopeFrequencies::plain(64, 10_000.0)?.cos_sin(MAX_POSITION)?;
    let (cos_sin, positions) = (device.buffer(u64::from(MAX_POSITION) * 256)?, device.buffer(tokens * 4)?);
    device.upload(&cos_sin, 0, &Dtype::F32.encode_all(&table))?;
    let places: Vec<u8> = shape.positions().iter().flat_map(|position| position.to_le_bytes()).collect();
    device.upload(&positions, 0, &places)?;

    let appended = |copy: u64| IndexerAppendArgs {
        k: View { offset: copy * tokens * 128, ..View::dense(&k, 1, 128) },
        norm_weight: &norm,
        norm_bias: &norm_bias,
        norm_eps: EPS,
        positions: &positions,
        cos_sin: &cos_sin,
        max_position: MAX_POSITION,
        cache: index.view_of_layer(&cache, copy as u32),
    };
    let rotated = |copy: u64| {
        let at = |buffer, dim: u32| View {
            offset: copy * shape.rows() * u64::from(dim),
            ..View::dense(buffer, heads, dim)
        };
        IndexerQueryArgs {
            q: at(&q, 128),
            weights: at(&weights, 1),
            q_out: at(&q_out, 128),
            weights_out: at(&weights_out, 1),
            positions: &positions,
            cos_sin: &cos_sin,
            max_position: MAX_POSITION,
            weight_scale: weight_scale(shape),
        }
    };
    let append = device.compile(IndexerAppend { index, input: INPUT })?;
    let append =
        Layers::new(append, shape.tokens, RopeAppendBatch::slots(&shape.slots()), (0..copies).map(appended))?;
    let query = device.compile(IndexerQuery { format: index.format, num_heads: heads, input: INPUT })?;
    let batch = IndexerQueryBatch::tokens(0..shape.tokens);
    let query = Layers::new(query, shape.tokens, batch, (0..copies).map(rotated))?;
    append.run_first()?;
    query.run_first()?;
    let keys = check_keys(device, shape, &paint, &floats, &table, &cache)?;
    let queries = check_queries(device, shape, [&paint, &floats], &table, [&q_out, &weights_out])?;

    let [both, alone] = device.time_both(args.replays(), |recorder, call| {
        append.record(recorder, call)?;
        query.record(recorder, call)
    })?;
    let of_append = device.time(args.replays(), |recorder, call| append.record(recorder, call))?;
    let of_query = device.time(args.replays(), |recorder, call| query.record(recorder, call))?;
    let us = |seconds: f64| seconds * 1e6;
    let rate = shape.bytes() as f64 / both.median / 1e9;
    print!("| {} | {} | {} ", shape.name(), micros(us(both.median)), micros(us(both.min)));
    print!(
        "| {} | {} | {} ",
        micros(us(alone.median)),
        micros(us(of_append.median)),
        micros(us(of_query.median))
    );
    println!("| {} | {} | {keys} keys, {queries} queries |", figure(rate), figure(us(both.host)));
    let mut record = json!({
        "workload": shape.name(), "tokens": shape.tokens, "heads": heads, "us_alone": us(alone.median),
        "us_append": us(of_append.median), "us_query": us(of_query.median), "gb_s": rate,
    });
    if let Some(fields) = record.as_object_mut() {
        fields.extend(timing_fields(&both));
    }
    Ok(record)
}

fn weight_scale(shape: &Shape) -> f32 {
    1.0 / ((shape.heads * 128) as f32).sqrt()
}

/// The first tokens of the first copy.
fn some(shape: &Shape) -> usize {
    (shape.tokens as usize).min(64)
}

fn check_keys<D: Timed>(
    device: &D,
    shape: &Shape,
    paint: &Paint,
    floats: &Paint,
    table: &[f32],
    cache: &D::Buffer,
) -> Result<usize> {
    let (index, count) = (shape.index(), some(shape));
    let x = &paint.values[..count * 128];
    let (positions, bias) = (shape.positions(), [0.0; 128]);
    let rows = IndexRows { format: index.format, x, num_heads: 1, positions: &positions, cos_sin: table };
    let keys = index_keys(&rows, &IndexNorm { weight: &floats.values[..128], bias: &bias, eps: EPS.into() });
    let bytes = device.download(cache, index.cache_bytes())?;
    let (page_size, page_bytes) = (PAGE_SIZE as usize, index.page_bytes() as usize);
    let mut codes = Codes::default();
    for (key, slot) in keys.chunks(128).zip(shape.slots()) {
        let (page, offset) = (slot as usize / page_size * page_bytes, slot as usize % page_size);
        let scale = Dtype::F32.decode_at(&bytes[page + page_size * 128 + 4 * offset..][..4], 0);
        let is_scale = |want| same_scale(&index.format, scale, want);
        same_codes(&index.format, key, &bytes[page + offset * 128..][..128], is_scale, &mut codes)?;
    }
    codes.finish()?;
    Ok(count)
}

fn check_queries<D: Timed>(
    device: &D,
    shape: &Shape,
    [paint, floats]: [&Paint; 2],
    table: &[f32],
    [q_out, weights_out]: [&D::Buffer; 2],
) -> Result<usize> {
    let (format, num_heads) = (shape.index().format, shape.heads as usize);
    let count = some(shape) * num_heads;
    let (positions, x) = (shape.positions(), &paint.values[..count * 128]);
    let want = index_queries(&IndexRows { format, x, num_heads, positions: &positions, cos_sin: table });
    let bytes = device.download(q_out, count as u64 * 128)?;
    let weights = Dtype::F32.decode_all(&device.download(weights_out, count as u64 * 4)?);
    let mut codes = Codes::default();
    for (row, query) in want.chunks(128).enumerate() {
        let is_scale = |scale: f64| {
            let want = f64::from(floats.values[row]) * scale * f64::from(weight_scale(shape));
            (f64::from(weights[row]) - want).abs() <= 1e-6 * want.abs()
        };
        same_codes(&format, query, &bytes[row * 128..][..128], is_scale, &mut codes)?;
    }
    codes.finish()?;
    Ok(count)
}
