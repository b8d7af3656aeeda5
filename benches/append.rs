//! Times `kv_append`. Each shape is compared byte for byte with the oracle first; a wrong one is not timed, and the run ends with status 1.
//!
//! ```text
//! cargo bench --bench append -- [--only TEXT].. [--replays N] [--json FILE] [--full | --test] [--list]
//! cargo bench --bench append --features cuda -- --backend cuda
//! ```
//! BENCHMARKS.md says what the figures mean.

#[allow(dead_code)]
mod support;

use mla_support::reference::{Concat, concat_and_cache};
use serde_json::json;
use support::Result;
use support::args::Args;
use support::ceiling::Kind;
use support::device::{Layers, Timed};
use support::paint::Paint;
use support::record::{Records, figure, micros, timing_fields};
use wgpu_mla::{
    Dtype, GuardCounts, GuardView, KvAppend, KvAppendArgs, KvLayout, KvSpec, KvView, MlaShape, Slabs, View,
};

const PAGE_SIZE: u32 = 64;
const LATENT: u32 = 512;
const ROPE: u32 = 64;
const INPUT: Dtype = Dtype::Bf16;
/// A power of two, for which every device writes the oracle's bytes.
const K_SCALE: f32 = 0.25;

/// Least total bytes of the rotated buffers: more than any card's L2, so that each call misses it.
const ROTATED_BYTES: u64 = 300_000_000;

#[derive(Clone, Copy)]
struct Shape {
    cache: KvLayout,
    tokens: u32,
}

impl Shape {
    fn name(&self) -> String {
        format!("{} tokens {INPUT} to {}", self.tokens, self.cache)
    }

    fn spec(&self) -> KvAppend {
        let shape = MlaShape { num_heads: 1, kv_lora_rank: LATENT, qk_rope_head_dim: ROPE };
        let num_pages = if self.decodes() { self.tokens } else { self.tokens.div_ceil(PAGE_SIZE) };
        KvAppend {
            shape,
            kv: KvSpec { layout: self.cache, page_size: PAGE_SIZE, num_pages },
            input: INPUT,
            guard: false,
        }
    }

    /// One token for each of many sequences, not the tokens of one prompt.
    fn decodes(&self) -> bool {
        self.tokens <= PAGE_SIZE
    }

    /// Slots of the tokens: each in a page of its own, or in full pages in a random order.
    fn slots(&self) -> Vec<i64> {
        let pages = u64::from(self.spec().kv.num_pages);
        let page = |i: u64| (i * 7919 + 3) % pages;
        let size = u64::from(PAGE_SIZE);
        let slot = |token: u64| {
            if self.decodes() {
                page(token) * size + token * 7 % size
            } else {
                page(token / size) * size + token % size
            }
        };
        (0..u64::from(self.tokens)).map(|token| slot(token) as i64).collect()
    }

    /// Bytes of a token in the cache.
    fn token_bytes(&self) -> u64 {
        self.cache.token(LATENT, ROPE).bytes
    }

    fn layer_bytes(&self) -> u64 {
        self.spec().kv.num_slots() * self.token_bytes()
    }

    /// Bytes read and written by one append, slots included.
    fn bytes(&self) -> u64 {
        let row = u64::from(LATENT + ROPE) * INPUT.bytes() as u64;
        u64::from(self.tokens) * (row + self.token_bytes() + 4)
    }
}

fn main() {
    support::on_cards!(run);
}

