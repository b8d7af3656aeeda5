//! Arguments and checks of `merge_states`: any number of partial attention results into one.

use super::MergeStatesSpec;
use crate::layer::{View, aligned, distinct, fits, no_aliases};
use crate::{Error, Result};

/// Sets of partial attention results of the same queries, each over other keys, and where their merge goes: FlashInfer's
/// `merge_states`.
///
/// `lse = ln(sum exp(lse_i))`, `out = sum exp(lse_i - lse) * out_i`, added in the order of the sets. A set whose LSE is -inf, +inf or
/// NaN has no part in that row, whatever it holds; where one only is left the output is its bits, and where none is, 0 and -inf.
/// LSEs are natural logarithms.
///
/// Sets lie as their strides say, `[sets, tokens, heads, head_size]` or `[tokens, sets, heads, head_size]`. `head_size`, offsets and
/// strides are multiples of 8 elements, but for those of the LSEs.
#[derive(Debug, Clone, Copy)]
pub struct StateSets<B> {
    /// `[tokens, heads, head_size]` of set 0.
    pub states: View<B>,
    /// Elements from a set to the next.
    pub set_stride: u64,
    /// f32 `[tokens, heads]` of set 0.
    pub lse: View<B>,
    /// Elements from a set's LSEs to the next set's.
    pub lse_set_stride: u64,
    /// `[tokens, heads, head_size]`, where the merged output goes.
    pub output: View<B>,
    /// f32 `[tokens, heads]`, where the merged LSE goes, if it is wanted.
    pub output_lse: Option<View<B>>,
    /// Sets: from 1 to 65,536.
    pub num_sets: u32,
    /// Query tokens.
    pub num_tokens: u32,
    /// Heads.
    pub num_heads: u32,
}

impl<'a, B> StateSets<&'a B> {
    /// The last set, which ends furthest back.
    pub(crate) fn last(&self) -> (View<&'a B>, View<&'a B>) {
        let last = u64::from(self.num_sets.saturating_sub(1));
        let at = |view: View<&'a B>, stride: u64| View {
            offset: view.offset.saturating_add(last.saturating_mul(stride)),
            ..view
        };
        (at(self.states, self.set_stride), at(self.lse, self.lse_set_stride))
    }

    /// # Errors
    /// [`Error::Shape`] for a head that is no multiple of 8 elements, for no or too many sets, and where written rows overlap,
    /// [`Error::Alignment`], [`Error::BufferTooSmall`], given each buffer's bytes.
    pub(crate) fn check(&self, spec: &MergeStatesSpec, size: impl Fn(&B) -> u64) -> Result<()> {
        spec.check()?;
        if !spec.head_size.is_multiple_of(8) {
            let got = spec.head_size.into();
            return Err(Error::Shape {
                what: "head_size of merge_states",
                got,
                cure: "must be a multiple of 8",
            });
        }
        if !(1..=1 << 16).contains(&self.num_sets) {
            let cure = "must be from 1 to 65,536: merge what comes of several such merges after that";
            return Err(Error::Shape { what: "num_sets", got: self.num_sets.into(), cure });
        }
        let (tokens, heads) = (u64::from(self.num_tokens), u64::from(self.num_heads));
        if tokens == 0 || heads == 0 {
            return Ok(());
        }
        for (what, view) in [("states", self.states), ("output", self.output)] {
            for got in [view.offset, view.token_stride, view.head_stride] {
                aligned(what, got)?;
            }
        }
        aligned("states set_stride", self.set_stride)?;
        let (dim, bytes) = (u64::from(spec.head_size), spec.dtype.bytes() as u64);
        let (states, lse) = self.last();
        for (what, view, dim, bytes) in [
            ("states", Some(states), dim, bytes),
            ("lse", Some(lse), 1, 4),
            ("output", Some(self.output), dim, bytes),
            ("output_lse", self.output_lse, 1, 4),
        ] {
            if let Some(view) = view {
                fits(what, view.end(tokens, heads, dim).saturating_mul(bytes), size(view.buffer))?;
            }
        }
        distinct("output", &self.output, tokens, heads, dim)?;
        self.output_lse.map_or(Ok(()), |lse| distinct("output_lse", &lse, tokens, heads, 1))
    }

    /// # Errors
    /// [`Error::Aliased`].
    pub(crate) fn check_aliases(&self, is_same: impl Fn(&B, &B) -> bool) -> Result<()> {
        let inputs = [("states", self.states.buffer), ("lse", self.lse.buffer)];
        let output = [("output", self.output.buffer)];
        no_aliases(&inputs, &output, &is_same)?;
        if let Some(lse) = self.output_lse {
            let lse = [("output_lse", lse.buffer)];
            no_aliases(&inputs, &lse, &is_same)?;
            no_aliases(&output, &lse, &is_same)?;
        }
        Ok(())
    }
}
