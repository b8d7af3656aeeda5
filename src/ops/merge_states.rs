//! `merge_states`: any number of partial attention results into one. Arguments and checks.

use std::ops::Range;

use super::LseBase;
use super::merge_state::check_state;
use super::op::{Op, Use};
use super::samples::{FLOATS, pairs};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::step_table::{StepTable, TableOp};
use super::variants::OpOptions;
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::view::{View, aligned, check_tokens, distinct, distinct_sets, normal};

/// Merges any number of partial attention results of the same queries by LSE: FlashInfer's `merge_states`, and vLLM's `dcp_lse_combine`,
/// which combines the ranks of its all-to-all form of decode context parallelism.
///
/// Arguments of a layer: [`MergeStatesArgs`]. Input of a step: `(Range<u32>, u32)`: which tokens are merged, and how many of the sets.
/// [`Error::Shape`] is a range that ends before it begins, or a number of sets outside 1 to 65,536.
///
/// Room of a binding: a [`MergeStatesExtent`], tokens and sets. Capacity of a step: `u32`, tokens.
///
/// ```
/// use wgpu_mla::{Device, Dtype, LseBase, MergeStates, MergeStatesArgs, View, cpu::Cpu};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// // Three sets of one token, one head of 8 elements.
/// let cpu = Cpu::new();
/// let (states, lse) = (cpu.buffer(3 * 8 * 4)?, cpu.buffer(3 * 4)?);
/// let output = cpu.buffer(8 * 4)?;
/// cpu.upload(&states, 0, &Dtype::F32.encode_all(&[[1.0; 8], [2.0; 8], [7.0; 8]].concat()))?;
/// // The third set is empty.
/// cpu.upload(&lse, 0, &Dtype::F32.encode_all(&[0.0, 0.0, f32::NEG_INFINITY]))?;
/// let layer = MergeStatesArgs {
///     states: View::dense(&states, 1, 8),
///     set_stride: 8,
///     lse: View::dense(&lse, 1, 1),
///     lse_set_stride: 1,
///     output: View::dense(&output, 1, 8),
///     output_lse: None,
///     lse_base: LseBase::E,
///     num_heads: 1,
///     output_scale: 1.0,
/// };
///
/// cpu.once(MergeStates { dtype: Dtype::F32, head_size: 8 }, (0..1, 3), &layer)?;
/// assert_eq!(Dtype::F32.decode_all(&cpu.download(&output, 8 * 4)?), [1.5; 8]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MergeStates {
    /// Dtype of the inputs and of the output: f32, f16 or bf16.
    pub dtype: Dtype,
    /// Elements of a head: any. A multiple of 8 is the fast way, and then offsets and strides are such multiples too.
    pub head_size: u32,
}

/// One layer of a [`MergeStates`]: sets of partial attention results of the same queries, each over other keys, and where their merge
/// goes.
///
/// `lse = ln(sum exp(lse_i))`, `out = sum exp(lse_i - lse) * out_i`, added in the order of the sets; in base 2 likewise. A set whose LSE
/// is -inf, +inf or NaN has no part in that row, whatever it holds; where one only is left the output is its bits, and where none is, 0
/// and -inf. A finite LSE so far below the largest that its weight is 0 in f32 gives 0 too, whatever the set holds.
///
/// f32 rounds LSEs of a magnitude above about 256 so much that weights are off by more than 1e-5: see docs/numbers.md.
///
/// Sets lie as their strides say, `[sets, tokens, heads, head_size]` or `[tokens, sets, heads, head_size]`. Where `head_size` is a
/// multiple of 8, so are offsets and strides, but for those of the LSEs; with another `head_size` they may be anything.
#[derive(Debug, Clone, Copy)]
pub struct MergeStatesArgs<B> {
    /// `[tokens, heads, head_size]` of set 0.
    pub states: View<B>,
    /// Elements from a set to the next. Sets do not overlap.
    pub set_stride: u64,
    /// f32 `[tokens, heads]` of set 0.
    pub lse: View<B>,
    /// Elements from a set's LSEs to the next set's, which do not overlap.
    pub lse_set_stride: u64,
    /// `[tokens, heads, head_size]`, where the merged output goes.
    pub output: View<B>,
    /// f32 `[tokens, heads]`, where the merged LSE goes, if it is wanted.
    pub output_lse: Option<View<B>>,
    /// Base of the LSEs, those that are read and that which is written.
    pub lse_base: LseBase,
    /// Heads.
    pub num_heads: u32,
    /// Factor of the output; usually 1. With another no output is copied bit for bit.
    pub output_scale: f32,
}

/// How many tokens and sets a merge reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MergeStatesExtent {
    /// Tokens, up to the last that is merged.
    pub tokens: u32,
    /// Sets: from 1 to 65,536.
    pub sets: u32,
}

impl<B: Copy> MergeStatesArgs<B> {
    /// The last of so many sets, which ends furthest back.
    pub(crate) fn last(&self, sets: u32) -> (View<B>, View<B>) {
        let last = u64::from(sets.saturating_sub(1));
        let at = |view: View<B>, stride: u64| View {
            offset: view.offset.saturating_add(last.saturating_mul(stride)),
            ..view
        };
        (at(self.states, self.set_stride), at(self.lse, self.lse_set_stride))
    }
}

