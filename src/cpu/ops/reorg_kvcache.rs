//! `reorg_kvcache` on host memory.

use super::raw;
use crate::base::error::Result;
use crate::base::memory::collected;
use crate::cpu::buffer::{Access, Buffer, lock, store_elements};
use crate::cpu::decode::Rows;
use crate::cpu::device::HostOp;
use crate::cpu::pool::Pool;
use crate::ops::{ReorgBatch, ReorgChunk, ReorgExtent, ReorgKvCache, ReorgKvCacheArgs};
use crate::plan::shares::Shares;

/// Tokens that a thread takes at a time.
const UNIT_TOKENS: u32 = 256;

/// Chunks of sequences, in units. The shares tell the rank of each token: a list of all tokens would take more memory than the rows do.
#[derive(Debug, Default)]
pub struct Chunks {
    shares: Option<Shares>,
    /// Each with the number of units up to its end.
    chunks: Vec<(usize, ReorgChunk)>,
}

/// Tokens of one block, all of one rank.
#[derive(Debug, Clone, Copy)]
struct Run {
    rank: u32,
    local_row: u32,
    out_row: u32,
    tokens: u32,
}

impl HostOp for ReorgKvCache {
    type Prepared = Chunks;

    fn prepare(&self, batch: ReorgBatch<'_>) -> Result<(Chunks, ReorgExtent)> {
        let extent = batch.extent()?;
        let mut end = 0;
        let units = |chunk: &ReorgChunk| {
            end += chunk.tokens.div_ceil(UNIT_TOKENS) as usize;
            (end, *chunk)
        };
        let chunks = collected(batch.chunks.iter().map(units), batch.chunks.len(), "a step's chunks")?;
        Ok((Chunks { shares: Some(batch.shares.clone()), chunks }, extent))
    }

    fn run(
        &self,
        pool: &Pool,
        Chunks { shares, chunks }: &Chunks,
        args: &ReorgKvCacheArgs<&Buffer>,
    ) -> Result<()> {
        let (Some(shares), Some(&(units, _))) = (shares, chunks.last()) else { return Ok(()) };
        let locked = lock([(args.gathered.buffer, Access::Read), (args.out.buffer, Access::Write)]);
        let (from, to) = (Rows::of(&args.gathered), Rows::of(&args.out));
        let (dim, bytes) = (self.row_elems as usize, self.dtype.bytes());
        pool.for_each(units, |_, unit| {
            let at = chunks.partition_point(|&(end, _)| end <= unit);
            let (end, chunk) = chunks[at];
            // Counted from the chunk's last unit, which is perhaps a short one.
            let index = chunk.tokens.div_ceil(UNIT_TOKENS) - (end - unit) as u32;
            for run in runs(shares, chunk, index * UNIT_TOKENS) {
                let part = run.rank as usize * args.rank_stride as usize;
                for token in 0..run.tokens as usize {
                    let at = part + from.at(run.local_row as usize + token, 0);
                    let to = to.at(run.out_row as usize + token, 0);
                    store_elements(locked.words(1), bytes, to, dim, |i| raw(locked.bytes(0), bytes, at + i));
                }
            }
        });
        Ok(())
    }
}

/// The runs of a unit of a chunk, which begins at the chunk's token `first`.
fn runs(shares: &Shares, chunk: ReorgChunk, first: u32) -> impl Iterator<Item = Run> {
    // `ReorgBatch::extent` found the end.
    let (mut token, last) = (chunk.begin + first, chunk.begin + chunk.tokens);
    let end = last.min(token + UNIT_TOKENS);
    std::iter::from_fn(move || {
        if token >= end {
            return None;
        }
        let rank = shares.owner(token);
        // The owner is a rank of these shares.
        let before = shares.local_len(rank, chunk.begin).unwrap_or(0);
        let tokens = (shares.interleave() - token % shares.interleave()).min(end - token);
        let run = Run {
            rank,
            local_row: chunk.local_row + (shares.local_index(token) - before),
            out_row: chunk.out_row + (token - chunk.begin),
            tokens,
        };
        token += tokens;
        Some(run)
    })
}
