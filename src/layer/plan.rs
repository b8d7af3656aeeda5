//! How a mixed batch is executed: which tokens are decoded, and in which chunks the others attend. Pure.
//!
//! Sequences of at most `decode_threshold` query tokens are decoded in absorbed form. Those of the others are prefilled: their keys, old
//! and new, are gathered from the cache chunk by chunk, expanded through `kv_b_proj` and attended. A chunk has as many tokens as the
//! workspace has rows; it may hold several sequences, and a long sequence is in several chunks. The partial result of a later chunk is
//! merged, by LSE, into that of the earlier ones. Sequences that attend lists of slots are neither: see `lists.rs`.
//!
//! All keys come from the cache, those of a step's new tokens too: cutting a prompt into steps or chunks changes no key.

use std::ops::Range;

use super::batch::LayerBatch;
use super::expanded::ExpandedPrefix;
use super::lists::{ListPlan, Listing, PLAN, push_run};
use super::over_prefixes::{keep_what_pays, over_prefixes};
use super::rounds::check_rounds;
use super::rows::{Row, Rows};
use super::{LayerCapacity, MlaLayer};
use crate::base::error::{Error, Result};
use crate::base::mask::Mask;
use crate::base::memory::{collected, extend, push, room_for};
use crate::ops::composes::PrefixCost;
use crate::ops::{GatherRange, PrefillSequence};
use crate::plan::tables::PageTable;
use crate::plan::{Batch, Plan, SharedPrefix, SlabTable, SplitPolicy, Tiling};

/// Where partial results go. Merges ping-pong between [`Target::Out`] and [`Target::Other`], as no op reads and writes one buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The output.
    Out,
    /// An array of the workspace, as large as the output.
    Other,
    /// The partial results that the next merge adds.
    Partial,
}

impl Target {
    /// The target that a merge of this one writes.
    pub(crate) fn turned(self) -> Self {
        match self {
            Self::Out => Self::Other,
            _ => Self::Out,
        }
    }
}

/// One attention over rows of the workspace, in which a sequence is at most once, and the merge after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Round {
    /// Sequences that begin in this round: they write [`Round::state`].
    pub first: Vec<PrefillSequence>,
    /// Sequences that continue from an earlier chunk: they write [`Target::Partial`]. All other query tokens are here too, with no
    /// keys, so that the merge does not change them. Empty: nothing is merged.
    pub more: Vec<PrefillSequence>,
    /// Where the results so far are: [`Target::Out`] or [`Target::Other`]. The merge writes the other.
    pub state: Target,
}

/// Rows that are in the workspace at one time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// The ranges of tokens that are gathered.
    pub ranges: Vec<GatherRange>,
    /// Rows in use.
    pub rows: u32,
    /// The attentions over these rows, in order.
    pub rounds: Vec<Round>,
}

/// A step's work, the same for each layer of a model. [`Step::plan`](crate::Step::plan) has that of a layer with lists too.
#[derive(Debug, Clone, Default)]
pub struct LayerPlan {
    /// The decode of the short sequences. Its tokens are numbered as in the whole batch, up to the last that is decoded.
    pub decode: Plan,
    /// Runs of query tokens that are decoded.
    pub decoded: Vec<Range<u32>>,
    /// The page list of the sequences that are decoded, in CSR form.
    pub(crate) decode_pages: (Vec<i32>, Vec<i32>),
    /// The attention of decoded tokens over expanded prefixes, before the keys are split; empty where no prefix is expanded.
    pub(crate) over_prefixes: Vec<PrefillSequence>,
    /// One past the last row of the expanded prefixes.
    prefix_rows: u32,
    /// The chunks of keys that prefilled sequences attend.
    pub chunks: Vec<Chunk>,
    /// What attends lists of slots, in a layer of [`LayerOptions::topk`](super::LayerOptions::topk).
    pub lists: ListPlan,
    /// Runs of query tokens that are attended in absorbed form: decodes, and those that attend lists.
    pub(crate) absorbed: Vec<Range<u32>>,
    /// Position of each query token in its sequence.
    pub positions: Vec<i32>,
    /// Merges of the whole step.
    pub num_merges: u32,
}

