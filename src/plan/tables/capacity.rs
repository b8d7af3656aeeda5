//! How large a step's tables are, and where their sections begin.

use bytemuck::{Pod, Zeroable};

use crate::base::error::{Error, Result};
use crate::cache::KvSpec;
use crate::plan::{Merge, Plan, QueryToken, WorkItem};

/// How much a step holds before it grows, and how large its grids are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Capacity {
    /// Work items.
    pub items: u32,
    /// Entries of [`Plan::queries`].
    pub queries: u32,
    /// Words of the flat page list.
    pub pages: u32,
    /// Entries of [`Plan::merges`].
    pub merges: u32,
    /// Entries of [`Plan::merge_partials`].
    pub merge_partials: u32,
    /// Partial results, one a row and split.
    pub partials: u32,
}

impl Capacity {
    /// Exactly what a plan needs.
    #[must_use]
    pub fn of(plan: &Plan) -> Self {
        Self {
            items: plan.items.len() as u32,
            queries: plan.queries.len() as u32,
            pages: plan.page_list_len(),
            merges: plan.merges.len() as u32,
            merge_partials: plan.merge_partials.len() as u32,
            partials: plan.num_partials,
        }
    }

    /// The larger of both, field by field.
    pub fn max(self, other: Self) -> Self {
        self.zip(other, u32::max)
    }

    /// Whether everything in `other` fits.
    #[must_use]
    pub fn holds(self, other: Self) -> bool {
        self.max(other) == self
    }

    /// Enough for `other`, with the fields that had to grow rounded up so that they seldom grow again.
    #[must_use]
    pub fn grown_to(self, other: Self) -> Self {
        self.zip(other, |have, want| {
            if want > have { want.checked_next_power_of_two().unwrap_or(want).max(16) } else { have }
        })
    }

    /// # Errors
    /// [`Error::Capacity`] that names the first field that is too small.
    pub(super) fn check(&self, need: &Self) -> Result<()> {
        for (what, got, want) in [
            ("Capacity::items", self.items, need.items),
            ("Capacity::queries", self.queries, need.queries),
            ("Capacity::pages", self.pages, need.pages),
            ("Capacity::merges", self.merges, need.merges),
            ("Capacity::merge_partials", self.merge_partials, need.merge_partials),
            ("Capacity::partials", self.partials, need.partials),
        ] {
            if got < want {
                let cure = "use `Capacity::of` the plan, or `grown_to` it";
                return Err(Error::Capacity { what, got: got.into(), need: want.into(), cure });
            }
        }
        Ok(())
    }

    fn zip(self, other: Self, f: impl Fn(u32, u32) -> u32) -> Self {
        Self {
            items: f(self.items, other.items),
            queries: f(self.queries, other.queries),
            pages: f(self.pages, other.pages),
            merges: f(self.merges, other.merges),
            merge_partials: f(self.merge_partials, other.merge_partials),
            partials: f(self.partials, other.partials),
        }
    }

    /// Words of tables of this capacity, in 64 bits. Above [`MOST_WORDS`] they have no [`Capacity::header`].
    pub(crate) fn words(&self) -> u64 {
        let items = u64::from(self.items).next_multiple_of(2);
        let sections = [
            (items, size_of::<WorkItem>()),
            (self.queries.into(), size_of::<QueryToken>()),
            (self.merges.into(), size_of::<Merge>()),
            (self.merge_partials.into(), 4),
            (self.pages.into(), 4),
        ];
        let words = |(count, size): (u64, usize)| (count * (size as u64 / 4)).next_multiple_of(4);
        u64::from(HEADER_WORDS) + sections.into_iter().map(words).sum::<u64>()
    }

    /// # Errors
    /// [`Error::Limit`] for tables of more words than 32 bits count.
    pub(crate) fn check_words(&self) -> Result<()> {
        let (need, limit) = (self.words(), MOST_WORDS);
        if need > limit {
            let cure = "use a smaller batch, fewer or longer splits, or a step of a smaller Capacity, such as `Capacity::of` the plan";
            return Err(Error::Limit { what: "words of a step's tables", need, limit, cure });
        }
        Ok(())
    }

    /// The header of empty tables of this capacity. Tables of more words than 32 bits count have no place for their last
    /// sections: `end` is then `u32::MAX`, which no other table has.
    #[must_use]
    pub fn header(&self, kv: &KvSpec) -> Header {
        let after = |begin: u32, count: u32, size: usize| {
            let end = u64::from(begin) + (u64::from(count) * (size as u64 / 4)).next_multiple_of(4);
            u32::try_from(end).unwrap_or(u32::MAX)
        };
        let items = HEADER_WORDS;
        // CUDA's grids are whole clusters of two blocks, each of which looks at an item.
        let queries =
            after(items, self.items.checked_next_multiple_of(2).unwrap_or(u32::MAX), size_of::<WorkItem>());
        let merges = after(queries, self.queries, size_of::<QueryToken>());
        let merge_partials = after(merges, self.merges, size_of::<Merge>());
        let pages = after(merge_partials, self.merge_partials, 4);
        Header {
            num_items: 0,
            num_merges: 0,
            page_size: kv.page_size,
            num_pages: kv.num_pages,
            items,
            queries,
            merges,
            merge_partials,
            pages,
            end: after(pages, self.pages, 4),
            reserved: [0; 6],
        }
    }
}

/// The most words of tables.
pub(crate) const MOST_WORDS: u64 = u32::MAX as u64 - 1;

/// The first words of the tables. Places are counted in words from the front.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Header {
    /// Work items in use.
    pub num_items: u32,
    /// Merges in use.
    pub num_merges: u32,
    /// Tokens in a page.
    pub page_size: u32,
    /// Pages in the pool.
    pub num_pages: u32,
    /// Place of the [`WorkItem`]s.
    pub items: u32,
    /// Place of the [`QueryToken`]s.
    pub queries: u32,
    /// Place of the [`Merge`]s.
    pub merges: u32,
    /// Place of the merged partial results.
    pub merge_partials: u32,
    /// Place of the flat page list: on wgpu the words of the buffer without it.
    pub pages: u32,
    /// Words in all.
    pub end: u32,
    /// Zero.
    pub reserved: [u32; 6],
}

/// Words of a [`Header`].
pub const HEADER_WORDS: u32 = (size_of::<Header>() / 4) as u32;
