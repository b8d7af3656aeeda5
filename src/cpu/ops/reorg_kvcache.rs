//! `reorg_kvcache` on host memory.

use super::raw;
use crate::Result;
use crate::cpu::buffer::{Access, Buffer, lock, store_elements};
use crate::cpu::decode::Rows;
use crate::cpu::device::HostOp;
use crate::cpu::pool::Pool;
use crate::ops::{ReorgBatch, ReorgChunk, ReorgExtent, ReorgKvCache, ReorgKvCacheArgs};

/// Tokens of one block, all of one rank.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    rank: u32,
    local_row: u32,
    out_row: u32,
    tokens: u32,
}

impl HostOp for ReorgKvCache {
    type Prepared = Vec<Run>;

    fn prepare(&self, batch: ReorgBatch<'_>) -> Result<(Vec<Run>, ReorgExtent)> {
        let extent = batch.extent()?;
        let mut runs = Vec::new();
        for chunk in batch.chunks {
            add_runs(&mut runs, &batch, chunk)?;
        }
        Ok((runs, extent))
    }

    fn run(&self, pool: &Pool, runs: &Vec<Run>, args: &ReorgKvCacheArgs<&Buffer>) -> Result<()> {
        if runs.is_empty() {
            return Ok(());
        }
        let locked = lock([(args.gathered.buffer, Access::Read), (args.out.buffer, Access::Write)]);
        let (from, to) = (Rows::of(&args.gathered), Rows::of(&args.out));
        let (dim, bytes) = (self.row_elems as usize, self.dtype.bytes());
        pool.for_each(runs.len(), |_, run| {
            let run = runs[run];
            let part = run.rank as usize * args.rank_stride as usize;
            for token in 0..run.tokens as usize {
                let at = part + from.at(run.local_row as usize + token, 0);
                let to = to.at(run.out_row as usize + token, 0);
                store_elements(locked.words(1), bytes, to, dim, |i| raw(locked.bytes(0), bytes, at + i));
            }
        });
        Ok(())
    }
}

fn add_runs(runs: &mut Vec<Run>, batch: &ReorgBatch<'_>, chunk: &ReorgChunk) -> Result<()> {
    let (shares, end) = (batch.shares, chunk.begin.saturating_add(chunk.tokens));
    let mut token = chunk.begin;
    while token < end {
        let rank = shares.owner(token);
        let index = shares.local_index(token) - shares.local_len(rank, chunk.begin)?;
        let tokens = (shares.interleave() - token % shares.interleave()).min(end - token);
        let out_row = chunk.out_row + (token - chunk.begin);
        runs.push(Run { rank, local_row: chunk.local_row + index, out_row, tokens });
        token += tokens;
    }
    Ok(())
}
