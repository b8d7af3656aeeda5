//! A step's batch, checked once, so that what is planned from it needs no check of its own. Pure.

use std::borrow::Cow;
use std::iter::repeat_n;

use super::MlaLayer;
use super::batch::LayerBatch;
use super::expanded::ExpandedPrefix;
use crate::base::error::{Error, Result};
use crate::base::memory::{collected, push, room_for};
use crate::plan::tables::PageRows;
use crate::plan::{Batch, Plan, SharedPrefix};

/// What an error calls arrays of the batch's length.
const BATCH: &str = "a layer's batch";

/// A sequence with query tokens.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    pub(super) sequence: u32,
    pub(super) q_begin: u32,
    pub(super) q_len: u32,
    /// Its tokens, the new ones included.
    pub(super) len: u32,
}

/// A [`LayerBatch`] whose lists agree with each other and with the spec.
pub(super) struct Rows<'a> {
    pub(super) pages: PageRows<'a>,
    /// Sequences that are decoded, those that are prefilled, and those that attend lists of slots.
    pub(super) decodes: Vec<Row>,
    pub(super) prompts: Vec<Row>,
    pub(super) listed: Vec<Row>,
    /// Position of each query token in its sequence.
    pub(super) positions: Vec<i32>,
    /// Groups that attend a prefix together in absorbed form.
    pub(super) shared: Cow<'a, [SharedPrefix]>,
    /// All prefixes that are kept as keys and values.
    pub(super) prefixes: &'a [ExpandedPrefix],
    /// The one of these that each sequence of the batch attends so, if any.
    expanded: Vec<Option<&'a ExpandedPrefix>>,
    query_start_loc: &'a [i32],
}

impl<'a> Rows<'a> {
    /// `topk`: sequences of more tokens attend lists; 0 if none do.
    ///
    /// # Errors
    /// The errors of [`LayerPlan::new`](super::LayerPlan::new) about arrays that contradict each other or the spec.
    pub(super) fn new(spec: &MlaLayer, batch: &LayerBatch<'a>, topk: u32) -> Result<Self> {
        let &LayerBatch { seq_lens, query_start_loc, slot_mapping, shared_prefixes, .. } = batch;
        spec.check_dims()?;
        // It checks what the rest relies on: lengths, order, signs.
        Plan::default().check_batch(&spec.mla(), &Batch::new(seq_lens, query_start_loc))?;
        let pages = PageRows::new(batch.pages, seq_lens.len(), &spec.kv)?;
        check_groups(batch)?;
        let expanded = prefixes(spec, batch, pages)?;
        let num_queries = query_start_loc.last().copied().unwrap_or(0) as u32;
        let (got, want) = (slot_mapping.len() as u64, u64::from(num_queries));
        if got != want {
            let cure = "one slot a query token, negative for one whose row is in the cache already";
            return Err(Error::Length { what: "slot_mapping", got, want, cure });
        }
        let (mut decodes, mut prompts, mut listed) = (Vec::new(), Vec::new(), Vec::new());
        let mut positions = room_for(slot_mapping.len(), BATCH)?;
        for (sequence, (&len, loc)) in seq_lens.iter().zip(query_start_loc.windows(2)).enumerate() {
            let (q_begin, q_len, len) = (loc[0] as u32, (loc[1] - loc[0]) as u32, len as u32);
            if q_len > len {
                return Err(Error::QueryLen { seq: sequence, got: q_len, seq_len: len });
            }
            positions.extend((len - q_len..len).map(|position| position as i32));
            let row = Row { sequence: sequence as u32, q_begin, q_len, len };
            match q_len {
                0 => {}
                _ if topk > 0 && len > topk => {
                    if expanded[sequence].is_some() {
                        let cure = "has more than LayerOptions::topk tokens and attends a list of slots: leave it out of LayerBatch::expanded";
                        let got = sequence as u64;
                        return Err(Error::Shape { what: "ExpandedPrefix sequence", got, cure });
                    }
                    push(&mut listed, row, BATCH)?;
                }
                _ if q_len <= spec.decode_threshold => push(&mut decodes, row, BATCH)?,
                _ => push(&mut prompts, row, BATCH)?,
            }
        }
        check_slots(spec, batch, pages)?;
        let shared = Cow::Borrowed(shared_prefixes);
        let prefixes = batch.expanded;
        Ok(Self { pages, decodes, prompts, listed, positions, shared, prefixes, expanded, query_start_loc })
    }

