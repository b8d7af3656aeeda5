//! `merge_states` against the oracle.

use crate::reference::merge_states_in;
use wgpu_mla::{Backend, Dtype, Error, LseBase, MergeStates, MergeStatesArgs, View};

use super::Session;
use super::memory::{Strides, download, gather, scatter, upload};
use super::run::{Layout, Output};
use crate::close::{Tolerance, close};
use crate::paint::{POISON, Rng};

fn text(error: Error) -> String {
    error.to_string()
}

/// How sets lie.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Order {
    /// `[sets, tokens, heads, head_size]`, with gaps.
    SetsFirst,
    /// `[tokens, sets, heads, head_size]`.
    TokensFirst,
}

/// Any number of sets, dense and strided, LSEs of any kind, in both bases; with and without an output LSE.
pub fn state_merges<B: Backend>(session: &Session<'_, B>) {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        // The last few are of rows that are no multiple of 8 elements.
        for (sets, tokens, heads, head_size) in [
            (1, 3, 2, 8),
            (2, 7, 3, 128),
            (9, 5, 6, 72),
            (33, 2, 3, 264),
            (3, 5, 4, 70),
            (8, 4, 3, 37),
            (12, 6, 1, 1),
            (2, 1, 5, 4),
        ] {
            for lse_base in [LseBase::E, LseBase::Two] {
                let case = Case::new(dtype, lse_base, sets, tokens, heads, head_size);
                for order in [Order::SetsFirst, Order::TokensFirst] {
                    for with_lse in [true, false] {
                        let what = format!(
                            "{sets} sets {dtype} {tokens}x{heads}x{head_size} {order:?} base {lse_base:?} lse {with_lse}"
                        );
                        session.note(&what, case.check(session.backend, order, with_lse));
                    }
                }
            }
        }
    }
    session.finish("merges of sets");
}

/// Dense `[sets, tokens, heads, head_size]`, encoded, and `[sets, tokens, heads]`.
pub struct Case {
    pub spec: MergeStates,
    pub lse_base: LseBase,
    pub dims: [usize; 4],
    pub states: Vec<u8>,
    pub lse: Vec<f32>,
}

