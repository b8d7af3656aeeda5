//! The cuts of `SplitPolicy::Auto`: equal shares, or pieces of one length and a remainder a run, where a device is predicted to
//! finish sooner with those. Equal shares suit runs of one length; in a ragged batch they leave one item much longer than the rest.
//!
//! The prediction is list scheduling (longest processing time first): as many workers as target items each take the longest remaining item
//! when they finish one, and an item costs its tokens plus [`Tiling::item_overhead_tokens`].

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{Run, Tiling};

/// Tokens that are a whole number of usual cache pages, and of any kernel's blocks.
const LONG_PIECE_STEP: u64 = 64;
/// The least tokens of a piece that is rounded to such a multiple.
const LONG_PIECE: u64 = 1024;
/// The most lengths of pieces that are tried.
const TRIALS: u32 = 6;

/// Where runs are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cut {
    /// Into equal shares of at most `chunk` tokens on block boundaries, so that no split is a short remainder.
    Shares { chunk: u32, block: u32 },
    /// Into pieces of one length and a remainder.
    Pieces(Pieces),
}

/// Pieces of `tokens` and a remainder. A remainder shorter than `least` is joined with the last piece and the sum halved, on a block
/// boundary: it is then neither all overhead nor does it make a longer piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pieces {
    /// A multiple of `block`, or `least` is 0.
    pub tokens: u32,
    pub least: u32,
    pub block: u32,
}

impl Pieces {
    /// The number of whole pieces of a run, and the tokens of up to two shorter ones after them.
    pub(super) fn of(self, tokens: u32) -> (u32, [u32; 2]) {
        let (whole, rest) = (tokens / self.tokens, tokens % self.tokens);
        if whole == 0 || rest == 0 || rest >= self.least {
            return (whole, [rest, 0]);
        }
        let both = self.tokens + rest;
        let first = both.div_ceil(2).next_multiple_of(self.block);
        (whole - 1, [first, both - first])
    }
}

impl Cut {
    /// The number of splits of a run, which has at least one token.
    pub(super) fn splits(self, tokens: u32) -> u32 {
        match self {
            Self::Shares { chunk, .. } => tokens.div_ceil(chunk),
            Self::Pieces(pieces) => {
                let (whole, others) = pieces.of(tokens);
                whole + others.iter().filter(|&&other| other > 0).count() as u32
            }
        }
    }

    /// Where split `k` of a run begins, from the run's first token; for `k == splits` where the last one ends.
    pub(super) fn at(self, tokens: u32, splits: u32, k: u32) -> u32 {
        if k == 0 || k >= splits {
            return if k == 0 { 0 } else { tokens };
        }
        match self {
            Self::Shares { block, .. } => {
                let blocks = u64::from(tokens.div_ceil(block));
                let at = blocks * u64::from(k) / u64::from(splits) * u64::from(block);
                at.min(tokens.into()) as u32
            }
            Self::Pieces(pieces) => {
                let (whole, [other, _]) = pieces.of(tokens);
                if k <= whole { k * pieces.tokens } else { whole * pieces.tokens + other }
            }
        }
    }
}

#[derive(Debug, Clone, Default)]
pub(super) struct Scratch {
    /// Tokens of items, and how many there are.
    items: Vec<(u32, u64)>,
    /// The predicted time at which workers finish, and how many work.
    workers: BinaryHeap<Reverse<(u64, u64)>>,
}

/// The cut with the least predicted makespan.
pub(super) fn balanced(runs: &[Run], heads: u32, tiling: &Tiling, scratch: &mut Scratch) -> Cut {
    let load = Load { runs, heads, tiling };
    let chunk = load.chunk();
    match load.pieces(chunk, scratch) {
        Some(pieces) => Cut::Pieces(pieces),
        None => Cut::Shares { chunk, block: load.block() },
    }
}

struct Load<'a> {
    runs: &'a [Run],
    heads: u32,
    tiling: &'a Tiling,
}