    /// Query tokens of a sequence.
    pub(super) fn query_tokens(&self, sequence: u32) -> u32 {
        let loc = &self.query_start_loc[sequence as usize..];
        (loc[1] - loc[0]) as u32
    }

    /// The prefix that a sequence attends through its keys and values.
    pub(super) fn expanded(&self, sequence: u32) -> Option<&'a ExpandedPrefix> {
        self.expanded.get(sequence as usize).copied().flatten()
    }

    /// Leaves a prefix to the absorbed form.
    pub(super) fn absorb(&mut self, prefix: &ExpandedPrefix) {
        prefix.sequences.iter().for_each(|&sequence| self.expanded[sequence as usize] = None);
    }

    /// Has a prefix's sequences attend it together in absorbed form.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(super) fn share(&mut self, prefix: &ExpandedPrefix) -> Result<()> {
        if let Cow::Borrowed(groups) = self.shared {
            let mut own = room_for(groups.len() + 1, BATCH)?;
            for group in groups {
                own.push(SharedPrefix::of(&group.sequences, group.tokens)?);
            }
            self.shared = Cow::Owned(own);
        }
        push(self.shared.to_mut(), SharedPrefix::of(&prefix.sequences, prefix.tokens)?, BATCH)
    }

    /// Whether all of a prefix's sequences have its pages.
    pub(super) fn have_pages(&self, spec: &MlaLayer, prefix: &ExpandedPrefix) -> bool {
        has_pages(spec, prefix, |sequence| self.pages.row(sequence as usize))
    }
}

/// # Errors
/// [`Error::Shape`] for a sequence that is not in the batch.
fn check_groups(batch: &LayerBatch<'_>) -> Result<()> {
    let num_sequences = batch.seq_lens.len();
    let sequences = batch.shared_prefixes.iter().flat_map(|group| &group.sequences);
    match sequences.copied().find(|&sequence| sequence as usize >= num_sequences) {
        Some(sequence) => {
            let cure = "must be in the batch, and in one shared prefix only";
            Err(Error::Shape { what: "SharedPrefix sequence", got: sequence.into(), cure })
        }
        None => Ok(()),
    }
}

/// A new token is read where the block table has it, so it must be written there, and no other sequence may write to its page.
///
/// # Errors
/// [`Error::SlotMismatch`] and [`Error::PageWrittenTwice`].
fn check_slots(spec: &MlaLayer, batch: &LayerBatch<'_>, pages: PageRows<'_>) -> Result<()> {
    let page_size = spec.kv.page_size as usize;
    // Each once a sequence.
    let mut written: Vec<(i32, usize)> = Vec::new();
    for (seq, (&len, loc)) in batch.seq_lens.iter().zip(batch.query_start_loc.windows(2)).enumerate() {
        let row = pages.row(seq);
        let tokens = loc[0] as usize..loc[1] as usize;
        let first = len as usize - tokens.len();
        for (index, position) in tokens.zip(first..) {
            let slot = batch.slot_mapping[index];
            // A row that is too short is refused where its pages are read.
            let Some(&page) = row.get(position / page_size) else { break };
            let want = i64::from(page) * page_size as i64 + (position % page_size) as i64;
            if slot >= 0 && slot != want {
                return Err(Error::SlotMismatch { index, slot, want });
            }
            if slot >= 0 && written.last() != Some(&(page, seq)) {
                push(&mut written, (page, seq), BATCH)?;
            }
        }
    }
    written.sort_unstable();
    match written.windows(2).find(|pair| pair[0].0 == pair[1].0 && pair[0].1 != pair[1].1) {
        Some(&[(page, first), (_, other)]) => {
            Err(Error::PageWrittenTwice { first, other, page: page as u32 })
        }
        _ => Ok(()),
    }
}

/// For each sequence of a batch, the expanded prefix that it begins with, if any.
///
/// # Errors
/// [`Error::Shape`] for a sequence that is not in the batch, is in two prefixes or is too short, and for a prefix that ends in a page;
/// those of [`check_pages`].
fn prefixes<'a>(
    spec: &MlaLayer,
    batch: &LayerBatch<'a>,
    pages: PageRows<'_>,
) -> Result<Vec<Option<&'a ExpandedPrefix>>> {
    let sequences = batch.seq_lens.len();
    let mut of = collected(repeat_n(None, sequences), sequences, BATCH)?;
    for prefix in batch.expanded {
        let refuse = |what, got: u32, cure| Err(Error::Shape { what, got: got.into(), cure });
        if !prefix.tokens.is_multiple_of(spec.kv.page_size) {
            return refuse("ExpandedPrefix tokens", prefix.tokens, "must be whole pages");
        }
        for &sequence in &prefix.sequences {
            let place = of.get_mut(sequence as usize).filter(|place| place.is_none());
            let Some(place) = place else {
                let cure = "must be in the batch, and in one expanded prefix only";
                return refuse("ExpandedPrefix sequence", sequence, cure);
            };
            let at = sequence as usize;
            let query_tokens = batch.query_start_loc[at + 1] - batch.query_start_loc[at];
            if i64::from(prefix.tokens) > i64::from(batch.seq_lens[at]) - i64::from(query_tokens) {
                let cure = "must be no more than a sequence has before its query tokens";
                return refuse("ExpandedPrefix tokens", prefix.tokens, cure);
            }
            *place = Some(prefix);
        }
        check_pages(spec, prefix, |sequence| pages.row(sequence as usize))?;
    }
    Ok(of)
}

