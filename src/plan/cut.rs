//! Cuts runs (query tokens over one range of tokens) into splits, and splits into tiles; lists the partial results that a merge combines.

use super::balance::{Cut, Pieces, balanced};
use super::room::splits_of;
use super::{DIRECT, Merge, Plan, Run, SplitPolicy, Tiling, WorkItem};
use crate::base::error::Result;

impl Plan {
    /// Cuts each run into splits and each split into tiles.
    pub(super) fn cut(&mut self, heads: u32, tiling: &Tiling, policy: SplitPolicy) -> Result<()> {
        let pieces = |tokens| Cut::Pieces(Pieces { tokens, least: 0, block: 1 });
        let cut = match policy {
            SplitPolicy::Auto => balanced(&self.scratch.runs, heads, tiling, &mut self.scratch.balance),
            SplitPolicy::FixedTokens(n) => pieces(n),
            SplitPolicy::OneSplit => pieces(u32::MAX),
        };
        let rows_per_tile = tiling.rows_per_tile.max(1);
        self.make_room(heads, rows_per_tile, cut)?;
        for i in 0..self.scratch.runs.len() {
            let run = self.scratch.runs[i];
            let rows = run.num_queries * heads;
            let tokens = run.end - run.begin;
            let splits = splits_of(cut, tokens, run.partial);
            let direct = splits == 1 && !run.partial;
            for split in 0..splits {
                let at = |k| run.begin + cut.at(tokens, splits, k);
                let partial = if direct { DIRECT } else { self.num_partials };
                if !direct {
                    for q in 0..run.num_queries {
                        self.scratch.partials.push((run.first_query + q, partial + q * heads));
                    }
                    self.num_partials += rows;
                }
                self.push_tiles(&run, heads, rows_per_tile, (at(split), at(split + 1)), partial);
            }
        }
        Ok(())
    }

    /// The tiles of one split. Each ends at the last token that is visible to one of its rows.
    fn push_tiles(
        &mut self,
        run: &Run,
        heads: u32,
        per_tile: u32,
        (kv_begin, kv_end): (u32, u32),
        partial: u32,
    ) {
        let rows = run.num_queries * heads;
        for tile in (0..rows).step_by(per_tile as usize) {
            let first_row = run.first_query * heads + tile;
            let num_rows = per_tile.min(rows - tile);
            let visible = self.queries
                [(first_row / heads) as usize..=((first_row + num_rows - 1) / heads) as usize]
                .iter()
                .map(|q| q.visible)
                .max()
                .unwrap_or(0);
            self.items.push(WorkItem {
                first_row,
                num_rows,
                page_begin: run.page_begin,
                kv_begin,
                kv_end: kv_end.min(visible).max(kv_begin),
                partial: if partial == DIRECT { DIRECT } else { partial + tile },
                pool: 0,
                reserved: 0,
            });
        }
    }

    /// Gathers the partial results of each token. They were numbered prefixes first and then in token order: their numbers are the order.
    pub(super) fn list_merges(&mut self) {
        let queries = &self.queries;
        let partials = &mut self.scratch.partials;
        partials.sort_unstable_by_key(|&(query, partial)| (queries[query as usize].token, partial));
        for &(query, partial) in partials.iter() {
            let token = queries[query as usize].token;
            let at = self.merge_partials.len() as u32;
            match self.merges.last_mut() {
                Some(merge) if merge.token == token => merge.end = at + 1,
                _ => self.merges.push(Merge { token, begin: at, end: at + 1 }),
            }
            self.merge_partials.push(partial);
        }
    }
}
