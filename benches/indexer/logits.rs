//! `indexer_logits`: one new token a sequence, over all of its keys.

use mla_support::reference::{IndexRow, indexer_logit};
use serde_json::{Value, json};
use wgpu_mla::{
    Dtype, IndexFormat, IndexSpec, IndexerLogits, IndexerLogitsArgs, IndexerLogitsBatch, Mask, PageTable,
    View,
};

use crate::support::Result;
use crate::support::args::Args;
use crate::support::device::{Layers, Timed};
use crate::support::paint::Paint;
use crate::support::record::{Records, figure, micros, timing_fields};

const PAGE_SIZE: u32 = 64;
/// Least total bytes of the rotated caches: more than any card's L2, so that each call misses it.
const ROTATED_BYTES: u64 = 300_000_000;

/// A batch of sequences of one length.
#[derive(Clone, Copy)]
struct Shape {
    sequences: u32,
    len: u32,
    heads: u32,
    query: Dtype,
}

impl Shape {
    fn name(&self) -> String {
        format!("logits {} x {} x{} {} by e4m3", self.sequences, self.len, self.heads, self.query)
    }

    fn spec(&self) -> IndexerLogits {
        let num_pages = self.sequences * self.len.div_ceil(PAGE_SIZE);
        let index = IndexSpec { format: IndexFormat::DEEPSEEK_V32, page_size: PAGE_SIZE, num_pages };
        IndexerLogits { index, num_heads: self.heads, query: self.query }
    }

    /// Pages in a random order, a row a sequence.
    fn block_table(&self) -> Vec<i32> {
        let pages = i64::from(self.spec().index.num_pages);
        (0..pages).map(|i| ((i * 7919 + 3) % pages) as i32).collect()
    }

    fn keys(&self) -> u64 {
        u64::from(self.sequences) * u64::from(self.len)
    }

    fn flops(&self) -> f64 {
        2.0 * 128.0 * f64::from(self.heads) * self.keys() as f64
    }

    /// The bytes of a cache: painted codes, and scales of a few values.
    fn cache(&self, codes: &Paint) -> Vec<u8> {
        let index = self.spec().index;
        let (page_bytes, page_codes) = (index.page_bytes() as usize, PAGE_SIZE as usize * 128);
        let mut cache = Vec::with_capacity(index.cache_bytes() as usize);
        for page in 0..index.num_pages as usize {
            let from = page * page_codes % (codes.codes.len() - page_codes);
            cache.extend_from_slice(&codes.codes[from..from + page_codes]);
            for token in 0..PAGE_SIZE as usize {
                cache.extend_from_slice(&(0.01 + 0.001 * ((page + 7 * token) % 13) as f32).to_le_bytes());
            }
            assert_eq!(cache.len(), (page + 1) * page_bytes);
        }
        cache
    }
}