fn run<D: Timed>(gpu: &D, args: &Args) -> Result<()> {
    let tokens: &[u32] = match (args.test, gpu.is_small() && !args.full) {
        (true, _) => &[5, 128],
        (_, true) => &[64, 4096],
        _ => &[64, 4096, 131_072],
    };
    let caches = [Dtype::E4m3.into(), Dtype::Bf16.into(), Dtype::F16.into(), KvLayout::Ds656];
    let shapes = caches.iter().flat_map(|&cache| tokens.iter().map(move |&tokens| Shape { cache, tokens }));
    let shapes: Vec<Shape> = shapes.filter(|shape| args.wants(&shape.name())).collect();
    if args.list {
        shapes.iter().for_each(|shape| println!("{}", shape.name()));
        return Ok(());
    }
    let (ceiling, bytes) = gpu.ceiling(Kind::Copy, args.test)?;
    let mut records = Records::new("append", gpu.facts());
    records.note("copy_ceiling_gb_s", ceiling);
    records.note("copy_ceiling_bytes", 2 * bytes);
    println!(
        "# kv_append on {}\n\nus: device time, many appends in a pass or graph; alone: a pass or launch for each. \
         GB/s: read and written; ceiling: share of this run's copy ceiling, {} GB/s. Guard: time with counters of what rounding \
         loses, over that without.\n",
        gpu.name(),
        figure(ceiling)
    );
    println!(
        "| shape | us | min | alone | GB/s | ceiling | guard | host | bytes |\n|---|---|---|---|---|---|---|---|---|"
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
    let (tokens, paint) = (u64::from(shape.tokens), Paint::new(INPUT));
    let copies = if gpu.is_small() { 1 } else { ROTATED_BYTES.div_ceil(shape.bytes()).clamp(2, 128) };
    let latents = gpu.painted(&paint, copies * tokens * u64::from(LATENT))?;
    let ropes = gpu.painted(&paint, copies * tokens * u64::from(ROPE))?;
    let cache = gpu.buffer(copies * shape.layer_bytes())?;
    let layer = |copy: u64| {
        let rows =
            |buffer, dim: u32| View { offset: copy * tokens * u64::from(dim), ..View::dense(buffer, 1, dim) };
        KvAppendArgs {
            kv_c: rows(&latents, LATENT),
            k_pe: rows(&ropes, ROPE),
            kv: KvView {
                buffer: &cache,
                offset: 0,
                layer_stride: shape.layer_bytes(),
                layer: copy as u32,
                block_stride: u64::from(PAGE_SIZE) * shape.token_bytes(),
                slabs: Slabs::ONE,
            },
            k_scale: if shape.cache == Dtype::E4m3.into() { K_SCALE } else { 1.0 },
            guard: None,
        }
    };
    let append = gpu.compile(shape.spec())?;
    let append = Layers::new(append, shape.tokens, &shape.slots(), (0..copies).map(layer))?;
    append.run_first()?;
    let right = check(gpu, shape, &paint, &cache)?;

    let [together, alone] = gpu.time_both(args.replays(), |recorder, call| append.record(recorder, call))?;
    let rate = shape.bytes() as f64 / together.median / 1e9;
    let counters = gpu.buffer(copies * GuardCounts::BYTES)?;
    let guarded = gpu.compile(KvAppend { guard: true, ..shape.spec() })?;
    let counted = |copy: u64| {
        let guard = Some(GuardView { counters: &counters, row: copy as u32 });
        KvAppendArgs { guard, ..layer(copy) }
    };
    let guarded = Layers::new(guarded, shape.tokens, &shape.slots(), (0..copies).map(counted))?;
    let [counting, _] = gpu.time_both(args.replays(), |recorder, call| guarded.record(recorder, call))?;
    let guard = counting.median / together.median;
    let us = |seconds: f64| seconds * 1e6;
    print!("| {} | {} | {} ", shape.name(), micros(us(together.median)), micros(us(together.min)));
    print!("| {} | {} ", micros(us(alone.median)), figure(rate));
    println!(
        "| {} % | {guard:.3} | {} | {right} |",
        figure(100.0 * rate / ceiling),
        figure(us(together.host))
    );
    let mut record = json!({
        "workload": shape.name(), "cache": shape.cache.name(), "tokens": shape.tokens,
        "us_alone": us(alone.median), "gb_s": rate, "share": rate / ceiling, "guard": guard,
    });
    if let Some(fields) = record.as_object_mut() {
        fields.extend(timing_fields(&together));
    }
    Ok(record)
}

/// Compares the bytes of the first and the last tokens of the first append.
fn check<D: Timed>(gpu: &D, shape: &Shape, paint: &Paint, cache: &D::Buffer) -> Result<String> {
    let row_bytes = shape.token_bytes() as usize;
    let got = gpu.download(cache, shape.layer_bytes())?;
    let slots = shape.slots();
    let tokens = slots.len();
    let some: Vec<usize> = (0..64.min(tokens)).chain(tokens.saturating_sub(64).max(64)..tokens).collect();
    let rows = |dim: u32| -> Vec<u8> {
        let range = |token: &usize| *token as u64 * u64::from(dim)..(*token as u64 + 1) * u64::from(dim);
        some.iter().flat_map(|token| paint.codes(range(token))).collect()
    };
    let mut want = vec![0; some.len() * row_bytes];
    let concat = Concat {
        kv_c: &rows(LATENT),
        k_pe: &rows(ROPE),
        input: INPUT,
        slot_mapping: &(0..some.len() as i64).collect::<Vec<_>>(),
        kv_lora_rank: LATENT as usize,
        qk_rope_head_dim: ROPE as usize,
        k_scale: K_SCALE,
    };
    concat_and_cache(&concat, shape.cache, &mut want);
    for (&token, want) in some.iter().zip(want.chunks(row_bytes)) {
        if got[slots[token] as usize * row_bytes..][..row_bytes] != *want {
            return Err(format!("token {token}: the cache does not hold the oracle's bytes").into());
        }
    }
    Ok(format!("{} rows equal", some.len()))
}
