//! `indexer_query`: index queries as they meet index keys, and their scales in the heads' weights. Arguments and checks.

use std::ops::Range;

use super::indexer::{IndexFormat, check_index_heads};
use super::op::{Op, Use};
use super::rope_append::{RopeAppendExtent, positions_end};
use super::samples::{FLOATS, pairs};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::step_table::{StepTable, TableOp};
use super::variants::OpOptions;
use crate::base::dtype::Dtype;
use crate::base::error::Result;
use crate::base::view::{View, check_tokens, normal, wide};
use crate::cache::INDEX_DIM;

/// Rotates and quantises index queries as an [`IndexerAppend`](crate::IndexerAppend) does keys, but without a LayerNorm: RoPE of the first
/// 64 of 128 elements, the Hadamard rotation, and with e4m3 a scale a token and head, which goes into the head's weight:
/// `weights_out = weights * scale * weight_scale`.
///
/// Sums, scales and rounding are those of `IndexerAppend`. With f32, f16 and bf16 the scale is 1. A head's query of which an element is NaN
/// or infinite becomes 128 NaNs, and with e4m3 so does its weight.
///
/// Arguments of a layer: [`IndexerQueryArgs`]. Input of a step: an [`IndexerQueryBatch`]. [`Error::Shape`](crate::Error::Shape) is a range
/// that ends before it begins, or a negative position; [`Error::Length`](crate::Error::Length) another number of positions than tokens.
///
/// Room of a binding: a [`RopeAppendExtent`], whose `tokens` are one past the last token. Capacity of a step: `u32`, tokens.
///
/// ```
/// use wgpu_mla::{Device, Dtype, IndexFormat, IndexerQuery, IndexerQueryArgs, IndexerQueryBatch, View, cpu::Cpu};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// let format = IndexFormat { rope: None, ..IndexFormat::DEEPSEEK_V32 };
/// let cpu = Cpu::new();
/// let (q, q_out) = (cpu.buffer(2 * 128 * 4)?, cpu.buffer(2 * 128)?);
/// let (weights, weights_out, unread) = (cpu.buffer(2 * 4)?, cpu.buffer(2 * 4)?, cpu.buffer(0)?);
/// // The Hadamard matrix, over the root of 128, makes 128 equal elements one: 128^1/2 in the first, and zeros.
/// cpu.upload(&q, 0, &Dtype::F32.encode_all(&[[128f32.sqrt() * 3.5; 128], [0.0; 128]].concat()))?;
/// cpu.upload(&weights, 0, &Dtype::F32.encode_all(&[2.0, -1.0]))?;
/// let args = IndexerQueryArgs {
///     q: View::dense(&q, 2, 128),
///     weights: View::dense(&weights, 2, 1),
///     q_out: View::dense(&q_out, 2, 128),
///     weights_out: View::dense(&weights_out, 2, 1),
///     positions: &unread,
///     cos_sin: &unread,
///     max_position: 0,
///     weight_scale: 0.5,
/// };
///
/// cpu.once(IndexerQuery { format, num_heads: 2, input: Dtype::F32 }, IndexerQueryBatch::tokens(0..1), &args)?;
/// let codes = Dtype::E4m3.decode_all(&cpu.download(&q_out, 2 * 128)?);
/// assert_eq!(codes[..3], [448.0, 0.0, 0.0]); // 128 * 3.5 with a scale of 1
/// assert_eq!(Dtype::F32.decode_all(&cpu.download(&weights_out, 2 * 4)?), [1.0, -1.0 / 2f32.powi(22) * 0.5]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IndexerQuery {
    /// The format of the index cache. Its dtype is that of `q_out`.
    pub format: IndexFormat,
    /// Index heads `Hi`: 1 to 64.
    pub num_heads: u32,
    /// Dtype of `q`: f32, f16 or bf16.
    pub input: Dtype,
}

/// One layer of an [`IndexerQuery`]: queries and weights of the index heads, and where they go. Offsets and strides of `q` and `q_out` are
/// multiples of 4 elements; those of the weights are free.
#[derive(Debug, Clone, Copy)]
pub struct IndexerQueryArgs<B> {
    /// `[tokens, Hi, 128]`, what the layer's `wq_b` gives.
    pub q: View<B>,
    /// f32 `[tokens, Hi]`, what its `weights_proj` gives, of either sign: [`View::dense`] of heads of 1 element.
    pub weights: View<B>,
    /// `[tokens, Hi, 128]` of the format's dtype.
    pub q_out: View<B>,
    /// f32 `[tokens, Hi]`.
    pub weights_out: View<B>,
    /// i32 `[tokens]`; see [`RopeArgs::positions`](crate::RopeArgs::positions). Unread by a step that has positions of its own, and in a
    /// format without RoPE, where it may be any buffer.
    pub positions: B,
    /// f32 `[max_position, 64]`, in each row 32 cosines, then 32 sines. Unread in a format without RoPE.
    pub cos_sin: B,
    /// Rows of `cos_sin`. Unread in a format without RoPE.
    pub max_position: u32,
    /// Factor of all weights: `(Hi * 128)^-1/2` in DeepSeek's and GLM's models. Finite and at least 2^-126.
    pub weight_scale: f32,
}

