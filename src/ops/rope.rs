//! `rope`: rows rotated by their positions. Arguments and checks.

use std::ops::Range;

use super::op::{Op, Use};
use super::samples::{FLOATS, pairs};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::step_table::{StepTable, TableOp};
use super::variants::OpOptions;
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::view::{View, distinct, fits, normal, wide};
use crate::ops::rope_frequencies::check_max_position;

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

/// Rotates rows by their tokens' positions (RoPE): `(x, y) -> (x cos - y sin, y cos + x sin)` for each pair of elements.
///
/// Arguments of a layer: [`RopeArgs`]. Input of a step: a `Range<u32>`: the tokens that are rotated. [`Error::Shape`] is a range that ends
/// before it begins.
///
/// Room of a binding: `u32`, one past the last token. Capacity of a step: `u32`, tokens.
///
/// ```
/// use wgpu_mla::{Device, Dtype, Rope, RopeArgs, RopeFrequencies, RopeLayout, View, cpu::Cpu};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// let cpu = Cpu::new();
/// let table = RopeFrequencies::plain(8, 10_000.0)?.cos_sin(4)?;
/// let (x, y) = (cpu.buffer(8 * 4)?, cpu.buffer(8 * 4)?);
/// let (positions, cos_sin) = (cpu.buffer(4)?, cpu.buffer(4 * 8 * 4)?);
/// cpu.upload(&x, 0, &Dtype::F32.encode_all(&[1.0]))?; // then zeros
/// cpu.upload(&positions, 0, &3i32.to_le_bytes())?;
/// cpu.upload(&cos_sin, 0, &Dtype::F32.encode_all(&table))?;
/// let (x, rotated) = (View::dense(&x, 1, 8), View::dense(&y, 1, 8));
/// let layer = RopeArgs { x, y: rotated, positions: &positions, cos_sin: &cos_sin, max_position: 4, scale: 1.0 };
///
/// // Pair 0 turns by one radian a position.
/// let spec = Rope { dtype: Dtype::F32, num_heads: 1, rope_dim: 8, layout: RopeLayout::Interleaved };
/// cpu.once(spec, 0..1, &layer)?;
/// let y = Dtype::F32.decode_all(&cpu.download(&y, 8 * 4)?);
/// assert_eq!(y[..2], [3f64.cos() as f32, 3f64.sin() as f32]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rope {
    /// Dtype of input and output: f32, f16 or bf16.
    pub dtype: Dtype,
    /// Heads of a token: 1 for `k_pe`. At most 1024.
    pub num_heads: u32,
    /// `R`: a multiple of 8, at most 1024.
    pub rope_dim: u32,
    /// Which elements make a pair.
    pub layout: RopeLayout,
}

/// One layer of a [`Rope`]: rows to rotate, their tokens' positions, and where the results go.
///
/// Computed in f32 and rounded once to the dtype. A pair that holds an infinity or a NaN becomes two NaNs, whatever its angle; results
/// past f32's range are anything. Offsets and strides are multiples of 4 elements; a stride of a dimension of 1 is unread.
#[derive(Debug, Clone, Copy)]
pub struct RopeArgs<B> {
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
    /// Factor of what is rotated, before it is rounded to the dtype; usually 1.
    pub scale: f32,
}