/// A range of a prompt's keys in a chunk.
#[derive(Debug, Clone, Copy)]
struct Piece {
    prompt: Row,
    keys: Range2,
    row: u32,
}

/// `Range` is not `Copy`.
#[derive(Debug, Clone, Copy)]
struct Range2 {
    begin: u32,
    end: u32,
}

impl LayerPlan {
    /// Plans a step.
    ///
    /// # Errors
    /// The errors of [`Plan::new`]; [`Error::QueryLen`] for a sequence with more query tokens than tokens; [`Error::Length`] for a
    /// `slot_mapping` or page table of another batch, [`Error::OtherSpec`] for a table of other pages; [`Error::SlotMismatch`] where
    /// mapping and table contradict each other, [`Error::PageWrittenTwice`] where two sequences write to one page; [`Error::SeqLen`] for a
    /// sequence whose pages do not hold its tokens; [`Error::LayoutMismatch`] for [`PageTable::Device`]; [`Error::PrefixNotShared`] for a
    /// prefix whose sequences have other pages; [`Error::Limit`] for prompts in too many parts; [`Error::Shape`] for a spec as
    /// [`MlaLayer::check`], for a prefix that its sequences do not have, and for a workspace that holds not even one page, or one split of
    /// [`SplitPolicy::FixedTokens`]; [`Error::OutOfMemory`].
    pub fn new(
        spec: &MlaLayer,
        tiling: &Tiling,
        batch: &LayerBatch<'_>,
        policy: SplitPolicy,
    ) -> Result<Self> {
        Self::in_slabs(spec, tiling, batch, policy, 0)
    }

    /// Like [`LayerPlan::new`], over a pool in slabs of so many pages each: see [`crate::KvView::in_slabs`]. 0 is a pool in one buffer.
    ///
    /// # Errors
    /// The errors of [`LayerPlan::new`]; [`Error::Shape`] for slabs that are too small.
    pub fn in_slabs(
        spec: &MlaLayer,
        tiling: &Tiling,
        batch: &LayerBatch<'_>,
        policy: SplitPolicy,
        slab_pages: u32,
    ) -> Result<Self> {
        Self::by_cost(spec, tiling, batch, policy, slab_pages, (None, None))
    }

    /// Like [`LayerPlan::in_slabs`], but a prefix whose expanded form costs more is attended in absorbed form. With
    /// [`SplitPolicy::FixedTokens`] none is: a result must not depend on how many sequences share a prefix. With a [`Listing`] the
    /// sequences that are longer than its `topk` attend lists.
    pub(super) fn by_cost(
        spec: &MlaLayer,
        tiling: &Tiling,
        batch: &LayerBatch<'_>,
        policy: SplitPolicy,
        slab_pages: u32,
        (cost, listing): (Option<&PrefixCost>, Option<&Listing>),
    ) -> Result<Self> {
        let mut rows = Rows::new(spec, batch, listing.map_or(0, |listing| listing.topk))?;
        if let (Some(cost), SplitPolicy::Auto | SplitPolicy::OneSplit) = (cost, policy) {
            keep_what_pays(spec, tiling, &mut rows, cost)?;
        }
        let mut plan = Self::default();
        plan.plan_decodes(spec, tiling, &rows, policy, slab_pages)?;
        plan.plan_chunks(spec, &rows, policy)?;
        if let Some(listing) = listing {
            plan.lists = ListPlan::new(spec, listing, &rows, policy, slab_pages)?;
        }
        let runs = plan.decoded.iter().chain(&plan.lists.tokens).cloned();
        let mut absorbed = collected(runs, plan.decoded.len() + plan.lists.tokens.len(), PLAN)?;
        absorbed.sort_unstable_by_key(|run| run.start);
        absorbed.into_iter().try_for_each(|run| push_run(&mut plan.absorbed, run))?;
        let end = |prefix: &ExpandedPrefix| prefix.first_row.saturating_add(prefix.tokens);
        plan.prefix_rows = rows.prefixes.iter().map(end).max().unwrap_or(0);
        plan.positions = rows.positions;
        Ok(plan)
    }

