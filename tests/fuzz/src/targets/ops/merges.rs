//! Ops that merge partial results.

use std::ops::Range;

use wgpu_mla::{
    CorrectAttnOut, CorrectAttnOutArgs, Dtype, Error, LseBase, MergeState, MergeStateArgs, MergeStates,
    MergeStatesArgs,
};

use super::array::{Array, Holds};
use super::case::{Case, Draw};
use super::{sample, tokens, view};

/// Sets of partial results, tokens and heads.
#[derive(Debug)]
pub struct Call {
    tokens: Range<u32>,
    sets: u32,
    rank: u32,
    heads: u32,
    base: LseBase,
    has_lse: bool,
    scale: f32,
}

fn call(draw: &mut Draw<'_, '_>) -> Call {
    let sets = draw.number(1, 4);
    Call {
        tokens: tokens(draw),
        sets,
        rank: draw.number(0, sets.clamp(1, 4) - 1),
        heads: draw.number(0, 4),
        base: draw.source.pick(&[LseBase::E, LseBase::Two]),
        has_lse: !draw.source.chance(64),
        scale: draw.factor(),
    }
}

impl Call {
    /// The arrays of an op over several sets: outputs of `sets` of them, LSEs of all, and the result.
    fn arrays(&self, sets: u32, dtype: Dtype, head_size: u32) -> Vec<Array> {
        let (end, unit) = (reach(&self.tokens), unit(head_size));
        let (states, counts) = (Holds::Elements(dtype), [1, end, self.heads]);
        let mut all = vec![
            Array::read(states, [sets, end, self.heads], head_size, unit),
            Array::read(Holds::Lses, [self.sets, end, self.heads], 1, 1),
            Array::written(states, counts, head_size, unit),
        ];
        all.extend(self.has_lse.then(|| Array::written(Holds::Lses, counts, 1, 1)));
        all
    }
}

fn head_size(draw: &mut Draw<'_, '_>, sample: u32) -> u32 {
    let sizes = [sample, 1, 2, 3, 4, 6, 8, 16, 24, 40];
    let good = draw.source.pick(&sizes);
    if draw.source.chance(1) { draw.number(0, 0) } else { good }
}

/// What rows of states are multiples of.
fn unit(head_size: u32) -> u64 {
    if head_size.is_multiple_of(8) { 8 } else { 1 }
}

impl Case for MergeState {
    type Call = Call;

    fn draw(draw: &mut Draw<'_, '_>) -> (Self, Call) {
        let spec: Self = sample(draw.source);
        let head_size = head_size(draw, spec.head_size);
        draw.is_broken |= head_size == 0;
        (Self { head_size, ..spec }, Call { tokens: 0..draw.number(0, 5), ..call(draw) })
    }

    fn arrays(&self, call: &Call) -> Vec<Array> {
        let counts = [1, call.tokens.end, call.heads];
        let states = Holds::Elements(self.dtype);
        let mut all = vec![
            Array::read(states, counts, self.head_size, 1),
            Array::read(Holds::Lses, counts, 1, 1),
            Array::read(states, counts, self.head_size, 1),
            Array::read(Holds::Lses, counts, 1, 1),
            Array::written(states, counts, self.head_size, 1),
        ];
        all.extend(call.has_lse.then(|| Array::written(Holds::Lses, counts, 1, 1)));
        all
    }

    fn args<B: Copy>(&self, call: &Call, arrays: &[Array], at: &[B]) -> Result<MergeStateArgs<B>, Error> {
        let view = |i: usize| view(&arrays[i], at[i]);
        Ok(MergeStateArgs {
            prefix_output: view(0),
            prefix_lse: view(1),
            suffix_output: view(2),
            suffix_lse: view(3),
            output: view(4),
            output_lse: call.has_lse.then(|| view(5)),
            num_tokens: call.tokens.end,
            num_heads: call.heads,
            output_scale: call.scale,
        })
    }

    fn with_input<R>(&self, (): &(), _: &Call, then: impl FnOnce(Result<(), Error>) -> R) -> R {
        then(Ok(()))
    }

    fn touches(&self, _: &Call, _: usize, _: [u64; 3]) -> bool {
        true
    }
}

impl Case for MergeStates {
    type Call = Call;

    fn draw(draw: &mut Draw<'_, '_>) -> (Self, Call) {
        let spec: Self = sample(draw.source);
        let head_size = head_size(draw, spec.head_size);
        draw.is_broken |= head_size == 0;
        (Self { head_size, ..spec }, call(draw))
    }

    fn arrays(&self, call: &Call) -> Vec<Array> {
        call.arrays(call.sets, self.dtype, self.head_size)
    }

    fn args<B: Copy>(&self, call: &Call, arrays: &[Array], at: &[B]) -> Result<MergeStatesArgs<B>, Error> {
        let view = |i: usize| view(&arrays[i], at[i]);
        Ok(MergeStatesArgs {
            states: view(0),
            set_stride: arrays[0].strides[0],
            lse: view(1),
            lse_set_stride: arrays[1].strides[0],
            output: view(2),
            output_lse: call.has_lse.then(|| view(3)),
            lse_base: call.base,
            num_heads: call.heads,
            output_scale: call.scale,
        })
    }

    fn with_input<R>(
        &self,
        (): &(),
        call: &Call,
        then: impl FnOnce(Result<(Range<u32>, u32), Error>) -> R,
    ) -> R {
        then(Ok((call.tokens.clone(), call.sets)))
    }

    fn touches(&self, call: &Call, _: usize, [_, token, _]: [u64; 3]) -> bool {
        call.tokens.contains(&(token as u32))
    }
}

impl Case for CorrectAttnOut {
    type Call = Call;

    fn draw(draw: &mut Draw<'_, '_>) -> (Self, Call) {
        let spec: Self = sample(draw.source);
        let head_size = head_size(draw, spec.head_size);
        draw.is_broken |= head_size == 0;
        (Self { head_size, ..spec }, call(draw))
    }

    fn arrays(&self, call: &Call) -> Vec<Array> {
        call.arrays(1, self.dtype, self.head_size)
    }

    fn args<B: Copy>(&self, call: &Call, arrays: &[Array], at: &[B]) -> Result<CorrectAttnOutArgs<B>, Error> {
        let view = |i: usize| view(&arrays[i], at[i]);
        Ok(CorrectAttnOutArgs {
            out: view(0),
            lses: view(1),
            lse_rank_stride: arrays[1].strides[0],
            output: view(2),
            output_lse: call.has_lse.then(|| view(3)),
            lse_base: call.base,
            world: call.sets,
            rank: call.rank,
            num_heads: call.heads,
        })
    }

    fn with_input<R>(&self, (): &(), call: &Call, then: impl FnOnce(Result<Range<u32>, Error>) -> R) -> R {
        then(Ok(call.tokens.clone()))
    }

    fn touches(&self, call: &Call, _: usize, [_, token, _]: [u64; 3]) -> bool {
        call.tokens.contains(&(token as u32))
    }
}

/// Rows that the arrays of a range must have: none for an empty one.
pub fn reach(tokens: &Range<u32>) -> u32 {
    if tokens.is_empty() { 0 } else { tokens.end }
}
