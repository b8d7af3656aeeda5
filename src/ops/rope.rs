//! Arguments and checks of the rotary ops: `rope`, and `rope_append`, which also writes the cache.

use super::{AppendLayer, AppendSpec};
use crate::layer::{View, distinct, fits, no_aliases};
use crate::rope::check_max_position;
use crate::{Dtype, Error, Result};

/// Which elements of a row make a pair. The output has the layout of the input.
///
/// Transformers' `apply_rotary_pos_emb_interleave` takes interleaved rows and gives half-split ones. Here they stay interleaved. No logit
/// tells the difference, as long as q and k are rotated alike: a dot product does not care in which order its products come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RopeLayout {
    /// Elements 2i and 2i + 1: DeepSeek's checkpoints.
    Interleaved,
    /// Elements i and i + R / 2: GPT-NeoX, and transformers' `rotate_half`.
    HalfSplit,
}

/// What a `rope` is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RopeSpec {
    /// Dtype of input and output: f32, f16 or bf16.
    pub dtype: Dtype,
    /// Heads of a token: 1 for `k_pe`. At most 1024.
    pub num_heads: u32,
    /// `R`: a multiple of 8, at most 1024.
    pub rope_dim: u32,
    /// Which elements make a pair.
    pub layout: RopeLayout,
}

/// Rows to rotate by their tokens' positions: `(x, y) -> (x cos - y sin, y cos + x sin)` for each pair.
///
/// Computed in f32 and rounded once to the dtype. A pair that holds an infinity or a NaN becomes two NaNs, whatever its angle; results
/// past f32's range are anything. Offsets and strides are multiples of 4 elements; a stride of a dimension of 1 is unread.
#[derive(Debug, Clone, Copy)]
pub struct Rope<B> {
    /// `[tokens, heads, R]`.
    pub x: View<B>,
    /// `[tokens, heads, R]`: the same view as `x` to rotate in place, or one that shares no element with it.
    pub y: View<B>,
    /// i32 `[tokens]`, on the device. A position outside of `0..max_position` counts as the nearest inside.
    pub positions: B,
    /// f32 `[max_position, R]`, in each row `R / 2` cosines, then `R / 2` sines: [`crate::RopeFrequencies::cos_sin`].
    pub cos_sin: B,
    /// Rows of `cos_sin`.
    pub max_position: u32,
    /// Tokens.
    pub num_tokens: u32,
}

/// What a `rope_append` is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RopeAppendSpec {
    /// The rows to append and the cache. `qk_rope_head_dim` is what is rotated: 0 is refused.
    pub append: AppendSpec,
    /// Dtype of `q_pe` and `q_pe_out`: f32, f16 or bf16.
    pub query: Dtype,
    /// Query heads: at most 1024.
    pub num_heads: u32,
    /// Which elements make a pair, in queries and keys.
    pub layout: RopeLayout,
}

/// What a decode needs before it: queries rotated, new keys rotated and appended, in one dispatch.
///
/// The bits are those of `rope` of `q_pe`, `rope` of `k_pe` and `kv_append` one after the other. Queries of tokens that the slot mapping
/// skips are rotated too.
#[derive(Debug, Clone, Copy)]
pub struct RopeAppend<B> {
    /// `[tokens, heads, R]`; see [`Rope::x`].
    pub q_pe: View<B>,
    /// `[tokens, heads, R]`; see [`Rope::y`].
    pub q_pe_out: View<B>,
    /// The new rows, `k_pe` not yet rotated, and the cache.
    pub layer: AppendLayer<B>,
    /// i32 `[tokens]`; see [`Rope::positions`].
    pub positions: B,
    /// f32 `[max_position, R]`; see [`Rope::cos_sin`].
    pub cos_sin: B,
    /// Rows of `cos_sin`.
    pub max_position: u32,
}

impl RopeSpec {
    /// # Errors
    /// [`Error::DtypeUnsupported`] for e4m3, [`Error::Shape`].
    pub fn check(&self) -> Result<()> {
        self.check_as("x and y")
    }

    fn check_as(&self, what: &'static str) -> Result<()> {
        if self.dtype == Dtype::E4m3 {
            return Err(Error::DtypeUnsupported { what, got: self.dtype, cure: "use f32, f16 or bf16" });
        }
        if !(1..=1024).contains(&self.num_heads) {
            let got = self.num_heads.into();
            return Err(Error::Shape { what: "num_heads", got, cure: "must be 1..=1024" });
        }
        if !self.rope_dim.is_multiple_of(8) || !(8..=1024).contains(&self.rope_dim) {
            let cure =
                "must be a multiple of 8 in 8..=1024; without a rotary part there is nothing to rotate";
            return Err(Error::Shape { what: "qk_rope_head_dim", got: self.rope_dim.into(), cure });
        }
        Ok(())
    }
}

impl<B> Rope<&B> {
    /// Checks all but aliases, given each buffer's bytes.
    ///
    /// # Errors
    /// [`Error::Alignment`], [`Error::Shape`], [`Error::BufferTooSmall`].
    pub(crate) fn check(&self, spec: &RopeSpec, size: impl Fn(&B) -> u64) -> Result<()> {
        spec.check()?;
        self.check_as(spec, ["x", "y"], size)
    }