impl Case {
    /// LSEs that are close, far apart, large or empty; empty sets hold NaN, as do those whose weight is 0 beside another. In some rows one
    /// set is not empty, in some none.
    pub fn new(
        dtype: Dtype,
        lse_base: LseBase,
        sets: usize,
        tokens: usize,
        heads: usize,
        head_size: usize,
    ) -> Self {
        let mut rng = Rng((sets * tokens * heads * head_size) as u64);
        let rows = tokens * heads;
        let kinds = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, 300.0, -300.0, 3.3e38, -3.3e38];
        let mut lse = Vec::new();
        for set in 0..sets {
            for row in 0..rows {
                let x = rng.randn() * 3.0;
                lse.push(match row % 5 {
                    // Rows to which one set contributes, or none.
                    3 if set != (row * 7) % (sets + 1) => f32::NEG_INFINITY,
                    4 => kinds.get((set * 5 + row) % 13).copied().unwrap_or(x),
                    1 => x + 90.0,
                    2 if set == row % sets => -10000.0,
                    // Each far above the last, so that sums are rescaled to nothing step by step.
                    0 if row % 2 == 1 => x + 60.0 * set as f32,
                    _ => x,
                });
            }
        }
        let largest = |row: usize| {
            let of_row = lse.iter().skip(row).step_by(rows).filter(|lse| lse.is_finite());
            of_row.fold(f32::NEG_INFINITY, |a, &b| a.max(b))
        };
        let mut states = Vec::new();
        for (at, lse) in lse.iter().enumerate() {
            for _ in 0..head_size {
                let x = rng.randn() / 10.0;
                let weighs = lse.is_finite() && *lse > largest(at % rows) - 170.0;
                dtype.encode(if weighs { x } else { f32::NAN }, &mut states);
            }
        }
        let spec = MergeStates { dtype, head_size: head_size as u32 };
        Self { spec, lse_base, dims: [sets, tokens, heads, head_size], states, lse }
    }

    fn check<B: Backend>(&self, backend: &B, order: Order, with_lse: bool) -> Result<(), String> {
        let Self { spec, dims: [sets, tokens, heads, head_size], .. } = *self;
        let elem = spec.dtype.bytes();
        let unit = if head_size % 8 == 0 { 8 } else { 1 };
        // Sets and tokens as the tokens of an array, in either order, with gaps between sets or none.
        let place = |bytes: &[u8], dim: usize, elem: usize, unit: usize| -> Result<_, String> {
            let (gap, row) = (unit * 3, heads * dim + unit);
            let (strides, set_stride, dims) = match order {
                Order::SetsFirst => {
                    let strides = Strides { offset: unit * 2, token: row, head: dim };
                    (strides, tokens * row + gap, [tokens, heads, dim])
                }
                Order::TokensFirst => {
                    (Strides { offset: 0, token: sets * row, head: dim }, row, [tokens, heads, dim])
                }
            };
            let mut all = vec![POISON; (strides.end(dims) + (sets - 1) * set_stride) * elem];
            for set in 0..sets {
                let dense = &bytes[set * tokens * heads * dim * elem..][..tokens * heads * dim * elem];
                let at = Strides { offset: strides.offset + set * set_stride, ..strides };
                let one = scatter(dense, dims, elem, at);
                for (to, from) in all.iter_mut().zip(one) {
                    *to = if *to == POISON { from } else { *to };
                }
            }
            Ok((upload(backend, &all).map_err(text)?, strides, set_stride as u64))
        };
        let (states, states_at, set_stride) = place(&self.states, head_size, elem, unit)?;
        let (lse, lse_at, lse_set_stride) = place(&Dtype::F32.encode_all(&self.lse), 1, 4, 1)?;
        let out_dims = [tokens, heads, head_size];
        let out = Output::new(out_dims, spec.dtype, Layout::HeadMajor, unit);
        let out_buffer = upload(backend, &vec![POISON; out.len]).map_err(text)?;
        let (log_dims, log_at) = ([tokens, heads, 1], Strides { offset: 3, token: 1, head: tokens + 2 });
        let log_bytes = log_at.end(log_dims) * 4;
        let log_buffer = upload(backend, &vec![POISON; log_bytes]).map_err(text)?;
        let args = MergeStatesArgs {
            states: states_at.view(&states),
            set_stride,
            lse: lse_at.view(&lse),
            lse_set_stride,
            output: out.strides.view(&out_buffer),
            output_lse: with_lse.then(|| log_at.view(&log_buffer)),
            lse_base: self.lse_base,
            num_heads: heads as u32,
            output_scale: 1.0,
        };
        backend.once(spec, (0..tokens as u32, sets as u32), &args).map_err(text)?;

        let bytes = out.read(backend, &out_buffer).map_err(|error| format!("output: {error}"))?;
        let logs = download(backend, &log_buffer, log_bytes).map_err(text)?;
        let (logs, intact) = gather(&logs, log_dims, 4, log_at);
        intact.map_err(|error| format!("output_lse: {error}"))?;
        if !with_lse && logs.iter().any(|&byte| byte != POISON) {
            return Err("output_lse was written though it is not wanted".to_owned());
        }
        let values: Vec<f64> = spec.dtype.decode_all(&self.states).into_iter().map(f64::from).collect();
        let (mut want, mut want_lse) = (vec![], vec![]);
        for row in 0..tokens * heads {
            let at = |set: usize| set * tokens * heads + row;
            let state =
                |set: usize| (&values[at(set) * head_size..][..head_size], f64::from(self.lse[at(set)]));
            let partials: Vec<_> = (0..sets).map(state).collect();
            let (row_out, row_lse) = merge_states_in(self.lse_base, &partials);
            let some: Vec<usize> = (0..sets).filter(|&set| self.lse[at(set)].is_finite()).collect();
            let (got, size) = (&bytes[row * head_size * elem..][..head_size * elem], head_size * elem);
            let exact = match some[..] {
                [] => got.iter().all(|&byte| byte == 0),
                [set] => *got == self.states[at(set) * size..][..size],
                _ => true,
            };
            if !exact {
                return Err(format!("row {row}: one set must be left bit for bit, none must leave 0"));
            }
            let one = if let [set] = some[..] { self.lse[at(set)] } else { f32::NEG_INFINITY };
            if with_lse && some.len() < 2 && logs[row * 4..][..4] != one.to_le_bytes() {
                return Err(format!("row {row}: output_lse must be the bits of {one}"));
            }
            want.extend(row_out);
            want_lse.push(row_lse);
        }
        let tolerance = Tolerance::merge(spec.dtype);
        close("output", &spec.dtype.decode_all(&bytes), &want, &tolerance).into_result()?;
        if with_lse {
            let got = Dtype::F32.decode_all(&logs);
            close("output_lse", &got, &want_lse, &Tolerance::merge_lse()).into_result()?;
        }
        Ok(())
    }
}