/// The tokens of a step of an [`IndexerQuery`].
#[derive(Debug, Clone)]
pub struct IndexerQueryBatch<'a> {
    /// Which tokens, of all arrays alike.
    pub tokens: Range<u32>,
    /// Position of each of these tokens, 0 or more. `None`: those that [`IndexerQueryArgs::positions`] holds when the commands run.
    pub positions: Option<&'a [i32]>,
}

impl IndexerQueryBatch<'_> {
    /// Tokens whose positions are in [`IndexerQueryArgs::positions`], or whose format has no RoPE.
    #[must_use]
    pub const fn tokens(tokens: Range<u32>) -> Self {
        Self { tokens, positions: None }
    }

    /// The number of tokens, and how far they reach.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) and [`Error::Shape`](crate::Error::Shape).
    pub(crate) fn extent(&self) -> Result<(u32, RopeAppendExtent)> {
        let (count, tokens) = check_tokens(&self.tokens)?;
        Ok((count, RopeAppendExtent { tokens, positions: positions_end(self.positions, count.into())? }))
    }
}

impl Op for IndexerQuery {
    const NAME: &'static str = "indexer_query";
    type Options = OpOptions;
    type Facts = ();
    type Input<'a> = IndexerQueryBatch<'a>;
    type Args<B> = IndexerQueryArgs<B>;
    /// Where the tokens end, and how far positions reach.
    type Extent = RopeAppendExtent;
    /// Tokens.
    type Capacity = u32;

    /// Kernels take all of the format but its dtype at run time.
    fn samples() -> Vec<Self> {
        pairs(&FLOATS, &Dtype::ALL, |input, dtype| {
            let format = IndexFormat { dtype, ..IndexFormat::DEEPSEEK_V32 };
            IndexerQuery { format, num_heads: 64, input }
        })
    }

    fn check(&self) -> Result<()> {
        check_index_heads(self.num_heads)?;
        wide("q", self.input)
    }

    fn map<'a, B: 'a, C>(
        &self,
        args: &'a IndexerQueryArgs<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<IndexerQueryArgs<C>> {
        let angles = self.format.reads_angles();
        Ok(IndexerQueryArgs {
            q: args.q.map(|buffer| f(Use::Read("q"), buffer))?,
            weights: args.weights.map(|buffer| f(Use::Read("weights"), buffer))?,
            q_out: args.q_out.map(|buffer| f(Use::Write("q_out"), buffer))?,
            weights_out: args.weights_out.map(|buffer| f(Use::Write("weights_out"), buffer))?,
            positions: f(angles("positions"), &args.positions)?,
            cos_sin: f(angles("cos_sin"), &args.cos_sin)?,
            max_position: args.max_position,
            weight_scale: args.weight_scale,
        })
    }

    fn check_args<B>(
        &self,
        args: &IndexerQueryArgs<&B>,
        room: RopeAppendExtent,
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        normal("weight_scale", args.weight_scale)?;
        let dims = |dim| [room.tokens, self.num_heads, dim];
        for (what, view, dtype) in [("q", &args.q, self.input), ("q_out", &args.q_out, self.format.dtype)] {
            view.check(what, dims(INDEX_DIM), dtype.bytes(), 4, size(view.buffer))?;
        }
        for (what, view) in [("weights", &args.weights), ("weights_out", &args.weights_out)] {
            view.check(what, dims(1), 4, 1, size(view.buffer))?;
        }
        let sizes = [args.positions, args.cos_sin].map(size);
        self.format.check_angles(room.tokens, args.max_position, sizes)
    }

    fn room<B>(&self, args: &IndexerQueryArgs<B>, room: RopeAppendExtent) -> RopeAppendExtent {
        RopeAppendExtent { positions: self.format.positions(args.max_position), ..room }
    }

    fn fits(used: RopeAppendExtent, room: RopeAppendExtent) -> Result<(), &'static str> {
        if used.positions > room.positions {
            return Err(
                "the step has positions past IndexerQueryArgs::max_position: bind a RoPE table (cos_sin) of more positions",
            );
        }
        if used.tokens > room.tokens {
            Err("the step's tokens end past the binding's tokens")
        } else {
            Ok(())
        }
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl TableOp for IndexerQuery {
    /// The first token. Where a step's own positions go is the device's.
    fn table(
        &self,
        batch: IndexerQueryBatch<'_>,
        check: impl FnOnce(u64) -> Result<()>,
    ) -> Result<StepTable<RopeAppendExtent>> {
        let (count, extent) = batch.extent()?;
        check(count.into())?;
        Ok(StepTable { count, words: vec![batch.tokens.start], extent })
    }
}
