//! `correct_attn_out`: one rank's attention output, weighted for a sum over the ranks. Arguments and checks.

use std::ops::Range;

use super::LseBase;
use super::merge_state::check_state;
use super::merge_states::row_unit;
use super::op::{Op, Use};
use super::samples::{FLOATS, pairs};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::step_table::{StepTable, TableOp};
use super::variants::OpOptions;
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::view::{View, check_tokens, distinct, distinct_sets};

/// Weights one rank's attention output by the LSEs of all ranks, so that the sum over the ranks is the attention of the whole: vLLM's
/// `correct_attn_out` in `cp_lse_ag_out_rs`, between an all-gather of the LSEs and a reduce-scatter of the outputs.
///
/// Arguments of a layer: [`CorrectAttnOutArgs`]. Input of a step: a `Range<u32>` of tokens; [`Error::Shape`] is one that ends before it
/// begins.
///
/// Room of a binding: `u32`, one past the last token. Capacity of a step: `u32`, tokens.
///
/// ```
/// use wgpu_mla::{CorrectAttnOut, CorrectAttnOutArgs, Device, Dtype, LseBase, View, cpu::Cpu};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// // One token, one head of 4 elements, on rank 1 of two that weigh the same.
/// let cpu = Cpu::new();
/// let (out, lses, output) = (cpu.buffer(16)?, cpu.buffer(8)?, cpu.buffer(16)?);
/// cpu.upload(&out, 0, &Dtype::F32.encode_all(&[3.0; 4]))?;
/// let layer = CorrectAttnOutArgs {
///     out: View::dense(&out, 1, 4),
///     lses: View::dense(&lses, 1, 1),
///     lse_rank_stride: 1,
///     output: View::dense(&output, 1, 4),
///     output_lse: None,
///     lse_base: LseBase::E,
///     world: 2,
///     rank: 1,
///     num_heads: 1,
/// };
///
/// cpu.once(CorrectAttnOut { dtype: Dtype::F32, head_size: 4 }, 0..1, &layer)?;
/// assert_eq!(Dtype::F32.decode_all(&cpu.download(&output, 16)?), [1.5; 4]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CorrectAttnOut {
    /// Dtype of the output that is read and of the one that is written: f32, f16 or bf16.
    pub dtype: Dtype,
    /// Elements of a head: any. A multiple of 8 is the fast way, and then offsets and strides are such multiples too.
    pub head_size: u32,
}

/// One layer of a [`CorrectAttnOut`].
///
/// `lse = ln(sum exp(lse_i))` over the ranks, `output = exp(lse_rank - lse) * out`; in base 2 likewise. A rank whose LSE is -inf, +inf
/// or NaN has no part in that row. This rank's output is 0 where it has none, or where its weight is 0 in f32, whatever `out` holds;
/// where it alone has one, its bits are kept. Where none has, 0 and -inf.
///
/// f32 rounds LSEs of a magnitude above about 256 so much that weights are off by more than 1e-5: see docs/numbers.md.
///
/// Where `head_size` is a multiple of 8, so are offsets and strides, but for those of the LSEs; with another `head_size` they may be
/// anything.
#[derive(Debug, Clone, Copy)]
pub struct CorrectAttnOutArgs<B> {
    /// `[tokens, heads, head_size]`: what this rank attended.
    pub out: View<B>,
    /// f32 `[tokens, heads]` of rank 0, of the gathered `[world, tokens, heads]`.
    pub lses: View<B>,
    /// Elements from a rank's LSEs to the next rank's, which do not overlap.
    pub lse_rank_stride: u64,
    /// `[tokens, heads, head_size]`, where the weighted output goes: with a head stride above its token stride it is
    /// `[heads, tokens, head_size]`, as a reduce-scatter over heads takes it.
    pub output: View<B>,
    /// f32 `[tokens, heads]`, where the LSE of the whole goes, if it is wanted.
    pub output_lse: Option<View<B>>,
    /// Base of the LSEs, those that are read and that which is written.
    pub lse_base: LseBase,
    /// Ranks: from 1 to 65,536.
    pub world: u32,
    /// This rank.
    pub rank: u32,
    /// Heads.
    pub num_heads: u32,
}

