//! Times `rope_append`, which precedes a decode, and `rope`. Each shape is compared first: rotated queries with the oracle, the cache byte
//! for byte with that of `rope` and `kv_append`. A wrong one is not timed, and the run ends with status 1.
//!
//! ```text
//! cargo bench --bench rope -- [--only TEXT].. [--replays N] [--json FILE] [--full | --test] [--list]
//! cargo bench --bench rope --features cuda -- --backend cuda
//! ```
//! BENCHMARKS.md says what the figures mean.

#[allow(dead_code)]
mod support;

use mla_support::reference::{Rotation, rope};
use serde_json::json;
use support::Result;
use support::args::Args;
use support::device::{Layers, Timed};
use support::paint::Paint;
use support::record::{Records, figure, micros, timing_fields};
use wgpu_mla::{
    Dtype, Kernel, KvAppend, KvAppendArgs, KvSpec, KvView, MlaShape, Op, Rope, RopeAppend, RopeAppendArgs,
    RopeAppendBatch, RopeArgs, RopeFrequencies, RopeLayout, Slabs, View, Yarn,
};

const PAGE_SIZE: u32 = 64;
const LATENT: u32 = 512;
const ROPE: u32 = 64;
const INPUT: Dtype = Dtype::Bf16;
const LAYOUT: RopeLayout = RopeLayout::Interleaved;
const K_SCALE: f32 = 0.25;
const MAX_POSITION: u32 = 16_384;

/// Least total bytes of the rotated buffers: more than any card's L2, so that each call misses it.
const ROTATED_BYTES: u64 = 300_000_000;

/// A batch, one new token each; without a cache only `rope` of its queries, in place.
#[derive(Clone, Copy)]
struct Shape {
    cache: Option<Dtype>,
    tokens: u32,
    heads: u32,
}

impl Shape {
    fn name(&self) -> String {
        let Self { tokens, heads, .. } = self;
        match self.cache {
            Some(cache) => format!("rope_append {tokens} tokens x{heads} {INPUT} to {cache}"),
            None => format!("rope {tokens} tokens x{heads} {INPUT}"),
        }
    }

    fn rope(&self) -> Rope {
        Rope { dtype: INPUT, num_heads: self.heads, rope_dim: ROPE, layout: LAYOUT }
    }

    fn fused(&self, cache: Dtype) -> RopeAppend {
        let shape = MlaShape { num_heads: 1, kv_lora_rank: LATENT, qk_rope_head_dim: ROPE };
        let kv = KvSpec { layout: cache.into(), page_size: PAGE_SIZE, num_pages: self.tokens };
        let append = KvAppend { shape, kv, input: INPUT, guard: false };
        RopeAppend { append, query: INPUT, query_out: INPUT, num_heads: self.heads, layout: LAYOUT }
    }

    /// Each in a page of its own.
    fn slots(&self) -> Vec<i64> {
        let page = |token: u64| (token * 7919 + 3) % u64::from(self.tokens);
        let slot = |token: u64| page(token) * u64::from(PAGE_SIZE) + token * 7 % u64::from(PAGE_SIZE);
        (0..u64::from(self.tokens)).map(|token| slot(token) as i64).collect()
    }

    fn positions(&self) -> Vec<i32> {
        (0..self.tokens).map(|token| (8191 + token * 127).min(MAX_POSITION - 1) as i32).collect()
    }

    fn query_elems(&self) -> u64 {
        u64::from(self.tokens * self.heads * ROPE)
    }

    fn cache_elems(&self) -> u64 {
        u64::from(self.tokens * PAGE_SIZE) * u64::from(LATENT + ROPE)
    }

    /// Bytes read and written by one call, positions, angles and slots included.
    fn bytes(&self) -> u64 {
        let angles = u64::from(self.tokens) * (u64::from(ROPE) * 4 + 4);
        let queries = 2 * self.query_elems() * INPUT.bytes() as u64;
        let row = |cache: Dtype| u64::from(LATENT + ROPE) * (INPUT.bytes() + cache.bytes()) as u64 + 4;
        angles + queries + self.cache.map_or(0, |cache| u64::from(self.tokens) * row(cache))
    }
}

fn main() {
    support::on_cards!(run);
}

