//! Split-KV planning: which workgroup attends with which query rows to which tokens. Pure, and shared by every
//! layer of a model and every backend.
//!
//! A *query row* is one head of one query token. A *tile* is up to `rows_per_tile` rows of one sequence (of several, over a shared prefix),
//! numbered `token * H + head`, so that a tile may hold several tokens of few heads. A *work item* is a tile over a range of tokens; a
//! query row that needs several items (splits) leaves one *partial result* an item, its output and LSE over that range, which a merge
//! combines.

use bytemuck::{Pod, Zeroable};

use crate::base::error::{Error, Result};
use crate::base::mask::Mask;
use crate::base::memory::collected;
use crate::cache::decode_spec::MlaDecode;

mod balance;
mod check;
mod cut;
mod room;
pub(crate) mod shares;
mod slabbed;
mod slabs;
mod sparse;
pub mod tables;
pub(crate) use check::check_plan;
pub(crate) use slabbed::Slabbed;
pub(crate) use slabs::check_slabs;
pub use slabs::{SlabPlan, SlabTable};
pub use sparse::SparseBatch;

/// A work item: what one workgroup attends. It is plain data with one layout for every backend, 8 little-endian `u32`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct WorkItem {
    /// First query row of the tile: index into [`Plan::queries`] times `H`, plus the head.
    pub first_row: u32,
    /// Rows in the tile, at most `rows_per_tile`.
    pub num_rows: u32,
    /// Where the sequence's pages begin in the flat page list.
    pub page_begin: u32,
    /// First token attended.
    pub kv_begin: u32,
    /// One past the last token attended; equal to `kv_begin` where nothing is visible.
    pub kv_end: u32,
    /// Index of the first row's partial result, or [`DIRECT`].
    pub partial: u32,
    /// Zero: where a pool is cut into slabs, each slab has a plan of its own ([`Plan::slabs`]), so an item's pages lie in one buffer.
    pub pool: u32,
    /// Zero; unused.
    pub reserved: u32,
}

/// The [`WorkItem::partial`] of an item that writes its output itself, with no merge.
pub const DIRECT: u32 = u32::MAX;

/// A query token as the kernels see it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct QueryToken {
    /// Its index in the query and output arrays.
    pub token: u32,
    /// One past the last key of its sequence that it sees.
    pub visible: u32,
}

/// A query token whose partial results are to be merged.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Merge {
    /// Its index in the output arrays.
    pub token: u32,
    /// First of its entries in [`Plan::merge_partials`].
    pub begin: u32,
    /// One past its last entry.
    pub end: u32,
}

/// Sizes by which the planner cuts work for a kernel: properties of the chosen variant, not of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// Query rows that share one pass over the cache.
    pub rows_per_tile: u32,
    /// Tokens between two possible split boundaries of the automatic policy.
    pub tokens_per_block: u32,
    /// The number of work items that fill the device: as many as run concurrently. A ragged batch may be cut into more, where the items
    /// that start last are short.
    pub target_items: u32,
    /// The shortest split that the automatic policy aims at. A range just too long for one split becomes two of half the
    /// length.
    pub min_split_tokens: u32,
    /// The `target_items` of a batch that is a single tile, such as one sequence with few heads. There the merge has the most partial
    /// results a query row, and with fewer items it finds free multiprocessors. 0 means the same as `target_items`.
    pub single_sequence_items: u32,
    /// The overhead of a work item, its start and its partial result, as a number of tokens that are attended in that time. The automatic
    /// policy uses it to compare cuts of a ragged batch. 0 if it is unknown.
    pub item_overhead_tokens: u32,
}

/// Where sequences are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SplitPolicy {
    /// Enough splits to fill the device: equal shares of each sequence, or pieces of one length and a remainder of each sequence
    /// where a model of list scheduling predicts that these finish sooner.
    #[default]
    Auto,
    /// Cuts at the multiples of this many tokens. The result of a query row then depends on nothing but its own inputs: not
    /// on the batch, its order or shared prefixes, bit for bit. CUDA's variants with TMA boxes load splits slowly
    /// that are no multiple of 16, or on Hopper, with more than 32 query rows and a 16-bit cache or an e4m3 query, of 64.
    FixedTokens(u32),
    /// No cuts and no merge.
    OneSplit,
}

/// Sequences whose first tokens are the same pages, attended once for all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedPrefix {
    /// Indices in the batch. A sequence may be in one group at most.
    pub sequences: Vec<u32>,
    /// Tokens that they share; the plan may use fewer.
    pub tokens: u32,
}

