//! `indexer_logits` on host memory.

use std::sync::atomic::Ordering;

use crate::base::dtype::Dtype;
use crate::base::error::Result;
use crate::cache::{INDEX_DIM, KvLayout, Scales};
use crate::cpu::buffer::{Access, Buffer, Locked, lock};
use crate::cpu::decode::Rows;
use crate::cpu::device::HostOp;
use crate::cpu::kernels::formats::widen;
use crate::cpu::pool::Pool;
use crate::ops::indexer_logits::runs::{Cut, Run, Runs};
use crate::ops::{
    INDEX_SHAPE, IndexerLogits, IndexerLogitsArgs, IndexerLogitsBatch, IndexerLogitsExtent, MOST_INDEX_HEADS,
};

/// The arguments in the order in which they are locked.
const Q: usize = 0;
const WEIGHTS: usize = 1;
const CACHE: usize = 2;
const LOGITS: usize = 3;

const DIM: usize = INDEX_DIM as usize;
const HEADS: usize = MOST_INDEX_HEADS as usize;
/// Partial sums of a dot product: as many floats as a vector of AVX-512 has.
const LANES: usize = 16;
/// Runs of a block are short enough that threads end together, and long enough that a row's queries are seldom widened.
const CUT: Cut = Cut { block: 64, target: 256 };

impl HostOp for IndexerLogits {
    type Prepared = Runs;

    fn prepare(&self, batch: IndexerLogitsBatch<'_>) -> Result<(Runs, IndexerLogitsExtent)> {
        let runs = self.runs(&batch, CUT)?;
        let extent = runs.extent;
        Ok((runs, extent))
    }

    fn run(&self, pool: &Pool, runs: &Runs, args: &IndexerLogitsArgs<&Buffer>) -> Result<()> {
        if runs.runs.is_empty() {
            return Ok(());
        }
        let read = [args.q.buffer, args.weights.buffer, args.cache.buffer].map(|b| (b, Access::Read));
        let [q, weights, cache] = read;
        let call = Call {
            spec: self,
            pages: &runs.pages,
            args,
            locked: lock([q, weights, cache, (args.logits.buffer, Access::Write)]),
        };
        pool.for_each(runs.runs.len(), |_, run| call.score(&runs.runs[run]));
        Ok(())
    }
}

/// Everything that the threads of one call share.
struct Call<'a> {
    spec: &'a IndexerLogits,
    pages: &'a [u32],
    args: &'a IndexerLogitsArgs<&'a Buffer>,
    locked: Locked<'a, 4>,
}

impl Call<'_> {
    fn score(&self, run: &Run) {
        let heads = self.spec.num_heads as usize;
        let (to, logits) = (Rows::of(&self.args.logits).at(run.row as usize, 0), self.locked.words(LOGITS));
        if run.begin < run.end {
            let (mut q, mut weights) = ([[0.0; DIM]; HEADS], [0.0; HEADS]);
            let (q, weights) = (&mut q[..heads], &mut weights[..heads]);
            let (at, bytes) = (Rows::of(&self.args.q), self.spec.query.bytes());
            for (head, q) in q.iter_mut().enumerate() {
                let first = at.at(run.token as usize, head) * bytes;
                widen(self.spec.query, &self.locked.bytes(Q)[first..][..DIM * bytes], q);
                let first = Rows::of(&self.args.weights).at(run.token as usize, head) * 4;
                widen(Dtype::F32, &self.locked.bytes(WEIGHTS)[first..][..4], &mut weights[head..=head]);
            }
            for key in run.begin..run.end {
                // A key of another slab is that slab's.
                if let Some(logit) = self.logit(run, key, q, weights) {
                    logits[to + key as usize].store(logit.to_bits(), Ordering::Relaxed);
                }
            }
        }
        for column in run.end..run.fill_end {
            logits[to + column as usize].store(f32::NEG_INFINITY.to_bits(), Ordering::Relaxed);
        }
    }

    /// The logit of a key, if it is in this slab.
    fn logit(&self, run: &Run, key: u32, q: &[[f32; DIM]], weights: &[f32]) -> Option<f32> {
        let (cache, kv) = (&self.args.cache, self.spec.index.kv());
        let page = self.pages[(run.pages + key / kv.page_size) as usize];
        let slab = cache.pages(&kv);
        if !slab.contains(&page) {
            return None;
        }
        let page = (cache.base() + u64::from(page - slab.start) * cache.block_stride) as usize;
        let (token, dtype) = ((key % kv.page_size) as usize, self.spec.key());
        let elements = DIM * dtype.bytes();
        let bytes = &self.locked.bytes(CACHE)[page..];
        let mut k = [0.0; DIM];
        widen(dtype, &bytes[token * elements..][..elements], &mut k);
        let mut sum = 0.0;
        for (q, weight) in q.iter().zip(weights) {
            let score = dot(q, &k);
            // A comparison, which is false for NaN, where `max` would give 0.
            sum += weight * if score < 0.0 { 0.0 } else { score };
        }
        let layout = KvLayout::Index(dtype).token(INDEX_SHAPE.kv_lora_rank, 0);
        let mut scale = [1.0];
        if layout.scales == Scales::PageFooter {
            let footer = kv.page_size as usize * elements;
            widen(Dtype::F32, &bytes[footer + 4 * token..][..4], &mut scale);
        }
        Some(scale[0] * sum)
    }
}

fn dot(a: &[f32; DIM], b: &[f32; DIM]) -> f32 {
    let mut sums = [0.0; LANES];
    for (a, b) in a.chunks_exact(LANES).zip(b.chunks_exact(LANES)) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}
