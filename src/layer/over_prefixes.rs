//! Which decodes attend a shared prefix through its expanded keys and values, in which tiles, and what is left for the decode kernel. Pure.

use super::MlaLayer;
use super::expanded::ExpandedPrefix;
use super::prefix_cost::pays;
use super::rows::Rows;
use crate::base::error::Result;
use crate::base::memory::push;
use crate::ops::PrefillSequence;
use crate::ops::composes::PrefixCost;
use crate::plan::Tiling;

/// Leaves to the absorbed form the prefixes that cost more in expanded form; the planner may share them there.
///
/// # Errors
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
pub(super) fn keep_what_pays(
    spec: &MlaLayer,
    tiling: &Tiling,
    rows: &mut Rows<'_>,
    cost: &PrefixCost,
) -> Result<()> {
    let is_decoded = |&tokens: &u32| (1..=spec.decode_threshold).contains(&tokens);
    for prefix in rows.prefixes {
        // Where a sequence has given up its pages, the expanded rows are all there is.
        if !rows.have_pages(spec, prefix) {
            continue;
        }
        let grouped = |sequence: &u32| rows.shared.iter().any(|group| group.sequences.contains(sequence));
        let shares = !prefix.sequences.iter().any(grouped);
        let query_tokens = prefix.sequences.iter().map(|&sequence| rows.query_tokens(sequence));
        let decoded = query_tokens.filter(is_decoded).map(|tokens| (1, tokens));
        if pays(cost, spec, tiling, prefix.tokens, decoded, shares) {
            continue;
        }
        rows.absorb(prefix);
        if shares {
            rows.share(prefix)?;
        }
    }
    Ok(())
}

/// The attention of decoded tokens over expanded prefixes: neighbours with the same prefix are one sequence. Tokens without a prefix attend
/// no keys, so that each token has rows in every part. Empty if no token has a prefix.
///
/// # Errors
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
pub(super) fn over_prefixes(tokens: &[(u32, u32, Option<&ExpandedPrefix>)]) -> Result<Vec<PrefillSequence>> {
    let mut all: Vec<PrefillSequence> = Vec::new();
    for &(q_begin, q_len, prefix) in tokens {
        let (kv_begin, kv_len) = prefix.map_or((0, 0), |prefix| (prefix.first_row, prefix.tokens));
        match all.last_mut() {
            Some(last)
                if (last.q_begin + last.q_len, last.kv_begin, last.kv_len) == (q_begin, kv_begin, kv_len) =>
            {
                last.q_len += q_len;
            }
            _ => push(&mut all, PrefillSequence::full(q_begin, q_len, kv_begin, kv_len), "a layer's plan")?,
        }
    }
    if all.iter().all(|sequence| sequence.kv_len == 0) {
        all.clear();
    }
    Ok(all)
}