impl SharedPrefix {
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn of(sequences: &[u32], tokens: u32) -> Result<Self> {
        let sequences =
            collected(sequences.iter().copied(), sequences.len(), "sequences of a shared prefix")?;
        Ok(Self { sequences, tokens })
    }
}

/// One step's batch of a decode, as [`Plan::new`] takes it.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// Tokens in the cache, a sequence; this step's new ones included.
    pub seq_lens: &'a [i32],
    /// Where each sequence's query tokens begin; one entry more than `seq_lens`.
    pub query_start_loc: &'a [i32],
    /// Which keys a query token sees.
    pub mask: Mask<'a>,
    /// Groups that share a prefix: [`crate::PagePool::shared_prefixes`] finds them. Empty for none.
    pub shared_prefixes: &'a [SharedPrefix],
    /// The pages of a pool in several slabs: [`crate::KvView::in_slabs`]. `None` for a pool in one buffer.
    pub slabs: Option<SlabTable<'a>>,
}

impl<'a> Batch<'a> {
    /// A causal batch with no shared prefixes, of a pool in one buffer.
    #[must_use]
    pub fn new(seq_lens: &'a [i32], query_start_loc: &'a [i32]) -> Self {
        Self { seq_lens, query_start_loc, mask: Mask::Causal, shared_prefixes: &[], slabs: None }
    }
}

/// A step's work, ready for any backend and any layer of the model.
///
/// What a kernel follows is checked when a step is prepared with it, so a host may change the public fields: docs/bounds.md has a table
/// of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// The work items, longest first; those of a batch whose items are about equally long are not sorted.
    pub items: Vec<WorkItem>,
    /// The query tokens that items refer to; a token stands twice if it also attends a shared prefix.
    pub queries: Vec<QueryToken>,
    /// The query tokens with several partial results.
    pub merges: Vec<Merge>,
    /// Indices of the partial results of head 0 that each merge combines, in token order. That of head `h` is `h` further.
    pub merge_partials: Vec<u32>,
    /// Partial results: one for each query row and split.
    pub num_partials: u32,
    /// Query tokens in the batch.
    pub num_queries: u32,
    /// Heads of the spec that it was made for: a decode refuses a plan for another number.
    pub num_heads: u32,
    /// Tokens per page of the spec that it was made for: a decode refuses a plan for other pages.
    pub page_size: u32,
    /// Tokens of each sequence.
    pub seq_lens: Vec<u32>,
    /// Where each sequence's pages begin in the flat page list; one entry more than there are sequences.
    pub page_begin: Vec<u32>,
    /// The shared prefixes in use: `(first sequence, other sequence, tokens)`.
    pub shared: Vec<(u32, u32, u32)>,
    /// The parts of a plan over a pool in several slabs, which then has no items, queries, sequences and pages of its own. Else empty.
    /// Private, as is `slab_pages`: which slab's buffer a page id is an index of follows from them.
    slabs: Vec<SlabPlan>,
    /// Pages of a slab; 0 where there are none.
    slab_pages: u32,
    /// Entries of each query token's list of slots; 0 for a plan over pages.
    topk: u32,
    scratch: Scratch,
}

/// Memory that is reused by the next plan.
#[derive(Debug, Clone, Default)]
struct Scratch {
    /// Per sequence: where its own part begins, 0 without a shared prefix.
    own_begin: Vec<u32>,
    /// Runs of work before they are cut into splits.
    runs: Vec<Run>,
    /// `(query token, index of its head 0's partial result)` in the order in which merges sum.
    partials: Vec<(u32, u32)>,
    balance: balance::Scratch,
    /// Whether this is the plan of a slab: all of its items leave partial results.
    is_slab: bool,
    /// Words that this plan takes, with those of the slabs before it.
    words: u64,
    /// Memory of slabs of earlier plans.
    slabs: Vec<SlabPlan>,
}

/// Scratch memory does not take part in comparisons of plans.
impl PartialEq for Scratch {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Scratch {}

/// Query tokens that attend to one range of one page list.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Run {
    first_query: u32,
    num_queries: u32,
    page_begin: u32,
    begin: u32,
    end: u32,
    /// Whether its rows have partial results of other runs too, of a shared prefix.
    partial: bool,
}

/// The page list leaves room after each sequence, so that one that grows by a page does not move the others and
/// an upload of what changed stays small.
const PAGE_LIST_STRIDE: u32 = 32;