    /// The capacity of a layer that the step needs.
    pub(super) fn used(&self) -> LayerCapacity {
        LayerCapacity {
            tokens: self.positions.len() as u32,
            positions: self.positions.iter().max().map_or(0, |&last| last as u32 + 1),
            decode_tokens: self.absorbed.last().map_or(0, |tokens| tokens.end),
            prefix_rows: self.prefix_rows,
            listed_tokens: self.lists.end(),
        }
    }

    /// Query tokens that are attended in absorbed form.
    pub(super) fn num_absorbed(&self) -> u32 {
        self.absorbed.iter().map(|run| run.end - run.start).sum()
    }

    /// The decodes as a batch of their own, whose tokens are then numbered as in the whole batch.
    fn plan_decodes(
        &mut self,
        spec: &MlaLayer,
        tiling: &Tiling,
        rows: &Rows<'_>,
        policy: SplitPolicy,
        slab_pages: u32,
    ) -> Result<()> {
        let decodes = &rows.decodes;
        // Tokens that the absorbed decode has no part in.
        let skipped = |decode: &Row| rows.expanded(decode.sequence).map_or(0, |prefix| prefix.tokens);
        let (mut seq_lens, mut loc): (Vec<i32>, Vec<i32>) =
            (room_for(decodes.len(), PLAN)?, room_for(decodes.len() + 1, PLAN)?);
        let mut tokens = Vec::new();
        loc.push(0);
        for decode in decodes {
            let range = decode.q_begin..decode.q_begin + decode.q_len;
            seq_lens.push((decode.len - skipped(decode)) as i32);
            extend(&mut tokens, range.clone(), PLAN)?;
            loc.push(tokens.len() as i32);
            push_run(&mut self.decoded, range)?;
        }
        let mut shared = room_for(rows.shared.len(), PLAN)?;
        for group in rows.shared.iter() {
            shared.push(among_decodes(group, rows)?);
        }
        let sequences = decodes.iter().map(|decode| (decode.sequence, skipped(decode)..decode.len));
        self.decode_pages = rows.pages.list(sequences)?;
        let (kv_indptr, kv_indices) = &self.decode_pages;
        let pages = PageTable::Csr { kv_indptr, kv_indices };
        let slabs = (slab_pages > 0).then_some(SlabTable { pages, slab_pages });
        let compact = Batch { shared_prefixes: &shared, slabs, ..Batch::new(&seq_lens, &loc) };
        self.decode = Plan::new(&spec.mla(), tiling, &compact, policy)?;
        self.decode.renumber(&tokens, self.decoded.last().map_or(0, |run| run.end));
        let tokens = decodes.iter().map(|row| (row.q_begin, row.q_len, rows.expanded(row.sequence)));
        self.over_prefixes = over_prefixes(&collected(tokens, decodes.len(), PLAN)?)?;
        Ok(())
    }