    fn check_as(&self, spec: &RopeSpec, names: [&'static str; 2], size: impl Fn(&B) -> u64) -> Result<()> {
        check_max_position(self.max_position)?;
        let (tokens, heads) = (u64::from(self.num_tokens), u64::from(spec.num_heads));
        let dim = u64::from(spec.rope_dim);
        for (what, view) in names.into_iter().zip([&self.x, &self.y]) {
            let used = |count: u64, stride: u64| if count > 1 { stride } else { 0 };
            for got in [view.offset, used(tokens, view.token_stride), used(heads, view.head_stride)] {
                if !got.is_multiple_of(4) {
                    return Err(Error::Alignment { what, got, of: 4, unit: "elements" });
                }
            }
            let end = view.end(tokens, heads, dim).saturating_mul(spec.dtype.bytes() as u64);
            fits(what, end, size(view.buffer))?;
        }
        distinct(names[1], &self.y, tokens, heads, dim)?;
        fits("positions", tokens * 4, size(self.positions))?;
        fits("cos_sin", u64::from(self.max_position) * dim * 4, size(self.cos_sin))
    }

    /// Whether input and output are one buffer.
    ///
    /// # Errors
    /// [`Error::Aliased`] where an output is read by other tokens or heads than those that write it.
    pub(crate) fn is_in_place(&self, spec: &RopeSpec, is_same: impl Fn(&B, &B) -> bool) -> Result<bool> {
        self.is_in_place_as(spec, ["x", "y"], is_same)
    }

    fn is_in_place_as(
        &self,
        spec: &RopeSpec,
        [x_name, y_name]: [&'static str; 2],
        is_same: impl Fn(&B, &B) -> bool,
    ) -> Result<bool> {
        no_aliases(
            &[("positions", self.positions), ("cos_sin", self.cos_sin)],
            &[(y_name, self.y.buffer)],
            &is_same,
        )?;
        if !is_same(self.x.buffer, self.y.buffer) {
            return Ok(false);
        }
        let (tokens, heads) = (u64::from(self.num_tokens), u64::from(spec.num_heads));
        let end = |view: &View<&B>| view.end(tokens, heads, spec.rope_dim.into());
        let (x, y) = (&self.x, &self.y);
        let is_one_view = x.offset == y.offset
            && (tokens <= 1 || x.token_stride == y.token_stride)
            && (heads <= 1 || x.head_stride == y.head_stride);
        if is_one_view || end(x) <= y.offset || end(y) <= x.offset {
            return Ok(true);
        }
        Err(Error::Aliased { a: x_name, b: y_name })
    }
}

impl RopeAppendSpec {
    /// # Errors
    /// Those of [`AppendSpec::check`] and [`RopeSpec::check`].
    pub fn check(&self) -> Result<()> {
        self.append.check()?;
        self.rope().check_as("q_pe")
    }

    /// The rotation of the queries.
    pub(crate) fn rope(&self) -> RopeSpec {
        RopeSpec {
            dtype: self.query,
            num_heads: self.num_heads,
            rope_dim: self.append.shape.qk_rope_head_dim,
            layout: self.layout,
        }
    }
}

impl<'a, B> RopeAppend<&'a B> {
    /// The rotation of the queries.
    pub(crate) fn rope(&self, num_tokens: u32) -> Rope<&'a B> {
        Rope {
            x: self.q_pe,
            y: self.q_pe_out,
            positions: self.positions,
            cos_sin: self.cos_sin,
            max_position: self.max_position,
            num_tokens,
        }
    }

    /// Checks all but aliases, given each buffer's bytes.
    ///
    /// # Errors
    /// Those of [`Rope`]'s and [`AppendLayer`]'s checks.
    pub(crate) fn check(
        &self,
        spec: &RopeAppendSpec,
        tokens: u32,
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        spec.check()?;
        self.layer.check(&spec.append, tokens, size)?;
        self.rope(tokens).check_as(&spec.rope(), ["q_pe", "q_pe_out"], size)
    }

    /// Whether queries are rotated in their buffer.
    ///
    /// # Errors
    /// [`Error::Aliased`].
    pub(crate) fn is_in_place(
        &self,
        spec: &RopeAppendSpec,
        tokens: u32,
        is_same: impl Fn(&B, &B) -> bool + Copy,
    ) -> Result<bool> {
        let (kv_c, k_pe) = (("kv_c", self.layer.kv_c.buffer), ("k_pe", self.layer.k_pe.buffer));
        let (q_pe, q_pe_out) = (("q_pe", self.q_pe.buffer), ("q_pe_out", self.q_pe_out.buffer));
        let tables = [("positions", self.positions), ("cos_sin", self.cos_sin)];
        no_aliases(
            &[kv_c, k_pe, q_pe, q_pe_out, tables[0], tables[1]],
            &[("kv", self.layer.kv.buffer)],
            is_same,
        )?;
        no_aliases(&[kv_c, k_pe], &[q_pe_out], is_same)?;
        self.rope(tokens).is_in_place_as(&spec.rope(), [q_pe.0, q_pe_out.0], is_same)
    }
}