fn run<D: Timed>(gpu: &D, args: &Args) -> Result<()> {
    let sizes: &[(u32, u32)] = match (args.test, gpu.is_small() && !args.full) {
        (true, _) => &[(5, 3)],
        (_, true) => &[(64, 16)],
        _ => &[(64, 16), (64, 128), (512, 16)],
    };
    let caches = [Some(Dtype::E4m3), Some(Dtype::Bf16), None];
    let shape = |cache| sizes.iter().map(move |&(tokens, heads)| Shape { cache, tokens, heads });
    let shapes: Vec<Shape> =
        caches.into_iter().flat_map(shape).filter(|shape| args.wants(&shape.name())).collect();
    if args.list {
        shapes.iter().for_each(|shape| println!("{}", shape.name()));
        return Ok(());
    }
    let mut records = Records::new("rope", gpu.facts());
    println!(
        "# rope_append and rope on {}\n\nus: device time, many calls in a pass or graph; alone: a pass or launch for each. \
         GB/s: read and written.\n",
        gpu.name()
    );
    println!("| shape | us | min | alone | GB/s | host | checked |\n|---|---|---|---|---|---|---|");
    for shape in &shapes {
        match time(gpu, shape, args) {
            Ok(record) => records.add(record),
            Err(error) => records.fail(&shape.name(), error.as_ref()),
        }
    }
    records.save(args.json.as_deref())
}

/// The buffers of all layers of a shape.
struct Arrays<B> {
    queries: B,
    rotated: B,
    latents: B,
    ropes: B,
    cache: B,
    positions: B,
    cos_sin: B,
    table: Vec<f32>,
    paint: Paint,
    copies: u64,
}

impl<B> Arrays<B> {
    fn new<D: Timed<Buffer = B>>(gpu: &D, shape: &Shape) -> Result<Self> {
        let (tokens, paint) = (u64::from(shape.tokens), Paint::new(INPUT));
        let copies = if gpu.is_small() { 1 } else { ROTATED_BYTES.div_ceil(shape.bytes()).clamp(2, 128) };
        let yarn = Yarn { mscale: 1.0, mscale_all_dim: 1.0, ..Yarn::new(40.0, 4096.0) };
        let table = RopeFrequencies::yarn(ROPE, 1e4, &yarn)?.cos_sin(MAX_POSITION)?;
        let uploaded = |bytes: &[u8]| -> Result<B> {
            let buffer = gpu.buffer(bytes.len() as u64)?;
            gpu.upload(&buffer, 0, bytes)?;
            Ok(buffer)
        };
        let cache = shape.cache.map_or(0, |dtype| shape.cache_elems() * dtype.bytes() as u64);
        Ok(Self {
            queries: gpu.painted(&paint, copies * shape.query_elems())?,
            rotated: gpu.buffer(copies * shape.query_elems() * INPUT.bytes() as u64)?,
            latents: gpu.painted(&paint, copies * tokens * u64::from(LATENT))?,
            ropes: gpu.painted(&paint, copies * tokens * u64::from(ROPE))?,
            cache: gpu.buffer((copies * cache).max(4))?,
            positions: uploaded(bytemuck::cast_slice(&shape.positions()))?,
            cos_sin: uploaded(bytemuck::cast_slice(&table))?,
            table,
            paint,
            copies,
        })
    }

    fn rows<'a>(&self, buffer: &'a B, shape: &Shape, copy: u64, dim: u32) -> View<&'a B> {
        View { offset: copy * u64::from(shape.tokens) * u64::from(dim), ..View::dense(buffer, 1, dim) }
    }

    /// The queries of a layer, in place.
    fn rope(&self, shape: &Shape, copy: u64) -> RopeArgs<&B> {
        let x = View { offset: copy * shape.query_elems(), ..View::dense(&self.queries, shape.heads, ROPE) };
        RopeArgs {
            x,
            y: x,
            positions: &self.positions,
            cos_sin: &self.cos_sin,
            max_position: MAX_POSITION,
            scale: 1.0,
        }
    }

    fn layer<'a>(&'a self, shape: &Shape, copy: u64, cache: &'a B) -> KvAppendArgs<&'a B> {
        let bytes = shape.cache.map_or(1, Dtype::bytes) as u64;
        KvAppendArgs {
            kv_c: self.rows(&self.latents, shape, copy, LATENT),
            k_pe: self.rows(&self.ropes, shape, copy, ROPE),
            kv: KvView {
                buffer: cache,
                offset: 0,
                layer_stride: shape.cache_elems() * bytes,
                layer: copy as u32,
                block_stride: u64::from(PAGE_SIZE * (LATENT + ROPE)) * bytes,
                slabs: Slabs::ONE,
            },
            k_scale: if shape.cache == Some(Dtype::E4m3) { K_SCALE } else { 1.0 },
            guard: None,
        }
    }

    fn fused(&self, shape: &Shape, copy: u64) -> RopeAppendArgs<&B> {
        let queries = self.rope(shape, copy);
        RopeAppendArgs {
            q_pe: queries.x,
            q_pe_out: View { buffer: &self.rotated, ..queries.x },
            layer: self.layer(shape, copy, &self.cache),
            positions: queries.positions,
            cos_sin: queries.cos_sin,
            max_position: MAX_POSITION,
            q_pe_scale: 1.0,
            q_scale: 1.0,
        }
    }
}