impl Plan {
    /// Plans a step.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::QueryStartLoc`], [`Error::SeqLen`] and [`Error::Shape`] for a batch that contradicts itself, and as
    /// [`MlaDecode::check`]; [`Error::Limit`] for more query rows, pages or partial results than 32 bits count, and for items, query tokens
    /// and merges of more than 2^28 words, where splits are too short; [`Error::OutOfMemory`].
    pub fn new(spec: &MlaDecode, tiling: &Tiling, batch: &Batch<'_>, policy: SplitPolicy) -> Result<Self> {
        let mut plan = Self::default();
        plan.update(spec, tiling, batch, policy)?;
        Ok(plan)
    }

    /// Plans the next step in the same memory: a steady decode loop allocates nothing.
    ///
    /// # Errors
    /// The errors of [`Plan::new`]; the plan is then empty.
    pub fn update(
        &mut self,
        spec: &MlaDecode,
        tiling: &Tiling,
        batch: &Batch<'_>,
        policy: SplitPolicy,
    ) -> Result<()> {
        self.clear();
        self.scratch.is_slab = false;
        let done = self.build(spec, tiling, batch, policy);
        if done.is_err() {
            self.clear();
        }
        done
    }

    /// Words of the flat page list, room for growth included.
    #[must_use]
    pub fn page_list_len(&self) -> u32 {
        self.page_begin.last().copied().unwrap_or(0)
    }

    /// Query rows times tokens over all items: what a step costs, in units that do not depend on the device.
    pub fn work(&self) -> u64 {
        let own = self.items.iter().map(WorkItem::work);
        own.chain(self.slabs.iter().map(|slab| slab.plan.work())).fold(0, u64::saturating_add)
    }

    fn clear(&mut self) {
        let Self {
            items, queries, merges, merge_partials, seq_lens, page_begin, shared, slabs, scratch, ..
        } = self;
        // Taken from the end by the next plan.
        scratch.slabs.extend(slabs.drain(..).rev());
        items.clear();
        queries.clear();
        merges.clear();
        merge_partials.clear();
        seq_lens.clear();
        page_begin.clear();
        shared.clear();
        scratch.own_begin.clear();
        scratch.runs.clear();
        scratch.partials.clear();
        self.scratch.words = 0;
        self.num_partials = 0;
        self.num_queries = 0;
        self.num_heads = 0;
        self.page_size = 0;
        self.slab_pages = 0;
        self.topk = 0;
    }

    fn build(
        &mut self,
        spec: &MlaDecode,
        tiling: &Tiling,
        batch: &Batch<'_>,
        policy: SplitPolicy,
    ) -> Result<()> {
        spec.check()?;
        check_policy(policy)?;
        match &batch.slabs {
            Some(table) if spec.kv.num_slabs(table.slab_pages)? > 1 => {
                self.build_slabs(spec, tiling, (batch, table), policy)
            }
            _ => self.build_one(spec, tiling, batch, policy),
        }
    }

    /// Plans a pool in one buffer.
    fn build_one(
        &mut self,
        spec: &MlaDecode,
        tiling: &Tiling,
        batch: &Batch<'_>,
        policy: SplitPolicy,
    ) -> Result<()> {
        self.check_batch(spec, batch)?;
        self.check_prefixes(batch)?;
        self.check_least_room(spec.shape.num_heads, tiling.rows_per_tile)?;
        self.queries.try_reserve(self.num_queries as usize).map_err(out_of_memory)?;
        self.lay_out_pages(spec)?;
        self.share_prefixes(batch, policy, tiling, spec.shape.num_heads)?;
        self.add_own_runs(batch)?;
        self.cut(spec.shape.num_heads, tiling, policy)?;
        if !self.scratch.is_slab {
            self.list_merges();
        }
        self.sort_items(tiling);
        Ok(())
    }

    /// Sorts items longest first, so that no long item starts last. Items of about one length keep the order in which the tiles of a
    /// range are adjacent, as these read the same tokens.
    fn sort_items(&mut self, tiling: &Tiling) {
        let lengths = || self.items.iter().map(|item| item.kv_end - item.kv_begin);
        let (longest, shortest) = (lengths().max().unwrap_or(0), lengths().min().unwrap_or(0));
        if longest - shortest <= tiling.tokens_per_block {
            return;
        }
        // The index makes the order total: an unstable sort then needs no memory and is reproducible.
        for (item, place) in self.items.iter_mut().zip(0..) {
            item.reserved = place;
        }
        self.items.sort_unstable_by_key(|item| (u32::MAX - (item.kv_end - item.kv_begin), item.reserved));
        for item in &mut self.items {
            item.reserved = 0;
        }
    }

