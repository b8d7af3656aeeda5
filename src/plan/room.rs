//! How large a plan becomes, counted before it is made: a batch that is cut too finely is an error and not the end of the process.

use super::balance::Cut;
use super::{Plan, countable, out_of_memory};
use crate::base::error::{Error, Result};

/// The most words of a plan's items, query tokens and merges: a gibibyte. As many items with partial results would take 34 GB of those.
const MOST_WORDS: u64 = 1 << 28;
const WORDS_OF_ITEM: u64 = 8;
const WORDS_OF_QUERY: u64 = 2;
/// An entry of [`Plan::merge_partials`], and where each has a merge of its own.
const WORDS_OF_PARTIAL: u64 = 1 + 3;

/// Parts of a plan.
#[derive(Debug, Clone, Copy, Default)]
struct Need {
    items: u64,
    /// Entries of [`Plan::merge_partials`].
    merge_partials: u64,
    partials: u64,
}

/// Splits of a run. One with no token to attend to still writes its rows' output, unless the shared prefix's items do.
pub(super) fn splits_of(cut: Cut, tokens: u32, partial: bool) -> u32 {
    if tokens == 0 { u32::from(!partial) } else { cut.splits(tokens) }
}

impl Plan {
    /// A batch of so many query tokens has at least as many tiles as hold their rows.
    ///
    /// # Errors
    /// [`Error::Limit`].
    pub(super) fn check_least_room(&self, heads: u32, rows_per_tile: u32) -> Result<()> {
        let rows = u64::from(self.num_queries) * u64::from(heads);
        let items = rows.div_ceil(rows_per_tile.max(1).into()) * WORDS_OF_ITEM;
        self.check_words(u64::from(self.num_queries) * WORDS_OF_QUERY + items)
    }

    /// Reserves what the runs will be cut into.
    ///
    /// # Errors
    /// [`Error::Limit`] and [`Error::OutOfMemory`].
    pub(super) fn make_room(&mut self, heads: u32, rows_per_tile: u32, cut: Cut) -> Result<()> {
        let mut need = Need::default();
        for run in &self.scratch.runs {
            let (rows, tokens) = (run.num_queries * heads, run.end - run.begin);
            let splits = u64::from(splits_of(cut, tokens, run.partial));
            need.items = need.items.saturating_add(splits * u64::from(rows.div_ceil(rows_per_tile)));
            if splits > 1 || run.partial {
                need.merge_partials = need.merge_partials.saturating_add(splits * u64::from(run.num_queries));
                need.partials = need.partials.saturating_add(splits * u64::from(rows));
            }
        }
        let partials = need.partials.saturating_add(self.num_partials.into());
        countable("partial results of one step", partials, "use longer splits or a smaller batch")?;
        let words = (need.items.saturating_mul(WORDS_OF_ITEM))
            .saturating_add(need.merge_partials.saturating_mul(WORDS_OF_PARTIAL))
            .saturating_add(self.queries.len() as u64 * WORDS_OF_QUERY);
        self.check_words(words)?;
        self.scratch.words += words;
        let Self { items, merges, merge_partials, scratch, .. } = self;
        items.try_reserve(need.items as usize).map_err(out_of_memory)?;
        if !scratch.is_slab {
            merge_partials.try_reserve(need.merge_partials as usize).map_err(out_of_memory)?;
            let most = need.merge_partials.min(self.num_queries.into());
            merges.try_reserve(most as usize).map_err(out_of_memory)?;
        }
        scratch.partials.try_reserve(need.merge_partials as usize).map_err(out_of_memory)
    }

    /// With what the plans of earlier slabs have.
    fn check_words(&self, words: u64) -> Result<()> {
        let need = self.scratch.words.saturating_add(words);
        if need > MOST_WORDS {
            let (what, limit) = ("words of a plan's items, query tokens and merges", MOST_WORDS);
            let cure = "use longer splits (SplitPolicy::FixedTokens), a smaller Tiling::target_items, larger tiles, or a smaller batch";
            return Err(Error::Limit { what, need, limit, cure });
        }
        Ok(())
    }
}