pub fn run<D: Timed>(device: &D, args: &Args, records: &mut Records) -> Result<()> {
    let batches: &[(u32, u32)] = match (args.test, device.is_small() && !args.full) {
        (true, _) => &[(2, 200)],
        (_, true) => &[(1, 8192)],
        _ => &[(1, 131_072), (64, 8192), (1, 8192)],
    };
    let kinds = [(64, Dtype::E4m3), (32, Dtype::E4m3), (64, Dtype::Bf16)];
    let shape = |&(sequences, len)| kinds.map(|(heads, query)| Shape { sequences, len, heads, query });
    let shapes: Vec<_> = batches.iter().flat_map(shape).filter(|shape| args.wants(&shape.name())).collect();
    if args.list {
        shapes.iter().for_each(|shape| println!("{}", shape.name()));
        return Ok(());
    }
    if shapes.is_empty() {
        return Ok(());
    }
    println!(
        "# indexer_logits on {}\n\nus: device time, many in a pass or graph; alone: a pass or launch for each. GB/s: keys and scales; read: us of \
         a kernel that only reads as many bytes, timed likewise; share: that time over the op's.\n",
        device.name(),
    );
    println!(
        "| shape | variant | us | min | alone | GB/s | read | share | TFLOP/s | host | checked |\n|---|---|---|---|---|---|---|---|---|---|---|"
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
    let (spec, heads, rows) = (shape.spec(), shape.heads, u64::from(shape.sequences));
    let codes = Paint::query(Dtype::E4m3);
    let (queries, floats) = (Paint::query(shape.query), Paint::new(Dtype::F32));
    let cache_bytes = spec.index.cache_bytes();
    let copies = if device.is_small() { 1 } else { ROTATED_BYTES.div_ceil(cache_bytes).clamp(2, 16) };
    let bytes = shape.cache(&codes);
    let cache = device.buffer(copies * cache_bytes)?;
    for copy in 0..copies {
        device.upload(&cache, copy * cache_bytes, &bytes)?;
    }
    let q = device.painted(&queries, rows * u64::from(heads) * 128)?;
    let weights = device.painted(&floats, rows * u64::from(heads))?;
    let logits = device.buffer(copies * shape.keys() * 4)?;
    let layer = |copy: u64| IndexerLogitsArgs {
        q: View::dense(&q, heads, 128),
        weights: View::dense(&weights, heads, 1),
        cache: spec.index.view_of_layer(&cache, copy as u32),
        logits: View { offset: copy * shape.keys(), ..View::dense(&logits, 1, shape.len) },
    };
    let table = shape.block_table();
    let (seq_lens, starts) = (vec![shape.len as i32; rows as usize], (0..=rows as i32).collect::<Vec<_>>());
    let batch = IndexerLogitsBatch {
        pages: PageTable::Dense { block_table: &table, max_pages: shape.len.div_ceil(PAGE_SIZE) },
        seq_lens: &seq_lens,
        query_start_loc: &starts,
        mask: Mask::Causal,
        tokens: 0..shape.sequences,
        fill: 0,
    };
    let op = device.compile(spec)?;
    let variant = op.variant();
    let op = Layers::new(op, Default::default(), batch, (0..copies).map(layer))?;
    op.run_first()?;
    let checked = check(device, shape, &bytes, [&queries, &floats], &table, &logits)?;

    let [together, alone] = device.time_both(args.replays(), |recorder, call| op.record(recorder, call))?;
    let read = device.read_once(&cache, cache_bytes, copies, args.replays())?;
    let (rate, flops) = (cache_bytes as f64 / together.median / 1e9, shape.flops() / together.median / 1e12);
    let share = read / together.median;
    let us = |seconds: f64| seconds * 1e6;
    print!(
        "| {} | {variant} | {} | {} ",
        shape.name(),
        micros(us(together.median)),
        micros(us(together.min))
    );
    print!(
        "| {} | {} | {} | {} % ",
        micros(us(alone.median)),
        figure(rate),
        micros(us(read)),
        figure(100.0 * share)
    );
    println!("| {} | {} | {checked} logits |", figure(flops), figure(us(together.host)));
    let mut record = json!({
        "workload": shape.name(), "variant": variant, "heads": heads, "sequences": shape.sequences, "len": shape.len,
        "us_alone": us(alone.median), "gb_s": rate, "read_us": us(read), "share": share,
        "tflop_s": flops,
    });
    if let Some(fields) = record.as_object_mut() {
        fields.extend(timing_fields(&together));
    }
    Ok(record)
}

/// Compares some logits of each sequence of the first copy.
fn check<D: Timed>(
    device: &D,
    shape: &Shape,
    cache: &[u8],
    [queries, floats]: [&Paint; 2],
    table: &[i32],
    logits: &D::Buffer,
) -> Result<usize> {
    let (spec, heads, len) = (shape.spec(), shape.heads as usize, shape.len as usize);
    let got = Dtype::F32.decode_all(&device.download(logits, shape.keys() * 4)?);
    let max_pages = len.div_ceil(PAGE_SIZE as usize);
    let mut checked = 0;
    for row in 0..shape.sequences as usize {
        let q: Vec<f32> = (0..heads * 128).map(|i| queries.at((row * heads * 128 + i) as u64)).collect();
        let weights: Vec<f32> = (0..heads).map(|i| floats.at((row * heads + i) as u64)).collect();
        let pages = &table[row * max_pages..][..max_pages];
        let oracle = IndexRow { cache, index: spec.index, pages, q: &q, weights: &weights };
        for key in (row % 37..len).step_by((len / 64).max(1)).chain([len - 1]) {
            let ([want, size], got) = (indexer_logit(&oracle, key), f64::from(got[row * len + key]));
            let error = (got - want).abs();
            if error.is_nan() || error > 3e-5 * size {
                return Err(format!("row {row} key {key}: {got} instead of {want}, of {size}").into());
            }
            checked += 1;
        }
    }
    Ok(checked)
}