fn time<D: Timed>(gpu: &D, shape: &Shape, args: &Args) -> Result<serde_json::Value> {
    let arrays = Arrays::new(gpu, shape)?;
    let (tokens, copies) = (shape.tokens, 0..arrays.copies);
    match shape.cache {
        Some(cache) => {
            let layers = copies.map(|copy| arrays.fused(shape, copy));
            let op = gpu.compile(shape.fused(cache))?;
            time_op(
                gpu,
                shape,
                &arrays,
                &Layers::new(op, tokens, RopeAppendBatch::slots(&shape.slots()), layers)?,
                args,
            )
        }
        None => {
            let layers = copies.map(|copy| arrays.rope(shape, copy));
            let op = gpu.compile(shape.rope())?;
            time_op(gpu, shape, &arrays, &Layers::new(op, tokens, 0..tokens, layers)?, args)
        }
    }
}

fn time_op<O: Op, D: Timed + Kernel<O>>(
    gpu: &D,
    shape: &Shape,
    arrays: &Arrays<D::Buffer>,
    op: &Layers<O, D>,
    args: &Args,
) -> Result<serde_json::Value> {
    op.run_first()?;
    let right = check(gpu, shape, arrays)?;

    let [together, alone] = gpu.time_both(args.replays(), |recorder, call| op.record(recorder, call))?;
    let rate = shape.bytes() as f64 / together.median / 1e9;
    let us = |seconds: f64| seconds * 1e6;
    print!("| {} | {} | {} ", shape.name(), micros(us(together.median)), micros(us(together.min)));
    print!("| {} | {} ", micros(us(alone.median)), figure(rate));
    println!("| {} | {right} |", figure(us(together.host)));
    let mut record = json!({
        "workload": shape.name(), "cache": shape.cache.map(Dtype::name), "tokens": shape.tokens,
        "heads": shape.heads, "us_alone": us(alone.median), "gb_s": rate,
    });
    if let Some(fields) = record.as_object_mut() {
        fields.extend(timing_fields(&together));
    }
    Ok(record)
}

/// Checks what the first layer's call wrote.
fn check<D: Timed>(gpu: &D, shape: &Shape, arrays: &Arrays<D::Buffer>) -> Result<String> {
    let elems = shape.query_elems();
    let rotated = if shape.cache.is_some() { &arrays.rotated } else { &arrays.queries };
    let got = INPUT.decode_all(&gpu.download(rotated, elems * INPUT.bytes() as u64)?);
    let queries = INPUT.decode_all(&arrays.paint.codes(0..elems));
    let want = rope(&Rotation {
        x: &queries,
        positions: &shape.positions(),
        cos_sin: &arrays.table,
        num_heads: shape.heads as usize,
        rope_dim: ROPE as usize,
        layout: LAYOUT,
    });
    // Half a unit in the last place of bf16, and the error of f32.
    let wrong = |(got, want): (&f32, &f64)| (f64::from(*got) - want).abs() > want.abs() / 255.9 + 1e-6;
    if let Some(at) = got.iter().zip(&want).position(wrong) {
        return Err(format!("query element {at} is {}, expected {}", got[at], want[at]).into());
    }
    let Some(cache) = shape.cache else { return Ok(format!("{elems} elements")) };

    let spec = shape.fused(cache);
    let turned = gpu.buffer(u64::from(shape.tokens * ROPE) * INPUT.bytes() as u64)?;
    let k_pe = View::dense(&turned, 1, ROPE);
    let keys = RopeArgs { x: arrays.rows(&arrays.ropes, shape, 0, ROPE), y: k_pe, ..arrays.rope(shape, 0) };
    gpu.once(Rope { num_heads: 1, ..shape.rope() }, 0..shape.tokens, &keys)?;
    let cache_bytes = shape.cache_elems() * cache.bytes() as u64;
    let other = gpu.buffer(cache_bytes)?;
    let layer = KvAppendArgs { k_pe, ..arrays.layer(shape, 0, &other) };
    gpu.once(spec.append, &shape.slots(), &layer)?;
    let [got, want] = [gpu.download(&arrays.cache, cache_bytes)?, gpu.download(&other, cache_bytes)?];
    if got != want || got.iter().all(|byte| *byte == 0) {
        return Err("the cache does not hold the bytes of rope and kv_append".into());
    }
    Ok(format!("{elems} elements, {} rows", shape.tokens))
}
