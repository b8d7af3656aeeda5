//! Which decodes attend a shared prefix through its expanded keys and values, in which tiles, and what is left for the decode kernel. Pure.

use std::borrow::Cow;

use super::MlaLayer;
use super::batch::LayerBatch;
use super::expanded::ExpandedPrefix;
use super::prefix_cost::pays;
use crate::ops::PrefillSequence;
use crate::ops::composes::PrefixCost;
use crate::tables::row_of;
use crate::{Error, Result, SharedPrefix, Tiling};

/// For each sequence of a batch, the expanded prefix that it begins with, if any.
///
/// # Errors
/// [`Error::Shape`] for a sequence that is not in the batch, is in two prefixes or is too short, and for a prefix that ends in a page;
/// those of [`check_pages`].
pub(super) fn prefixes<'a>(
    spec: &MlaLayer,
    batch: &LayerBatch<'a>,
) -> Result<Vec<Option<&'a ExpandedPrefix>>> {
    let mut of = vec![None; batch.seq_lens.len()];
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
        check_pages(spec, prefix, |sequence| row_of(batch.pages, sequence as usize))?;
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

/// Removes from `expanded` the prefixes that cost more in expanded form; the planner may share them in absorbed form.
pub(super) fn keep_what_pays(
    spec: &MlaLayer,
    tiling: &Tiling,
    batch: &LayerBatch<'_>,
    cost: &PrefixCost,
    expanded: &mut [Option<&ExpandedPrefix>],
    shared: &mut Cow<'_, [SharedPrefix]>,
) {
    let loc = batch.query_start_loc;
    let query_tokens = |&sequence: &u32| (loc[sequence as usize + 1] - loc[sequence as usize]) as u32;
    let is_decoded = |&tokens: &u32| (1..=spec.decode_threshold).contains(&tokens);
    for prefix in batch.expanded {
        // Where a sequence has given up its pages, the expanded rows are all there is.
        if !has_pages(spec, prefix, |sequence| row_of(batch.pages, sequence as usize)) {
            continue;
        }
        let grouped = |sequence: &u32| shared.iter().any(|group| group.sequences.contains(sequence));
        let shares = !prefix.sequences.iter().any(grouped);
        let decoded = prefix.sequences.iter().map(query_tokens).filter(is_decoded).map(|tokens| (1, tokens));
        if pays(cost, spec, tiling, prefix.tokens, decoded, shares) {
            continue;
        }
        prefix.sequences.iter().for_each(|&sequence| expanded[sequence as usize] = None);
        if shares {
            let (sequences, tokens) = (prefix.sequences.clone(), prefix.tokens);
            shared.to_mut().push(SharedPrefix { sequences, tokens });
        }
    }
}

/// The attention of decoded tokens over expanded prefixes: neighbours with the same prefix are one sequence. Tokens without a prefix attend
/// no keys, so that each token has rows in every part. Empty if no token has a prefix.
pub(super) fn over_prefixes(tokens: &[(u32, u32, Option<&ExpandedPrefix>)]) -> Vec<PrefillSequence> {
    let mut all: Vec<PrefillSequence> = Vec::new();
    for &(q_begin, q_len, prefix) in tokens {
        let (kv_begin, kv_len) = prefix.map_or((0, 0), |prefix| (prefix.first_row, prefix.tokens));
        match all.last_mut() {
            Some(last)
                if (last.q_begin + last.q_len, last.kv_begin, last.kv_len) == (q_begin, kv_begin, kv_len) =>
            {
                last.q_len += q_len;
            }
            _ => all.push(PrefillSequence::full(q_begin, q_len, kv_begin, kv_len)),
        }
    }
    if all.iter().all(|sequence| sequence.kv_len == 0) {
        all.clear();
    }
    all
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
    use crate::Dtype;
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