    fn plan_chunks(&mut self, spec: &MlaLayer, rows: &Rows<'_>, policy: SplitPolicy) -> Result<()> {
        let prompts = &rows.prompts;
        if prompts.is_empty() {
            return Ok(());
        }
        // A sequence is cut at the end of a page, or of a split of fixed length.
        let (unit, split) = match policy {
            SplitPolicy::FixedTokens(n) => (n, n),
            SplitPolicy::Auto | SplitPolicy::OneSplit => (spec.kv.page_size, u32::MAX),
        };
        let longest: u32 = prompts.iter().map(|prompt| prompt.len).max().unwrap_or(0);
        let room = spec.workspace_rows();
        if room < unit.min(longest) {
            let cure = "must hold a page, and a split of SplitPolicy::FixedTokens: see MlaLayer::workspace_row_bytes";
            return Err(Error::Shape { what: "workspace_bytes", got: spec.workspace_bytes, cure });
        }
        let lens = prompts.iter().map(|prompt| (prompt.sequence, prompt.len));
        check_rounds(rows.pages, lens, split.min((room / unit * unit).max(room.min(longest))))?;
        let mut chunks: Vec<Vec<Piece>> = vec![Vec::new()];
        let mut used = 0;
        for &prompt in prompts {
            let mut begin = 0;
            while begin < prompt.len {
                // All that is left, or whole units.
                let left = prompt.len - begin;
                let fits = if left <= room - used { left } else { (room - used) / unit * unit };
                if fits == 0 {
                    push(&mut chunks, Vec::new(), PLAN)?;
                    used = 0;
                    continue;
                }
                let keys = Range2 { begin, end: begin + fits };
                if let Some(chunk) = chunks.last_mut() {
                    push(chunk, Piece { prompt, keys, row: used }, PLAN)?;
                }
                begin += fits;
                used += fits;
            }
        }
        let all = prompts.iter().map(|prompt| (prompt.q_begin, prompt.q_len));
        let all = collected(all, prompts.len(), PLAN)?;
        self.chunks = room_for(chunks.len(), PLAN)?;
        for pieces in &chunks {
            let chunk = self.chunk(pieces, split, &all)?;
            self.chunks.push(chunk);
        }
        // Each merge changes between Out and Other, and the last has to write Out.
        let mut state = if self.num_merges.is_multiple_of(2) { Target::Out } else { Target::Other };
        for round in self.chunks.iter_mut().flat_map(|chunk| &mut chunk.rounds) {
            round.state = state;
            if !round.more.is_empty() {
                state = state.turned();
            }
        }
        Ok(())
    }

    /// Splits the pieces of a chunk into rounds, in each of which a sequence attends once.
    fn chunk(&mut self, pieces: &[Piece], split: u32, all: &[(u32, u32)]) -> Result<Chunk> {
        let ranges = pieces.iter().map(|piece| GatherRange {
            sequence: piece.prompt.sequence,
            begin: piece.keys.begin,
            tokens: piece.keys.end - piece.keys.begin,
            out_row: piece.row,
        });
        let rows = pieces.last().map_or(0, |piece| piece.row + piece.keys.end - piece.keys.begin);
        let splits = |piece: &Piece| (piece.keys.end - piece.keys.begin).div_ceil(split);
        let num_rounds = pieces.iter().map(splits).max().unwrap_or(0);
        let mut rounds = Vec::new();
        for turn in 0..num_rounds {
            let (mut first, mut more) = (Vec::new(), Vec::new());
            for piece in pieces.iter().filter(|piece| turn < splits(piece)) {
                let begin = piece.keys.begin.saturating_add(turn.saturating_mul(split));
                let end = begin.saturating_add(split).min(piece.keys.end);
                let attends = piece.prompt.over(begin..end, piece.row + begin - piece.keys.begin);
                push(if begin == 0 { &mut first } else { &mut more }, attends, PLAN)?;
            }
            if !more.is_empty() {
                self.num_merges += 1;
                let goes_on = more.iter().map(|sequence: &PrefillSequence| sequence.q_begin);
                let goes_on = collected(goes_on, more.len(), PLAN)?;
                let others = all.iter().filter(|(q_begin, _)| !goes_on.contains(q_begin));
                for &(q_begin, q_len) in others {
                    push(&mut more, PrefillSequence::full(q_begin, q_len, 0, 0), PLAN)?;
                }
            }
            push(&mut rounds, Round { first, more, state: Target::Out }, PLAN)?;
        }
        Ok(Chunk { ranges: collected(ranges, pieces.len(), PLAN)?, rows, rounds })
    }
}

impl Row {
    /// Its query tokens over a range of its keys, which lie in the workspace from `row` on.
    fn over(&self, keys: Range<u32>, row: u32) -> PrefillSequence {
        // Token i sees the keys up to its own position.
        let first = i64::from(self.len - self.q_len) + 1 - i64::from(keys.start);
        PrefillSequence {
            q_begin: self.q_begin,
            q_len: self.q_len,
            kv_begin: row,
            kv_len: keys.end - keys.start,
            mask: Mask::CausalFrom(first),
            out_begin: self.q_begin,
        }
    }
}

