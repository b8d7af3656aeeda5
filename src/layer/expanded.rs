//! Prefixes that decodes share, kept as keys and values of each head.

use super::MlaLayer;
use crate::base::error::Result;
use crate::base::view::View;
use crate::cache::decode_spec::bytes_of;
use crate::ops::{Device, Use};

/// A prefix that sequences share and that [`Expanded`] arrays hold: their decodes attend it together. One pass reads `H * (P + V)` elements
/// a token of it in place of `L + R`, so it takes many sequences to pay; with fewer a layer attends it in absorbed form
/// ([`LayerBatch::expanded`](super::LayerBatch::expanded)). So the sequences' pages go on holding it. A sequence that gave up its pages of
/// the prefix has -1 for them, and attends the arrays always.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpandedPrefix {
    /// Sequences of the batch that begin with it, in the same pages, or -1 for those given up; each has one such prefix.
    pub sequences: Vec<u32>,
    /// Its tokens: whole pages, which none of these sequences' query tokens is in.
    pub tokens: u32,
    /// Its first row in the arrays.
    pub first_row: u32,
}

/// One layer's keys and values of prefixes, in the caller's buffers; [`super::MlaExpand`] is the op that fills them. `S` rows, as many as
/// prefixes have tokens in all. In f16 keys are stored by 2^-6 and values by 2^-3, so that f16 holds them; the layer undoes it.
#[derive(Debug, Clone, Copy)]
pub struct Expanded<B> {
    /// `[S, L + R]`, rows of the cache; `head_stride` is unread.
    pub rows: View<B>,
    /// `[S, H, P]`.
    pub k_nope: View<B>,
    /// `[S, H, V]`.
    pub v: View<B>,
}

impl<B> Expanded<B> {
    /// New, dense arrays for prefixes of so many tokens in all. [`Expanded::as_ref`] lends them.
    ///
    /// # Errors
    /// The errors of [`Device::buffer`].
    pub fn new(device: &impl Device<Buffer = B>, spec: &MlaLayer, rows: u32) -> Result<Self> {
        let [rows, k_nope, v] = spec.expanded_bytes(rows);
        Ok(Self::dense(spec, [device.buffer(rows)?, device.buffer(k_nope)?, device.buffer(v)?]))
    }

    /// The arrays as arguments take them.
    #[must_use]
    pub fn as_ref(&self) -> Expanded<&B> {
        let Self { rows, k_nope, v } = self;
        Expanded { rows: rows.lent(), k_nope: k_nope.lent(), v: v.lent() }
    }

    /// Dense arrays, each at the front of a buffer of [`MlaLayer::expanded_bytes`].
    pub fn dense(spec: &MlaLayer, [rows, k_nope, v]: [B; 3]) -> Self {
        let heads = spec.shape.num_heads;
        Self {
            rows: View::dense(rows, 1, spec.shape.row_elems()),
            k_nope: View::dense(k_nope, heads, spec.qk_nope_head_dim),
            v: View::dense(v, heads, spec.v_head_dim),
        }
    }

    /// The same arrays of other handles.
    pub(super) fn map<'a, C>(
        &'a self,
        how: fn(&'static str) -> Use,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<Expanded<C>> {
        Ok(Expanded {
            rows: self.rows.map(|buffer| f(how("expanded.rows"), buffer))?,
            k_nope: self.k_nope.map(|buffer| f(how("expanded.k_nope"), buffer))?,
            v: self.v.map(|buffer| f(how("expanded.v"), buffer))?,
        })
    }
}

impl<B: Copy> Expanded<B> {
    /// `[S, R]`, the rotary keys, which all heads share.
    pub(super) fn k_pe(&self, spec: &MlaLayer) -> View<B> {
        let offset = self.rows.offset.saturating_add(spec.shape.kv_lora_rank.into());
        View { offset, head_stride: 0, ..self.rows }
    }
}

impl MlaLayer {
    /// Bytes of the arrays of [`Expanded`] for prefixes of so many tokens in all: together [`MlaLayer::workspace_row_bytes`] each. Each is
    /// at most `u64::MAX`.
    #[must_use]
    pub const fn expanded_bytes(&self, tokens: u32) -> [u64; 3] {
        let heads = tokens as u64 * self.shape.num_heads as u64;
        [
            bytes_of(tokens as u64, self.shape.row_elems(), self.dtype),
            bytes_of(heads, self.qk_nope_head_dim, self.dtype),
            bytes_of(heads, self.v_head_dim, self.dtype),
        ]
    }
}