/// The sequences of a prefix have the same pages for it, but for those that were given up, which are negative. Rows that are too short are
/// refused where their pages are read.
///
/// # Errors
/// [`Error::PrefixNotShared`], and [`Error::PageOutOfRange`] for a page that is not in the pool.
fn check_pages<'a>(spec: &MlaLayer, prefix: &ExpandedPrefix, row: impl Fn(u32) -> &'a [i32]) -> Result<()> {
    let num_pages = spec.kv.num_pages;
    for block in 0..spec.kv.pages_for(prefix.tokens) as usize {
        let mut shared: Option<(u32, i32)> = None;
        for &sequence in &prefix.sequences {
            let Some(&page) = row(sequence).get(block).filter(|page| **page >= 0) else { continue };
            if page as u32 >= num_pages {
                let (seq, page) = (sequence as usize, page.into());
                return Err(Error::PageOutOfRange { seq, block, page, num_pages });
            }
            match shared {
                Some((first, other)) if other != page => {
                    return Err(Error::PrefixNotShared { first, other: sequence, block });
                }
                Some(_) => {}
                None => shared = Some((sequence, page)),
            }
        }
    }
    Ok(())
}

/// Whether all of a prefix's sequences have its pages, which passed [`check_pages`].
fn has_pages<'a>(spec: &MlaLayer, prefix: &ExpandedPrefix, row: impl Fn(u32) -> &'a [i32]) -> bool {
    let pages = spec.kv.pages_for(prefix.tokens) as usize;
    let has = |sequence| row(sequence).get(..pages).is_some_and(|pages| pages.iter().all(|&page| page >= 0));
    prefix.sequences.iter().all(|&sequence| has(sequence))
}

#[cfg(all(test, feature = "cuda", feature = "wgpu"))]
mod tests {
    use super::*;
    use crate::base::dtype::Dtype;
    use crate::layer::prefix_cost::tests::spec;

    fn checked(rows: [&[i32]; 3]) -> Result<bool> {
        let prefix = ExpandedPrefix { sequences: vec![0, 2, 1], tokens: 128, first_row: 0 };
        let (spec, row) = (spec(16, Dtype::F16), |sequence: u32| rows[sequence as usize]);
        check_pages(&spec, &prefix, row).map(|()| has_pages(&spec, &prefix, row))
    }

    #[test]
    fn pages_are_the_same_or_were_given_up() {
        assert_eq!(checked([&[3, 1, 0], &[3, 1], &[3, 1, 7]]), Ok(true));
        for given_up in [[3, -1], [-1, -1], [-1, 1], [i32::MIN, -2]] {
            assert_eq!(checked([&[3, 1, 0], &given_up, &[3, 1]]), Ok(false));
            assert_eq!(checked([&given_up, &[3, 1], &[-1, -1]]), Ok(false));
        }
        assert_eq!(checked([&[3], &[3, 1], &[3, 1]]), Ok(false), "refused where the row is read");
    }

    #[test]
    fn pages_that_differ_are_refused() {
        let differs = |first, other, block| Err(Error::PrefixNotShared { first, other, block });
        assert_eq!(checked([&[3, 1], &[3, 2], &[3, 1]]), differs(0, 1, 1));
        assert_eq!(checked([&[3, 1], &[3, 1], &[2, 1]]), differs(0, 2, 0));
        assert_eq!(
            checked([&[-1, -1], &[3, 2], &[3, 1]]),
            differs(2, 1, 1),
            "also where the first gave up its own"
        );
        let outside = checked([&[3, 8], &[3, 8], &[3, 8]]);
        assert_eq!(outside, Err(Error::PageOutOfRange { seq: 0, block: 1, page: 8, num_pages: 8 }));
    }
}