/// A shared prefix cut down to the sequences that the decode kernel attends whole, numbered among the decodes.
///
/// # Errors
/// [`Error::OutOfMemory`].
fn among_decodes(group: &SharedPrefix, rows: &Rows<'_>) -> Result<SharedPrefix> {
    let place = |&sequence: &u32| {
        let place = rows.decodes.iter().position(|decode| decode.sequence == sequence);
        place.filter(|_| rows.expanded(sequence).is_none())
    };
    let sequences = group.sequences.iter().filter_map(place).map(|place| place as u32);
    let sequences = collected(sequences, group.sequences.len(), PLAN)?;
    Ok(SharedPrefix { sequences, tokens: group.tokens })
}

impl LayerPlan {
    /// Keys of the longest expanded prefix; 0 without any.
    pub(crate) fn longest_prefix(&self) -> u32 {
        self.over_prefixes.iter().map(|sequence| sequence.kv_len).max().unwrap_or(0)
    }

    /// The attention of decoded tokens over expanded prefixes, in so many parts, each with `set_stride` rows of results. Set 0 is left for
    /// the decode's own partial results.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn prefix_parts(&self, num_parts: u32, set_stride: u32) -> Result<Vec<PrefillSequence>> {
        let split = |sequence: &PrefillSequence| {
            let first =
                PrefillSequence { out_begin: sequence.out_begin.saturating_add(set_stride), ..*sequence };
            first.split_keys(num_parts, set_stride)
        };
        let parts = self.over_prefixes.len().saturating_mul(num_parts as usize);
        collected(self.over_prefixes.iter().flat_map(split), parts, PLAN)
    }
}

#[cfg(all(test, feature = "cuda", feature = "wgpu"))]
mod tests {
    use super::*;
    use crate::base::dtype::Dtype;
    use crate::layer::prefix_cost::tests::{spec, tiling};

    /// Two sequences of 130 tokens whose first two pages are a prefix: what each way to plan leaves to the absorbed decode.
    #[test]
    fn what_does_not_pay_is_planned_in_absorbed_form() {
        let spec = spec(16, Dtype::F16);
        let prefix = [ExpandedPrefix { sequences: vec![0, 1], tokens: 128, first_row: 0 }];
        let visible = |cost, policy, block_table: &[i32]| {
            let batch = LayerBatch {
                seq_lens: &[130, 130],
                query_start_loc: &[0, 1, 2],
                slot_mapping: &[-1, -1],
                pages: PageTable::Dense { block_table, max_pages: 3 },
                shared_prefixes: &[],
                expanded: &prefix,
            };
            let plan =
                LayerPlan::by_cost(&spec, &tiling(32), &batch, policy, 0, (cost, None)).expect("a plan");
            let visible: Vec<u32> = plan.decode.queries.iter().map(|query| query.visible).collect();
            assert_eq!(plan.over_prefixes.is_empty(), visible.contains(&130), "either expanded or absorbed");
            visible
        };
        let (same, cuda) = (&[3, 1, 0, 3, 1, 2], Some(&crate::cuda::layer::TENSOR_CORES));
        // A tile of 32 query rows holds those of both sequences: one run over the prefix, and each sequence's own.
        assert_eq!(visible(cuda, SplitPolicy::Auto, same), [130; 4]);
        assert_eq!(visible(cuda, SplitPolicy::OneSplit, same), [130; 2]);
        assert_eq!(visible(cuda, SplitPolicy::FixedTokens(16), same), [2; 2]);
        assert_eq!(visible(Some(&PrefixCost::ARITHMETIC), SplitPolicy::Auto, same), [2; 2]);
        assert_eq!(visible(None, SplitPolicy::Auto, same), [2; 2]);
        // The prefix has no pages any more.
        assert_eq!(visible(cuda, SplitPolicy::Auto, &[-1, -1, 0, -1, -1, 2]), [2; 2]);
    }
}