/// # Errors
/// [`Error::Shape`] for no or too many sets.
fn check_sets(sets: u32) -> Result<()> {
    if !(1..=1 << 16).contains(&sets) {
        let cure = "must be from 1 to 65,536: merge what comes of several such merges after that";
        return Err(Error::Shape { what: "num_sets", got: sets.into(), cure });
    }
    Ok(())
}

/// What offsets and strides of rows of so many elements are multiples of: kernels take 4 elements at a time where they can.
pub(super) fn row_unit(head_size: u32) -> u64 {
    if is_wide(head_size) { 8 } else { 1 }
}

/// Whether rows of so many elements are taken 4 at a time.
pub(crate) fn is_wide(head_size: u32) -> bool {
    head_size.is_multiple_of(8)
}

impl MergeStates {
    /// How far a step of so many tokens and sets reaches.
    ///
    /// # Errors
    /// [`Error::Shape`] for a range that ends before it begins, and for no or too many sets.
    pub(crate) fn extent(&self, tokens: &Range<u32>, sets: u32) -> Result<MergeStatesExtent> {
        check_sets(sets)?;
        Ok(MergeStatesExtent { tokens: check_tokens(tokens)?.1, sets })
    }
}

impl Op for MergeStates {
    const NAME: &'static str = "merge_states";
    type Options = OpOptions;
    type Facts = ();
    /// Which tokens are merged, and how many of the sets.
    type Input<'a> = (Range<u32>, u32);
    type Args<B> = MergeStatesArgs<B>;
    type Extent = MergeStatesExtent;
    /// Tokens.
    type Capacity = u32;

    fn samples() -> Vec<Self> {
        // Rows of whole words, and rows that end in half a word.
        pairs(&FLOATS, &[128, 33], |dtype, head_size| MergeStates { dtype, head_size })
    }

    fn check(&self) -> Result<()> {
        check_state("merge_states", self.dtype, self.head_size)
    }

    fn map<'a, B: 'a, C>(
        &self,
        args: &'a MergeStatesArgs<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<MergeStatesArgs<C>> {
        Ok(MergeStatesArgs {
            states: args.states.map(|buffer| f(Use::Read("states"), buffer))?,
            set_stride: args.set_stride,
            lse: args.lse.map(|buffer| f(Use::Read("lse"), buffer))?,
            lse_set_stride: args.lse_set_stride,
            output: args.output.map(|buffer| f(Use::Write("output"), buffer))?,
            output_lse: match &args.output_lse {
                Some(view) => Some(view.map(|buffer| f(Use::Write("output_lse"), buffer))?),
                None => None,
            },
            lse_base: args.lse_base,
            num_heads: args.num_heads,
            output_scale: args.output_scale,
        })
    }

    fn check_args<B>(
        &self,
        args: &MergeStatesArgs<&B>,
        room: MergeStatesExtent,
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        normal("output_scale", args.output_scale)?;
        check_sets(room.sets)?;
        let (tokens, heads, dim) = (room.tokens, args.num_heads, self.head_size);
        if tokens == 0 || heads == 0 {
            return Ok(());
        }
        let unit = row_unit(dim);
        if room.sets > 1 {
            aligned("states set_stride", args.set_stride, unit)?;
        }
        let (states, lse) = args.last(room.sets);
        let bytes = self.dtype.bytes();
        for (what, view, dim, bytes, unit) in [
            ("states", Some(args.states), dim, bytes, unit),
            ("states", Some(states), dim, bytes, unit),
            ("lse", Some(lse), 1, 4, 1),
            ("output", Some(args.output), dim, bytes, unit),
            ("output_lse", args.output_lse, 1, 4, 1),
        ] {
            if let Some(view) = view {
                view.check(what, [tokens, heads, dim], bytes, unit, size(view.buffer))?;
            }
        }
        let sets = u64::from(room.sets);
        distinct_sets("states set_stride", (sets, args.set_stride), &args.states, [tokens, heads, dim])?;
        distinct_sets("lse_set_stride", (sets, args.lse_set_stride), &args.lse, [tokens, heads, 1])?;
        distinct("output", &args.output, tokens.into(), heads.into(), dim.into())?;
        let lse = args.output_lse;
        lse.map_or(Ok(()), |lse| distinct("output_lse", &lse, tokens.into(), heads.into(), 1))
    }

    fn fits(used: MergeStatesExtent, room: MergeStatesExtent) -> Result<(), &'static str> {
        if used.tokens > room.tokens || used.sets > room.sets {
            return Err("the step merges more tokens or sets than the binding has");
        }
        Ok(())
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl TableOp for MergeStates {
    fn table(
        &self,
        (tokens, num_sets): (Range<u32>, u32),
        check: impl FnOnce(u64) -> Result<()>,
    ) -> Result<StepTable<MergeStatesExtent>> {
        let extent = self.extent(&tokens, num_sets)?;
        check(tokens.len() as u64)?;
        Ok(StepTable { count: tokens.len() as u32, words: vec![tokens.start, num_sets], extent })
    }
}