/// What is wrong is refused, and nothing runs.
pub fn refuses_state_merges<B: Backend>(session: &Session<'_, B>) {
    let backend = session.backend;
    let result = || -> Result<(), Error> {
        let (states, lse) = (backend.buffer(3 * 4 * 2 * 16 * 4)?, backend.buffer(3 * 4 * 2 * 4)?);
        let (output, output_lse) = (backend.buffer(4 * 2 * 16 * 4)?, backend.buffer(4 * 2 * 4)?);
        let good = MergeStates { dtype: Dtype::F32, head_size: 16 };
        let args = MergeStatesArgs {
            states: View::dense(&states, 2, 16),
            set_stride: 4 * 2 * 16,
            lse: View::dense(&lse, 2, 1),
            lse_set_stride: 4 * 2,
            output: View::dense(&output, 2, 16),
            output_lse: Some(View::dense(&output_lse, 2, 1)),
            lse_base: LseBase::E,
            num_heads: 2,
            output_scale: 1.0,
        };
        session.note("good", backend.once(good, (0..4, 3), &args).map_err(text));
        session.note("no token", backend.once(good, (0..0, 3), &args).map_err(text));
        let one = MergeStatesArgs { set_stride: 0, lse_set_stride: 0, ..args };
        session.note("one set, whose strides are unread", backend.once(good, (0..4, 1), &one).map_err(text));
        // [tokens, sets, heads, head_size], and LSEs [heads, sets, tokens].
        let nested = MergeStatesArgs {
            states: View { token_stride: 3 * 2 * 16, ..args.states },
            set_stride: 2 * 16,
            lse: View { token_stride: 1, head_stride: 3 * 4, ..args.lse },
            lse_set_stride: 4,
            ..args
        };
        session.note("sets inside of tokens", backend.once(good, (0..4, 3), &nested).map_err(text));
        let refuses = |spec: MergeStates, sets: u32, args: MergeStatesArgs<&B::Buffer>, why: &str| {
            let noted = match backend.once(spec, (0..4, sets), &args) {
                Err(error) if error.to_string().contains(why) => Ok(()),
                other => Err(format!("{other:?} says nothing of {why}")),
            };
            session.note(why, noted);
        };
        refuses(MergeStates { dtype: Dtype::E4m3, ..good }, 3, args, "e4m3");
        refuses(MergeStates { head_size: 0, ..good }, 3, args, "head_size");
        for (sets, why) in [(0, "num_sets"), (1 << 17, "num_sets"), (4, "states")] {
            refuses(good, sets, args, why);
        }
        for (args, why) in [
            (MergeStatesArgs { set_stride: 132, ..args }, "set_stride"),
            (MergeStatesArgs { set_stride: 0, ..args }, "states set_stride 0: makes sets overlap"),
            (MergeStatesArgs { set_stride: 120, ..args }, "states set_stride 120: makes sets overlap"),
            (MergeStatesArgs { set_stride: 32, ..args }, "states set_stride 32: makes sets overlap"),
            (MergeStatesArgs { lse_set_stride: 0, ..args }, "lse_set_stride 0: makes sets overlap"),
            (MergeStatesArgs { lse_set_stride: 7, ..args }, "lse_set_stride 7: makes sets overlap"),
            (MergeStatesArgs { states: View { token_stride: 0, ..args.states }, ..args }, "states 0"),
            (MergeStatesArgs { states: View { head_stride: 8, ..args.states }, ..args }, "states 8"),
            (MergeStatesArgs { lse: View { token_stride: 0, ..args.lse }, ..args }, "lse 0"),
            (MergeStatesArgs { set_stride: u64::MAX - 7, ..args }, "states"),
            (MergeStatesArgs { lse_set_stride: 9, ..args }, "lse"),
            (MergeStatesArgs { states: View { offset: 4, ..args.states }, ..args }, "states"),
            (MergeStatesArgs { output: View { token_stride: 16, ..args.output }, ..args }, "output"),
            (MergeStatesArgs { output: View { offset: 8, ..args.output }, ..args }, "output"),
            (MergeStatesArgs { output: View { buffer: &states, ..args.output }, ..args }, "states"),
            (MergeStatesArgs { output_lse: Some(View::dense(&lse, 2, 1)), ..args }, "lse"),
            (MergeStatesArgs { output_lse: Some(View::dense(&output, 2, 1)), ..args }, "output"),
        ] {
            refuses(good, 3, args, why);
        }
        Ok(())
    }();
    session.note("refusals", result.map_err(text));
    session.finish("refusals of merges of sets");
}