impl Load<'_> {
    fn block(&self) -> u32 {
        self.tiling.tokens_per_block.max(1)
    }

    fn overhead(&self) -> u64 {
        self.tiling.item_overhead_tokens.into()
    }

    fn blocks(&self, run: &Run) -> u32 {
        (run.end - run.begin).div_ceil(self.block())
    }

    fn tiles(&self, run: &Run) -> u64 {
        (run.num_queries * self.heads).div_ceil(self.tiling.rows_per_tile.max(1)).into()
    }

    /// The number of items of equal shares of at most a number of blocks.
    fn items(&self, chunk: u32) -> u64 {
        self.runs.iter().map(|run| self.tiles(run) * u64::from(self.blocks(run).div_ceil(chunk).max(1))).sum()
    }

    /// The most items that equal shares may make.
    fn most_items(&self) -> u64 {
        let Tiling { target_items, single_sequence_items, .. } = *self.tiling;
        let is_single = self.parts().map(|(_, tiles)| tiles).sum::<u64>() == 1;
        if is_single && single_sequence_items > 0 {
            single_sequence_items.min(target_items).into()
        } else {
            target_items.into()
        }
    }

    /// The shortest equal shares, in tokens, with which the batch makes no more items than it may.
    fn chunk(&self) -> u32 {
        let block = self.block();
        let longest = self.runs.iter().map(|run| self.blocks(run)).max().unwrap_or(1).max(1);
        let shortest = self.tiling.min_split_tokens.div_ceil(block).clamp(1, longest);
        let (mut low, mut high) = (shortest, longest);
        let most = self.most_items();
        while low < high {
            let middle = low.midpoint(high);
            if self.items(middle) <= most { high = middle } else { low = middle + 1 }
        }
        low.saturating_mul(block)
    }

    /// Tokens and tiles of the runs that make items.
    fn parts(&self) -> impl Iterator<Item = (u32, u64)> {
        let makes_items = |run: &&Run| run.num_queries > 0 && (run.end > run.begin || !run.partial);
        self.runs.iter().filter(makes_items).map(|run| (run.end - run.begin, self.tiles(run)))
    }

    /// The best pieces, if they are better than equal shares.
    fn pieces(&self, chunk: u32, scratch: &mut Scratch) -> Option<Pieces> {
        let lengths = || self.parts().map(|(tokens, _)| tokens);
        let (longest, shortest) = (lengths().max()?, lengths().min()?);
        let (block, overhead) = (self.block(), self.overhead());
        if longest - shortest <= block {
            return None;
        }
        let (workers, done) = self.shares_done(chunk, scratch);
        // Pieces must win by a 32nd, for what the model leaves out; of equal shares it knows the longest only to within a block.
        let mut soonest = done.saturating_sub((done / 32).max(block.into()));
        let tokens: u64 = self.parts().map(|(tokens, tiles)| u64::from(tokens) * tiles).sum();
        let tiles: u64 = self.parts().map(|(_, tiles)| tiles).sum();

        // The first length to try: a worker's time, with the overhead of each tile's remainder but not of pieces, if that cuts any run;
        // else an equal part of it that does.
        let time = tokens.saturating_add(tiles.saturating_mul(overhead)) / workers;
        let length = time.div_ceil(time / u64::from(longest) + 1);
        let step = if length < LONG_PIECE { 1 } else { LONG_PIECE_STEP }.next_multiple_of(block.into());
        let mut length = length.max(self.tiling.min_split_tokens.max(1).into()).next_multiple_of(step);
        let mut best = None;
        for _ in 0..TRIALS {
            let Some(piece) = u32::try_from(length).ok().filter(|&piece| piece < longest) else { break };
            let pieces = Pieces { tokens: piece, least: self.tiling.min_split_tokens, block };
            let items = self.list_pieces(pieces, &mut scratch.items);
            let no_wait = tokens.saturating_add(items.saturating_mul(overhead)) / workers;
            // Longer pieces cannot finish before `soonest` either.
            if no_wait.max(length + overhead) >= soonest {
                break;
            }
            let done = scratch.done(workers, overhead, soonest);
            if done < soonest {
                (soonest, best) = (done, Some(pieces));
            }
            length += (length / 128).max(1).next_multiple_of(step);
        }
        best
    }

    /// How many workers equal shares occupy, and when the last finishes.
    fn shares_done(&self, chunk: u32, scratch: &mut Scratch) -> (u64, u64) {
        let most = self.most_items();
        if self.items(chunk / self.block()) <= most {
            let longest = |(tokens, _): (u32, u64)| {
                let shares = tokens.div_ceil(chunk).max(1);
                let blocks = tokens.div_ceil(self.block()).div_ceil(shares);
                blocks.saturating_mul(self.block()).min(tokens)
            };
            let longest = self.parts().map(longest).max().unwrap_or(0);
            return (most.max(1), u64::from(longest) + self.overhead());
        }
        // More tiles than workers, so none is cut.
        let workers = u64::from(self.tiling.target_items).max(1);
        scratch.items.clear();
        scratch.items.extend(self.parts());
        (workers, scratch.done(workers, self.overhead(), u64::MAX))
    }

    /// Lists the items of a cut and counts them.
    fn list_pieces(&self, pieces: Pieces, items: &mut Vec<(u32, u64)>) -> u64 {
        items.clear();
        // A run has at most three lengths of items, one of which is the same for all runs.
        items.reserve(2 * self.runs.len() + 1);
        let mut all_whole = 0;
        for (tokens, tiles) in self.parts() {
            let (whole, [first, second]) = pieces.of(tokens);
            all_whole += tiles * u64::from(whole);
            if first > 0 || tokens == 0 {
                items.push((first, tiles));
            }
            if second > 0 {
                items.push((second, tiles));
            }
        }
        items.push((pieces.tokens, all_whole));
        items.iter().map(|&(_, count)| count).sum()
    }
}

impl Scratch {
    /// The makespan of the listed items, longest first; any value from `limit` on where it is `limit` or later.
    fn done(&mut self, workers: u64, overhead: u64, limit: u64) -> u64 {
        let Self { items, workers: heap } = self;
        items.sort_unstable_by_key(|&(tokens, _)| Reverse(tokens));
        heap.clear();
        heap.reserve(items.len() + 1);
        heap.push(Reverse((0, workers)));
        let mut last = 0;
        for &(tokens, mut count) in items.iter() {
            while count > 0 && last < limit {
                let Some(mut first) = heap.peek_mut() else { break };
                let Reverse((at, free)) = *first;
                let taken = free.min(count);
                let done = at.saturating_add(u64::from(tokens) + overhead);
                (last, count) = (last.max(done), count - taken);
                if taken == free {
                    *first = Reverse((done, free));
                } else {
                    *first = Reverse((at, free - taken));
                    drop(first);
                    heap.push(Reverse((done, taken)));
                }
            }
        }
        last
    }
}