    fn lay_out_pages(&mut self, spec: &MlaDecode) -> Result<()> {
        let mut at = 0u32;
        self.page_begin.push(at);
        for &len in &self.seq_lens {
            let pages = (spec.kv.pages_for(len) + 1).next_multiple_of(PAGE_LIST_STRIDE);
            let end = u64::from(at) + u64::from(pages);
            at = countable("page list of one step", end, "use a smaller batch or larger pages")?;
            self.page_begin.push(at);
        }
        Ok(())
    }

    /// One run for each group's prefix, ahead of the sequences' own, where tiles then attend it fewer times. Else it would only add merges:
    /// the sequences' own tiles read the same pages, at about the same time.
    fn share_prefixes(
        &mut self,
        batch: &Batch<'_>,
        policy: SplitPolicy,
        tiling: &Tiling,
        heads: u32,
    ) -> Result<()> {
        let loc = batch.query_start_loc;
        let rows = |seq: u32| heads * (loc[seq as usize + 1] - loc[seq as usize]) as u32;
        let tiles = |rows: u32| rows.div_ceil(tiling.rows_per_tile.max(1));
        for group in batch.shared_prefixes {
            let unit = match policy {
                SplitPolicy::FixedTokens(n) => n,
                SplitPolicy::Auto => tiling.tokens_per_block.max(1),
                SplitPolicy::OneSplit => continue,
            };
            let shortest = group.sequences.iter().map(|&s| self.seq_lens[s as usize]).min().unwrap_or(0);
            let tokens = group.tokens.min(shortest) / unit * unit;
            let apart: u32 = group.sequences.iter().map(|&seq| tiles(rows(seq))).sum();
            let together = tiles(group.sequences.iter().map(|&seq| rows(seq)).sum());
            if tokens == 0 || together >= apart {
                continue;
            }
            let first_query = self.queries.len() as u32;
            for &seq in &group.sequences {
                self.scratch.own_begin[seq as usize] = tokens;
                self.shared.push((group.sequences[0], seq, tokens));
                self.push_queries(batch, seq as usize)?;
            }
            self.scratch.runs.push(Run {
                first_query,
                num_queries: self.queries.len() as u32 - first_query,
                page_begin: self.page_begin[group.sequences[0] as usize],
                begin: 0,
                end: tokens,
                partial: true,
            });
        }
        Ok(())
    }

    fn add_own_runs(&mut self, batch: &Batch<'_>) -> Result<()> {
        for seq in 0..self.seq_lens.len() {
            let first_query = self.queries.len() as u32;
            self.push_queries(batch, seq)?;
            let queries = &self.queries[first_query as usize..];
            let Some(end) = queries.iter().map(|q| q.visible).max() else { continue };
            let begin = self.scratch.own_begin[seq];
            self.scratch.runs.push(Run {
                first_query,
                num_queries: queries.len() as u32,
                page_begin: self.page_begin[seq],
                begin,
                end: end.max(begin),
                partial: begin > 0 || self.scratch.is_slab,
            });
        }
        Ok(())
    }

    fn push_queries(&mut self, batch: &Batch<'_>, seq: usize) -> Result<()> {
        let (first, last) = (batch.query_start_loc[seq] as u32, batch.query_start_loc[seq + 1] as u32);
        let len = self.seq_lens[seq];
        self.queries.try_reserve((last - first) as usize).map_err(out_of_memory)?;
        for token in first..last {
            let visible = batch.mask.visible(i64::from(token - first), last - first, len, token as usize);
            if visible > len {
                let cure = "must be at most its sequence's seq_len";
                return Err(Error::Shape {
                    what: "visible keys of a query token",
                    got: visible.into(),
                    cure,
                });
            }
            self.queries.push(QueryToken { token, visible });
        }
        Ok(())
    }
}

impl WorkItem {
    /// Query rows times tokens.
    #[must_use]
    pub fn work(&self) -> u64 {
        u64::from(self.num_rows) * u64::from(self.kv_end.saturating_sub(self.kv_begin))
    }
}

fn check_policy(policy: SplitPolicy) -> Result<()> {
    if policy == SplitPolicy::FixedTokens(0) {
        return Err(Error::Shape { what: "tokens per split", got: 0, cure: "must be at least 1" });
    }
    Ok(())
}

fn out_of_memory(_: std::collections::TryReserveError) -> Error {
    Error::OutOfMemory { what: "a plan" }
}

/// `count`, where it can be told from [`DIRECT`].
fn countable(what: &'static str, count: u64, cure: &'static str) -> Result<u32> {
    let limit = DIRECT - 1;
    let got = u32::try_from(count).ok().filter(|&count| count <= limit);
    got.ok_or(Error::Limit { what, need: count, limit: limit.into(), cure })
}