impl Rope {
    /// The checks of a spec whose rows have that name.
    ///
    /// # Errors
    /// [`Error::DtypeUnsupported`] for e4m3, [`Error::Shape`].
    pub(super) fn check_as(&self, what: &'static str) -> Result<()> {
        wide(what, self.dtype)?;
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

impl<B> RopeArgs<&B> {
    /// The checks of arguments whose `x` and `y` have those names, and whose `y` has that dtype.
    pub(super) fn check_as(
        &self,
        spec: &Rope,
        output: Dtype,
        [x, y]: [&'static str; 2],
        max_tokens: u32,
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        check_max_position(self.max_position)?;
        normal("scale", self.scale)?;
        let dims = [max_tokens, spec.num_heads, spec.rope_dim];
        for (what, view, dtype) in [(x, &self.x, spec.dtype), (y, &self.y, output)] {
            view.check(what, dims, dtype.bytes(), 4, size(view.buffer))?;
        }
        let [tokens, heads, dim] = dims.map(u64::from);
        distinct(y, &self.y, tokens, heads, dim)?;
        fits("positions", tokens * 4, size(self.positions))?;
        fits("cos_sin", u64::from(self.max_position) * dim * 4, size(self.cos_sin))
    }

    /// Whether input and output are one buffer.
    pub(crate) fn is_in_place(&self, is_same: impl Fn(&B, &B) -> bool) -> bool {
        is_same(self.x.buffer, self.y.buffer)
    }

    /// Where input and output are one memory, they are one view or share no element.
    ///
    /// # Errors
    /// [`Error::Aliased`] where an output is read by other tokens or heads than those that write it.
    pub(super) fn check_aliases_as(
        &self,
        spec: &Rope,
        [x_name, y_name]: [&'static str; 2],
        max_tokens: u32,
        offset: impl Fn(&B, &B) -> Option<i64>,
    ) -> Result<()> {
        for (a, table) in [("positions", self.positions), ("cos_sin", self.cos_sin)] {
            if offset(table, self.y.buffer).is_some() {
                return Err(Error::Aliased { a, b: y_name });
            }
        }
        let Some(apart) = offset(self.x.buffer, self.y.buffer) else { return Ok(()) };
        let (tokens, heads) = (u64::from(max_tokens), u64::from(spec.num_heads));
        // Bytes after the front of x's buffer, in which a part that is a buffer of its own may begin later.
        let bytes = |view: &View<&B>, from: i64| {
            let end = view.end(tokens, heads, spec.rope_dim.into());
            [view.offset, end].map(|at| i128::from(at) * spec.dtype.bytes() as i128 + i128::from(from))
        };
        let (x, y) = (&self.x, &self.y);
        let ([x_begin, x_end], [y_begin, y_end]) = (bytes(x, 0), bytes(y, apart));
        let is_one_view = x_begin == y_begin
            && (tokens <= 1 || x.token_stride == y.token_stride)
            && (heads <= 1 || x.head_stride == y.head_stride);
        if is_one_view || x_end <= y_begin || y_end <= x_begin {
            return Ok(());
        }
        Err(Error::Aliased { a: x_name, b: y_name })
    }
}

impl Op for Rope {
    const NAME: &'static str = "rope";
    const CHECKS_SHARED: bool = true;
    /// Input of a step: a range of tokens: queries and keys share one.
    const SHARES_STEPS: bool = true;
    type Options = OpOptions;
    type Facts = ();
    /// Which tokens are rotated, in `x`, `y` and `positions` alike.
    type Input<'a> = Range<u32>;
    type Args<B> = RopeArgs<B>;
    /// Where the tokens end.
    type Extent = u32;
    /// Tokens that a launch's grid is for.
    type Capacity = u32;

    fn samples() -> Vec<Self> {
        let layouts = [RopeLayout::Interleaved, RopeLayout::HalfSplit];
        pairs(&layouts, &FLOATS, |layout, dtype| Rope { dtype, num_heads: 16, rope_dim: 64, layout })
    }

    fn check(&self) -> Result<()> {
        self.check_as("x and y")
    }

    fn map<'a, B: 'a, C>(
        &self,
        args: &'a RopeArgs<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<RopeArgs<C>> {
        Ok(RopeArgs {
            x: args.x.map(|buffer| f(Use::Read("x"), buffer))?,
            y: args.y.map(|buffer| f(Use::Write("y"), buffer))?,
            positions: f(Use::Read("positions"), &args.positions)?,
            cos_sin: f(Use::Read("cos_sin"), &args.cos_sin)?,
            max_position: args.max_position,
            scale: args.scale,
        })
    }

    fn check_args<B>(
        &self,
        args: &RopeArgs<&B>,
        max_tokens: u32,
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        args.check_as(self, self.dtype, ["x", "y"], max_tokens, size)
    }

    fn fits(end: u32, max_tokens: u32) -> Result<(), &'static str> {
        if end > max_tokens { Err("the step rotates tokens past the binding's max_tokens") } else { Ok(()) }
    }

    fn check_aliases<B>(
        &self,
        args: &RopeArgs<&B>,
        max_tokens: u32,
        offset: impl Fn(&B, &B) -> Option<i64> + Copy,
    ) -> Result<()> {
        args.check_aliases_as(self, ["x", "y"], max_tokens, offset)
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl TableOp for Rope {
    fn table(&self, tokens: Range<u32>, check: impl FnOnce(u64) -> Result<()>) -> Result<StepTable<u32>> {
        let (count, extent) = crate::base::view::check_tokens(&tokens)?;
        check(count.into())?;
        Ok(StepTable { count, words: vec![tokens.start], extent })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A card's buffers may be parts of one memory, which begin at different bytes of it.
    #[test]
    fn in_place_counts_from_the_front_of_the_memory() {
        let spec = Rope { dtype: Dtype::F16, num_heads: 2, rope_dim: 8, layout: RopeLayout::Interleaved };
        let check = |x_at: i64, x_offset, y_at: i64, y_offset| {
            let view = |at, offset| View { offset, ..View::dense(at, 2, 8) };
            let tables = [i64::MIN; 2];
            let args = RopeArgs {
                x: view(&x_at, x_offset),
                y: view(&y_at, y_offset),
                positions: &tables[0],
                cos_sin: &tables[1],
                max_position: 1,
                scale: 1.0,
            };
            let apart = |a: &i64, b: &i64| (*a != i64::MIN && *b != i64::MIN).then(|| b - a);
            // Three tokens of 32 bytes.
            spec.check_aliases(&args, 3, apart).is_ok()
        };
        assert!(check(0, 0, 0, 0) && check(0, 8, 16, 0) && check(16, 0, 0, 8), "one view");
        assert!(
            check(0, 0, 96, 0) && check(96, 0, 0, 0) && check(0, 48, 96, 48) && check(0, 0, 0, 48),
            "apart"
        );
        for (x_at, x_offset, y_at, y_offset) in
            [(0, 0, 16, 0), (16, 0, 0, 0), (0, 0, 80, 0), (0, 48, 96, 8), (96, 0, 0, 40)]
        {
            assert!(!check(x_at, x_offset, y_at, y_offset), "x at {x_at}, y at {y_at}");
        }
    }
}
