//! Prefixes that decodes share, kept as keys and values of each head.

use super::MlaLayerSpec;
use super::plan::{LayerBatch, LayerPlan};
use crate::layer::View;
use crate::prefill::PrefillSequence;
use crate::{Error, Result};

/// A prefix that sequences share and that [`Expanded`] arrays hold: their decodes attend it together. Worth it from some ten sequences
/// on, since one reads `H * (P + V)` elements a token of it in place of `L + R`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpandedPrefix {
    /// Sequences of the batch that begin with it; each has one such prefix.
    pub sequences: Vec<u32>,
    /// Its tokens: whole pages, which none of these sequences' query tokens is in.
    pub tokens: u32,
    /// Its first row in the arrays.
    pub first_row: u32,
}

/// One layer's keys and values of prefixes, in the caller's buffers; [`super::MlaLayer::expand_prefix`] fills them. `S` rows, as many as
/// prefixes have tokens in all.
#[derive(Debug, Clone, Copy)]
pub struct Expanded<B> {
    /// `[S, L + R]`, rows of the cache; `head_stride` is unread.
    pub rows: View<B>,
    /// `[S, H, P]`.
    pub k_nope: View<B>,
    /// `[S, H, V]`.
    pub v: View<B>,
}

impl<'a, B> Expanded<&'a B> {
    /// Dense arrays, each at the front of a buffer of [`MlaLayerSpec::expanded_bytes`].
    pub fn dense(spec: &MlaLayerSpec, [rows, k_nope, v]: [&'a B; 3]) -> Self {
        let heads = spec.shape.num_heads;
        Self {
            rows: View::dense(rows, 1, spec.shape.row_elems()),
            k_nope: View::dense(k_nope, heads, spec.qk_nope_head_dim),
            v: View::dense(v, heads, spec.v_head_dim),
        }
    }

    /// `[S, R]`, the rotary keys, which all heads share.
    pub(crate) fn k_pe(&self, spec: &MlaLayerSpec) -> View<&'a B> {
        let offset = self.rows.offset.saturating_add(spec.shape.kv_lora_rank.into());
        View { offset, head_stride: 0, ..self.rows }
    }
}

impl LayerPlan {
    /// Keys of the longest expanded prefix; 0 without any.
    pub(crate) fn longest_prefix(&self) -> u32 {
        self.over_prefixes.iter().map(|sequence| sequence.kv_len).max().unwrap_or(0)
    }

    /// What decoded tokens attend of expanded prefixes, in so many parts, each with `set_stride` rows of results. Set 0 is that of the
    /// decodes.
    pub(crate) fn prefix_parts(&self, num_parts: u32, set_stride: u32) -> Vec<PrefillSequence> {
        let split = |sequence: &PrefillSequence| {
            let first =
                PrefillSequence { out_begin: sequence.out_begin.saturating_add(set_stride), ..*sequence };
            first.split_keys(num_parts, set_stride)
        };
        self.over_prefixes.iter().flat_map(split).collect()
    }
}

impl MlaLayerSpec {
    /// Bytes of the arrays of [`Expanded`] for prefixes of so many tokens in all: together [`MlaLayerSpec::workspace_row_bytes`] each.
    pub const fn expanded_bytes(&self, tokens: u32) -> [u64; 3] {
        let row = tokens as u64 * self.dtype.bytes() as u64;
        let heads = row * self.shape.num_heads as u64;
        [
            row * self.shape.row_elems() as u64,
            heads * self.qk_nope_head_dim as u64,
            heads * self.v_head_dim as u64,
        ]
    }
}

/// Of each sequence of a batch the expanded prefix that it begins with.
///
/// # Errors
/// [`Error::Shape`] for a sequence that is not in the batch, is in two prefixes or is too short, and for a prefix that ends in a page.
pub(super) fn prefixes<'a>(
    spec: &MlaLayerSpec,
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
    }
    Ok(of)
}

/// What decoded tokens attend of prefixes: neighbours that share one together, and no keys for those that have none, so that each has
/// rows in every part. Empty where none has a prefix.
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
            _ => all.push(PrefillSequence::all(q_begin, q_len, kv_begin, kv_len)),
        }
    }
    if all.iter().all(|sequence| sequence.kv_len == 0) {
        all.clear();
    }
    all
}
