//! Which query tokens of a step attend the slots of a list, and in which rounds they are scored. Pure.
//!
//! They are those of sequences of more than `topk` tokens, decodes and prompts alike. A token early in a long prompt may see fewer: its
//! list then has all that it sees.

use std::ops::Range;

use super::MlaLayer;
use super::rows::Rows;
use crate::base::error::{Error, Result};
use crate::base::memory::{extend, push};
use crate::plan::{Plan, SparseBatch, SplitPolicy, Tiling};

/// What an error calls arrays of a plan.
pub(super) const PLAN: &str = "a layer's plan";

/// What decides how lists are planned: properties of the compiled layer, not of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Listing {
    pub topk: u32,
    /// How the sparse decode cuts work.
    pub tiling: Tiling,
    /// Room of the scores; `None` for a layer that has no indexer.
    pub scores: Option<Scores>,
}

/// f32 `[rows, max_seq_len]` of workspace, in which a round of query tokens is scored.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scores {
    pub rows: u32,
    pub max_seq_len: u32,
}

/// The part of a [`LayerPlan`](super::LayerPlan) that attends lists of slots.
#[derive(Debug, Clone, Default)]
pub struct ListPlan {
    /// The sparse decode. Its tokens are numbered as in the whole batch, up to the last that attends a list.
    pub decode: Plan,
    /// Runs of query tokens that attend lists.
    pub tokens: Vec<Range<u32>>,
    /// Ranges of query tokens that an indexer scores one after the other in the same memory. Between the runs there may be a few tokens of
    /// shorter sequences, whose lists are made and not read. Empty for a layer without an indexer.
    pub rounds: Vec<Range<u32>>,
}

/// The most tokens of shorter sequences that are scored for nothing so that a round goes on: more would cost more than another round.
const MOST_BETWEEN: u32 = 32;

impl ListPlan {
    /// # Errors
    /// The errors of [`Plan::sparse`]; [`Error::SeqLen`] for a sequence whose pages do not hold its tokens, [`Error::Capacity`] for one
    /// that a row of scores has no room for.
    pub(super) fn new(
        spec: &MlaLayer,
        listing: &Listing,
        rows: &Rows<'_>,
        policy: SplitPolicy,
        slab_pages: u32,
    ) -> Result<Self> {
        let mut plan = Self::default();
        let mut tokens = Vec::new();
        for row in &rows.listed {
            rows.pages.used(row.sequence as usize, row.len)?;
            if let Some(Scores { max_seq_len, .. }) = listing.scores
                && row.len > max_seq_len
            {
                let cure = "compile the layer with a larger LayerIndexer::max_seq_len";
                let (got, need) = (max_seq_len.into(), row.len.into());
                return Err(Error::Capacity { what: "LayerIndexer::max_seq_len", got, need, cure });
            }
            let range = row.q_begin..row.q_begin + row.q_len;
            extend(&mut tokens, range.clone(), PLAN)?;
            push_run(&mut plan.tokens, range)?;
        }
        let Some(last) = plan.tokens.last() else { return Ok(plan) };
        let slab_pages = (slab_pages > 0).then_some(slab_pages);
        let batch = SparseBatch { num_queries: tokens.len() as u32, topk: listing.topk, slab_pages };
        plan.decode = Plan::sparse(&spec.mla(), &listing.tiling, &batch, policy)?;
        plan.decode.renumber(&tokens, last.end);
        if let Some(Scores { rows, .. }) = listing.scores {
            plan.rounds = rounds(&plan.tokens, rows)?;
        }
        Ok(plan)
    }

    /// One past the last query token that attends a list.
    pub(super) fn end(&self) -> u32 {
        self.tokens.last().map_or(0, |run| run.end)
    }

    /// The query tokens that are scored, from the first to the last.
    pub(super) fn scored(&self) -> Range<u32> {
        let first = self.rounds.first().map_or(0, |round| round.start);
        first..self.rounds.last().map_or(first, |round| round.end)
    }
}

/// Adds a range behind the others, to the last one where it follows without a gap.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(super) fn push_run(runs: &mut Vec<Range<u32>>, range: Range<u32>) -> Result<()> {
    match runs.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => push(runs, range, PLAN)?,
    }
    Ok(())
}

/// Ranges of at most so many tokens that together have all of these runs.
///
/// # Errors
/// [`Error::OutOfMemory`].
fn rounds(runs: &[Range<u32>], rows: u32) -> Result<Vec<Range<u32>>> {
    let rows = rows.max(1);
    let mut rounds: Vec<Range<u32>> = Vec::new();
    for run in runs {
        let mut begin = run.start;
        if let Some(last) = rounds.last_mut()
            && run.start - last.end <= MOST_BETWEEN
            && run.start - last.start < rows
        {
            last.end = run.end.min(last.start.saturating_add(rows));
            begin = last.end;
        }
        while begin < run.end {
            let end = run.end.min(begin.saturating_add(rows));
            push(&mut rounds, begin..end, PLAN)?;
            begin = end;
        }
    }
    Ok(rounds)
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)]
mod tests {
    use super::*;

    #[test]
    fn rounds_hold_all_runs() {
        let all = |runs: &[Range<u32>], rows| rounds(runs, rows).expect("memory");
        assert_eq!(all(&[], 4), []);
        assert_eq!(all(&[3..10], 4), [3..7, 7..10]);
        assert_eq!(all(&[0..1, 2..3, 4..9], 4), [0..3, 4..8, 8..9], "rows of tokens in between count");
        assert_eq!(all(&[0..1, 2..3, 3..9], 4), [0..4, 4..8, 8..9]);
        assert_eq!(all(&[0..1, 40..41], 64), [0..1, 40..41], "a prompt in between is not scored");
        assert_eq!(all(&[0..1, 33..34], 64), [0..34]);
        assert_eq!(all(&[5..7], u32::MAX), [5..7]);
        assert_eq!(all(&[5..7], 0), [5..6, 6..7]);
    }

    #[test]
    fn runs_that_touch_are_one() {
        let mut runs = Vec::new();
        [0..2, 2..3, 5..6].into_iter().for_each(|range| push_run(&mut runs, range).expect("memory"));
        assert_eq!(runs, [0..3, 5..6]);
    }
}
