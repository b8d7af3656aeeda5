//! `merge_state`: two partial attention results into one. Arguments and checks.

use super::op::{Op, Use};
use super::samples::{FLOATS, pairs};
use super::variants::OpOptions;
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::view::{View, distinct, normal, wide};

/// Merges two partial attention results of the same queries by LSE: FlashInfer's `merge_state`, vLLM's `merge_attn_states`.
///
/// Arguments of a layer: [`MergeStateArgs`]. A step has no input. [`MergeStates`](crate::MergeStates) merges any number of them.
///
/// Room of a binding: `()`, since its arguments say it. Capacity of a step: `()`.
///
/// ```
/// use wgpu_mla::{Device, Dtype, MergeState, MergeStateArgs, View, cpu::Cpu};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// // One token, one head of 4 elements.
/// let cpu = Cpu::new();
/// let (prefix, suffix, output) = (cpu.buffer(16)?, cpu.buffer(16)?, cpu.buffer(16)?);
/// let (lse, output_lse) = (cpu.buffer(4)?, cpu.buffer(4)?);
/// cpu.upload(&prefix, 0, &Dtype::F32.encode_all(&[1.0; 4]))?;
/// cpu.upload(&suffix, 0, &Dtype::F32.encode_all(&[2.0; 4]))?;
/// let layer = MergeStateArgs {
///     prefix_output: View::dense(&prefix, 1, 4),
///     prefix_lse: View::dense(&lse, 1, 1),
///     suffix_output: View::dense(&suffix, 1, 4),
///     suffix_lse: View::dense(&lse, 1, 1),
///     output: View::dense(&output, 1, 4),
///     output_lse: Some(View::dense(&output_lse, 1, 1)),
///     num_tokens: 1,
///     num_heads: 1,
///     output_scale: 1.0,
/// };
///
/// // Both have an LSE of 0, so that they weigh the same.
/// cpu.once(MergeState { dtype: Dtype::F32, head_size: 4 }, (), &layer)?;
/// assert_eq!(Dtype::F32.decode_all(&cpu.download(&output, 16)?), [1.5; 4]);
/// assert!((Dtype::F32.decode_all(&cpu.download(&output_lse, 4)?)[0] - 2f32.ln()).abs() < 1e-6);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MergeState {
    /// Dtype of both inputs and of the output: f32, f16 or bf16.
    pub dtype: Dtype,
    /// Elements of a head: any.
    pub head_size: u32,
}

/// One layer of a [`MergeState`]: two partial attention results of the same queries over different keys, and where their merge goes.
///
/// `lse = ln(sum exp(lse_i))`, `out = sum exp(lse_i - lse) * out_i`. An input whose LSE is -inf, +inf or NaN counts
/// as empty, and what it holds is ignored. Strides are never inferred from each other: outputs are
/// `[tokens, heads, head_size]` and LSEs f32 `[heads, tokens]` as users of vLLM know them, but any strides do.
/// LSEs are natural logarithms. Both inputs may be one buffer. Heads, offsets and strides that are multiples of 16 bytes are the fast way.
///
/// f32 rounds an LSE of a magnitude above about 256 so much that weights are off by more than 1e-5: see docs/numbers.md.
#[derive(Debug, Clone, Copy)]
pub struct MergeStateArgs<B> {
    /// `[tokens, heads, head_size]`, the output over the first keys.
    pub prefix_output: View<B>,
    /// f32 `[tokens, heads]`, its LSE.
    pub prefix_lse: View<B>,
    /// `[tokens, heads, head_size]`, the output over the other keys.
    pub suffix_output: View<B>,
    /// f32 `[tokens, heads]`, its LSE.
    pub suffix_lse: View<B>,
    /// `[tokens, heads, head_size]`, where the merged output goes.
    pub output: View<B>,
    /// f32 `[tokens, heads]`, where the merged LSE goes, if it is wanted.
    pub output_lse: Option<View<B>>,
    /// Query tokens.
    pub num_tokens: u32,
    /// Heads.
    pub num_heads: u32,
    /// Factor of the output; usually 1. With another no output is copied bit for bit.
    pub output_scale: f32,
}

/// # Errors
/// [`Error::DtypeUnsupported`] for e4m3, [`Error::Shape`] for an empty head.
pub(super) fn check_state(what: &'static str, dtype: Dtype, head_size: u32) -> Result<()> {
    wide(what, dtype)?;
    if head_size == 0 {
        return Err(Error::Shape { what: "head_size", got: 0, cure: "must be at least 1" });
    }
    Ok(())
}

impl<B> MergeStateArgs<B> {
    /// Whether there is nothing to merge.
    pub(crate) const fn is_empty(&self) -> bool {
        self.num_tokens == 0 || self.num_heads == 0
    }
}

impl Op for MergeState {
    const NAME: &'static str = "merge_state";
    type Options = OpOptions;
    type Facts = ();
    type Input<'a> = ();
    type Args<B> = MergeStateArgs<B>;
    type Extent = ();
    type Capacity = ();

    fn samples() -> Vec<Self> {
        // Rows of whole words, and rows that end in half a word.
        pairs(&FLOATS, &[128, 33], |dtype, head_size| MergeState { dtype, head_size })
    }

    fn check(&self) -> Result<()> {
        check_state("merge_state", self.dtype, self.head_size)
    }

    fn map<'a, B: 'a, C>(
        &self,
        args: &'a MergeStateArgs<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<MergeStateArgs<C>> {
        Ok(MergeStateArgs {
            prefix_output: args.prefix_output.map(|buffer| f(Use::Read("prefix_output"), buffer))?,
            prefix_lse: args.prefix_lse.map(|buffer| f(Use::Read("prefix_lse"), buffer))?,
            suffix_output: args.suffix_output.map(|buffer| f(Use::Read("suffix_output"), buffer))?,
            suffix_lse: args.suffix_lse.map(|buffer| f(Use::Read("suffix_lse"), buffer))?,
            output: args.output.map(|buffer| f(Use::Write("output"), buffer))?,
            output_lse: match &args.output_lse {
                Some(view) => Some(view.map(|buffer| f(Use::Write("output_lse"), buffer))?),
                None => None,
            },
            num_tokens: args.num_tokens,
            num_heads: args.num_heads,
            output_scale: args.output_scale,
        })
    }

    fn check_args<B>(
        &self,
        args: &MergeStateArgs<&B>,
        (): (),
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        normal("output_scale", args.output_scale)?;
        if args.is_empty() {
            return Ok(());
        }
        let (tokens, heads, dim) = (args.num_tokens, args.num_heads, self.head_size);
        for (what, view, dim, bytes) in [
            ("prefix_output", Some(args.prefix_output), dim, self.dtype.bytes()),
            ("suffix_output", Some(args.suffix_output), dim, self.dtype.bytes()),
            ("output", Some(args.output), dim, self.dtype.bytes()),
            ("prefix_lse", Some(args.prefix_lse), 1, 4),
            ("suffix_lse", Some(args.suffix_lse), 1, 4),
            ("output_lse", args.output_lse, 1, 4),
        ] {
            if let Some(view) = view {
                view.check(what, [tokens, heads, dim], bytes, 1, size(view.buffer))?;
            }
        }
        distinct("output", &args.output, tokens.into(), heads.into(), dim.into())?;
        let lse = args.output_lse;
        lse.map_or(Ok(()), |lse| distinct("output_lse", &lse, tokens.into(), heads.into(), 1))
    }

    fn fits((): (), (): ()) -> Result<(), &'static str> {
        Ok(())
    }

    fn initial_extent() -> Option<()> {
        Some(())
    }
}