impl<B: Copy> CorrectAttnOutArgs<B> {
    /// The last rank's LSEs, which end furthest back.
    pub(crate) fn last_lses(&self) -> View<B> {
        let last = u64::from(self.world.saturating_sub(1)).saturating_mul(self.lse_rank_stride);
        View { offset: self.lses.offset.saturating_add(last), ..self.lses }
    }
}

impl CorrectAttnOut {
    /// How far a range of tokens reaches.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub(crate) fn extent(&self, tokens: &Range<u32>) -> Result<u32> {
        Ok(check_tokens(tokens)?.1)
    }
}

impl Op for CorrectAttnOut {
    const NAME: &'static str = "correct_attn_out";
    type Options = OpOptions;
    type Facts = ();
    /// Which tokens.
    type Input<'a> = Range<u32>;
    type Args<B> = CorrectAttnOutArgs<B>;
    /// Tokens, up to the last.
    type Extent = u32;
    /// Tokens.
    type Capacity = u32;

    fn samples() -> Vec<Self> {
        // Rows of whole words, and rows that end in half a word.
        pairs(&FLOATS, &[128, 33], |dtype, head_size| CorrectAttnOut { dtype, head_size })
    }

    fn check(&self) -> Result<()> {
        check_state("correct_attn_out", self.dtype, self.head_size)
    }

    fn map<'a, B: 'a, C>(
        &self,
        args: &'a CorrectAttnOutArgs<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<CorrectAttnOutArgs<C>> {
        Ok(CorrectAttnOutArgs {
            out: args.out.map(|buffer| f(Use::Read("out"), buffer))?,
            lses: args.lses.map(|buffer| f(Use::Read("lses"), buffer))?,
            lse_rank_stride: args.lse_rank_stride,
            output: args.output.map(|buffer| f(Use::Write("output"), buffer))?,
            output_lse: match &args.output_lse {
                Some(view) => Some(view.map(|buffer| f(Use::Write("output_lse"), buffer))?),
                None => None,
            },
            lse_base: args.lse_base,
            world: args.world,
            rank: args.rank,
            num_heads: args.num_heads,
        })
    }

    fn check_args<B>(
        &self,
        args: &CorrectAttnOutArgs<&B>,
        tokens: u32,
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        let (world, rank) = (args.world, args.rank);
        if !(1..=1 << 16).contains(&world) {
            let cure = "must be from 1 to 65,536 ranks";
            return Err(Error::Shape { what: "world", got: world.into(), cure });
        }
        if rank >= world {
            let cure = "must be below the world";
            return Err(Error::Shape { what: "rank", got: rank.into(), cure });
        }
        let (heads, dim) = (args.num_heads, self.head_size);
        if tokens == 0 || heads == 0 {
            return Ok(());
        }
        let (unit, bytes) = (row_unit(dim), self.dtype.bytes());
        for (what, view, dim, bytes, unit) in [
            ("out", Some(args.out), dim, bytes, unit),
            ("lses", Some(args.last_lses()), 1, 4, 1),
            ("output", Some(args.output), dim, bytes, unit),
            ("output_lse", args.output_lse, 1, 4, 1),
        ] {
            if let Some(view) = view {
                view.check(what, [tokens, heads, dim], bytes, unit, size(view.buffer))?;
            }
        }
        let ranks = (world.into(), args.lse_rank_stride);
        distinct_sets("lse_rank_stride", ranks, &args.lses, [tokens, heads, 1])?;
        distinct("output", &args.output, tokens.into(), heads.into(), dim.into())?;
        let lse = args.output_lse;
        lse.map_or(Ok(()), |lse| distinct("output_lse", &lse, tokens.into(), heads.into(), 1))
    }

    fn fits(tokens: u32, room: u32) -> Result<(), &'static str> {
        if tokens > room { Err("the step has more tokens than the binding") } else { Ok(()) }
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl TableOp for CorrectAttnOut {
    fn table(&self, tokens: Range<u32>, check: impl FnOnce(u64) -> Result<()>) -> Result<StepTable<u32>> {
        let (count, extent) = check_tokens(&tokens)?;
        check(count.into())?;
        Ok(StepTable { count, words: vec![tokens.start], extent })
    }
}
