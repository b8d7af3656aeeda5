//! Partial results merged: of two, of many, and by ranks.

use wgpu_mla::{
    Backend, CorrectAttnOut, CorrectAttnOutArgs, Dtype, LseBase, MergeState, MergeStateArgs, MergeStates,
    MergeStatesArgs,
};

use super::decode::FLOATS;
use super::draw::{Draw, bytes, values};
use super::judge::{MERGED_LSE, judge, of_merge};
use super::place::Array;
use super::reference::merge;
use super::{Under, text};

/// Sets of partial results, `[sets, tokens, heads, dim]`, with LSEs in a base.
struct States {
    dtype: Dtype,
    dims: [usize; 3],
    base: LseBase,
    outs: Vec<Vec<u8>>,
    lses: Vec<Vec<f64>>,
}

impl States {
    fn draw(spec_draw: &mut Draw, draw: &mut Draw, sets: usize, base: LseBase) -> Self {
        let dtype = spec_draw.pick(&FLOATS);
        let dim = if spec_draw.once_in(2) { 8 * spec_draw.within(1, 64) } else { spec_draw.within(1, 140) };
        let dims = [draw.within(1, 9), draw.within(1, 9), dim];
        let [tokens, heads, _] = dims;
        let far = draw.once_in(3);
        let lse = |draw: &mut Draw| match draw.below(8) {
            0 => f64::NEG_INFINITY,
            1 => draw.pick(&[f64::INFINITY, f64::NAN]),
            2 if far => 120.0 * draw.normal(),
            _ => 3.0 * draw.normal(),
        };
        let mut states = Self { dtype, dims, base, outs: Vec::new(), lses: Vec::new() };
        for _ in 0..sets {
            let lses: Vec<f64> = (0..tokens * heads).map(|_| f64::from(lse(draw) as f32)).collect();
            let one = |row: usize, draw: &mut Draw| match (lses[row].is_finite(), draw.below(9)) {
                // What an empty set holds is ignored.
                (false, 0) => f64::NAN,
                (false, 1) => f64::INFINITY,
                _ => draw.normal(),
            };
            let out: Vec<f64> = (0..tokens * heads * dim).map(|i| one(i / dim, draw)).collect();
            states.outs.push(bytes(dtype, out));
            states.lses.push(lses);
        }
        states
    }

    fn unit(&self) -> f64 {
        if self.base == LseBase::Two { std::f64::consts::LN_2 } else { 1.0 }
    }

    /// The merged output times a factor, and the LSE in the base.
    fn merged(&self, scale: f32) -> (Vec<f64>, Vec<f64>) {
        let dim = self.dims[2];
        let outs: Vec<_> = self.outs.iter().map(|out| values(self.dtype, out)).collect();
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for row in 0..self.lses[0].len() {
            let parts: Vec<_> = outs
                .iter()
                .zip(&self.lses)
                .map(|(out, lse)| (&out[row * dim..][..dim], lse[row] * self.unit()))
                .collect();
            let (merged, natural) = merge(&parts, dim);
            out.extend(merged.into_iter().map(|x| x * f64::from(scale)));
            lse.push(natural / self.unit());
        }
        (out, lse)
    }

    fn line(&self) -> String {
        format!("{} of {:?}, {} sets, base {:?}", self.dtype, self.dims, self.outs.len(), self.base)
    }

    fn lse_bytes(&self, set: usize) -> Vec<u8> {
        bytes(Dtype::F32, self.lses[set].iter().copied())
    }

    fn judge(&self, got: (&[u8], Option<&[u8]>), want: &(Vec<f64>, Vec<f64>)) -> Result<(), String> {
        judge("output", self.dims, &values(self.dtype, got.0), &want.0, &of_merge(self.dtype))?;
        let [tokens, heads, _] = self.dims;
        let Some(lse) = got.1 else { return Ok(()) };
        judge("output_lse", [tokens, heads, 1], &values(Dtype::F32, lse), &want.1, &MERGED_LSE)
    }

    /// Rows of which one set alone is not empty have its bits.
    fn judge_alone(&self, got: &[u8]) -> Result<(), String> {
        let row = self.dims[2] * self.dtype.bytes();
        for at in 0..self.lses[0].len() {
            let mut held = (0..self.outs.len()).filter(|&set| self.lses[set][at].is_finite());
            let (Some(set), None) = (held.next(), held.next()) else { continue };
            if got[at * row..][..row] != self.outs[set][at * row..][..row] {
                return Err(format!("row {at}: expected the bits of set {set}, which is alone"));
            }
        }
        Ok(())
    }
}

fn scale(draw: &mut Draw) -> f32 {
    draw.pick(&[1.0, 1.0, 8.0, 0.3])
}

pub fn two<B: Backend>(under: &Under<'_, B>, spec_draw: &mut Draw, draw: &mut Draw) -> Result<(), String> {
    let states = States::draw(spec_draw, draw, 2, LseBase::E);
    let (backend, elem, [tokens, heads, dim]) = (under.backend, states.dtype.bytes(), states.dims);
    let unit = draw.pick(&[1, 8]);
    let at: Vec<Array> = (0..3).map(|_| Array::draw(draw, states.dims, elem, unit)).collect();
    let lse_at: Vec<Array> = (0..3).map(|_| Array::draw(draw, [tokens, heads, 1], 4, 1)).collect();
    let prefix = at[0].upload(backend, &states.outs[0])?;
    let suffix = at[1].upload(backend, &states.outs[1])?;
    let lses =
        [lse_at[0].upload(backend, &states.lse_bytes(0))?, lse_at[1].upload(backend, &states.lse_bytes(1))?];
    let (output, output_lse) = (at[2].nothing(backend)?, lse_at[2].nothing(backend)?);
    let (output_scale, with_lse) = (scale(draw), !draw.once_in(4));
    let args = MergeStateArgs {
        prefix_output: at[0].view(&prefix),
        prefix_lse: lse_at[0].view(&lses[0]),
        suffix_output: at[1].view(&suffix),
        suffix_lse: lse_at[1].view(&lses[1]),
        output: at[2].view(&output),
        output_lse: with_lse.then(|| lse_at[2].view(&output_lse)),
        num_tokens: tokens as u32,
        num_heads: heads as u32,
        output_scale,
    };
    let check = || -> Result<(), String> {
        let op = MergeState { dtype: states.dtype, head_size: dim as u32 };
        backend.once(op, (), &args).map_err(text)?;
        let got = at[2].read("output", backend, &output)?;
        let lse = lse_at[2].read("output_lse", backend, &output_lse)?;
        states.judge((&got, with_lse.then_some(&lse)), &states.merged(output_scale))?;
        if output_scale == 1.0 { states.judge_alone(&got) } else { Ok(()) }
    };
    check().map_err(|error| format!("{} scale {output_scale}: {error}", states.line()))?;
    under.count("merge_state");
    Ok(())
}

/// Sets in one array, one after the other or between the tokens of each other.
struct Sets {
    at: Array,
    lse_at: Array,
    by_token: bool,
    sets: usize,
    dims: [usize; 3],
}

impl Sets {
    fn draw(draw: &mut Draw, states: &States) -> Self {
        let ([tokens, heads, dim], sets) = (states.dims, states.outs.len());
        let by_token = draw.once_in(2);
        let unit = if dim % 8 == 0 { 8 } else { 1 };
        Self {
            at: Array::dense(draw, [sets * tokens, heads, dim], states.dtype.bytes(), unit),
            lse_at: Array::dense(draw, [sets * tokens, heads, 1], 4, 1),
            by_token,
            sets,
            dims: states.dims,
        }
    }

    /// The rows of all sets in the order of the array.
    fn order(&self, of: impl Fn(usize) -> Vec<u8>) -> Vec<u8> {
        let [tokens, ..] = self.dims;
        let sets: Vec<Vec<u8>> = (0..self.sets).map(of).collect();
        let row = sets[0].len() / tokens;
        let at =
            |i: usize| if self.by_token { (i % self.sets, i / self.sets) } else { (i / tokens, i % tokens) };
        (0..self.sets * tokens).flat_map(|i| sets[at(i).0][at(i).1 * row..][..row].to_vec()).collect()
    }

    /// A view of set 0 and the stride to the next.
    fn view<'a, T>(&self, at: &Array, buffer: &'a T) -> (wgpu_mla::View<&'a T>, u64) {
        let view = at.strided(buffer);
        let [tokens, ..] = self.dims.map(|dim| dim as u64);
        let stride = view.token_stride;
        if self.by_token {
            (wgpu_mla::View { token_stride: stride * self.sets as u64, ..view }, stride)
        } else {
            (view, stride * tokens)
        }
    }
}

pub fn many<B: Backend>(under: &Under<'_, B>, spec_draw: &mut Draw, draw: &mut Draw) -> Result<(), String> {
    let (sets, base) = (draw.within(1, 9), draw.pick(&[LseBase::E, LseBase::Two]));
    let states = States::draw(spec_draw, draw, sets, base);
    let (backend, [tokens, heads, dim]) = (under.backend, states.dims);
    let unit = if dim % 8 == 0 { 8 } else { 1 };
    let sets_at = Sets::draw(draw, &states);
    let held = sets_at.at.upload(backend, &sets_at.order(|set| states.outs[set].clone()))?;
    let lses = sets_at.lse_at.upload(backend, &sets_at.order(|set| states.lse_bytes(set)))?;
    let out_at = Array::draw(draw, states.dims, states.dtype.bytes(), unit);
    let lse_at = Array::draw(draw, [tokens, heads, 1], 4, 1);
    let (output, output_lse) = (out_at.nothing(backend)?, lse_at.nothing(backend)?);
    let (output_scale, with_lse) = (scale(draw), !draw.once_in(4));
    let (view, set_stride) = sets_at.view(&sets_at.at, &held);
    let (lse, lse_set_stride) = sets_at.view(&sets_at.lse_at, &lses);
    let args = MergeStatesArgs {
        states: view,
        set_stride,
        lse,
        lse_set_stride,
        output: out_at.view(&output),
        output_lse: with_lse.then(|| lse_at.view(&output_lse)),
        lse_base: base,
        num_heads: heads as u32,
        output_scale,
    };
    let check = || -> Result<(), String> {
        let op = MergeStates { dtype: states.dtype, head_size: dim as u32 };
        backend.once(op, (0..tokens as u32, sets as u32), &args).map_err(text)?;
        let got = out_at.read("output", backend, &output)?;
        let lse = lse_at.read("output_lse", backend, &output_lse)?;
        states.judge((&got, with_lse.then_some(&lse)), &states.merged(output_scale))?;
        if output_scale == 1.0 { states.judge_alone(&got) } else { Ok(()) }
    };
    check().map_err(|error| format!("{} scale {output_scale}: {error}", states.line()))?;
    under.count("merge_states");
    Ok(())
}

/// Each rank's weighted output, whose sum is the merged one.
pub fn corrected<B: Backend>(
    under: &Under<'_, B>,
    spec_draw: &mut Draw,
    draw: &mut Draw,
) -> Result<(), String> {
    let (world, base) = (draw.within(1, 5), draw.pick(&[LseBase::E, LseBase::Two]));
    let states = States::draw(spec_draw, draw, world, base);
    let (backend, [tokens, heads, dim]) = (under.backend, states.dims);
    let unit = if dim % 8 == 0 { 8 } else { 1 };
    let sets_at = Sets::draw(draw, &states);
    let lses = sets_at.lse_at.upload(backend, &sets_at.order(|set| states.lse_bytes(set)))?;
    let (lse, lse_rank_stride) = sets_at.view(&sets_at.lse_at, &lses);
    let (_, want_lse) = states.merged(1.0);
    for rank in 0..world {
        let at = Array::draw(draw, states.dims, states.dtype.bytes(), unit);
        let out_at = Array::draw(draw, states.dims, states.dtype.bytes(), unit);
        let lse_at = Array::draw(draw, [tokens, heads, 1], 4, 1);
        let (out, output) = (at.upload(backend, &states.outs[rank])?, out_at.nothing(backend)?);
        let output_lse = lse_at.nothing(backend)?;
        let args = CorrectAttnOutArgs {
            out: at.view(&out),
            lses: lse,
            lse_rank_stride,
            output: out_at.view(&output),
            output_lse: Some(lse_at.view(&output_lse)),
            lse_base: base,
            world: world as u32,
            rank: rank as u32,
            num_heads: heads as u32,
        };
        let own = values(states.dtype, &states.outs[rank]);
        let weighted = (0..tokens * heads * dim).map(|i| {
            let (row, lse) = (i / dim, states.lses[rank][i / dim]);
            let weight = if lse.is_finite() { ((lse - want_lse[row]) * states.unit()).exp() } else { 0.0 };
            if weight > 1e-46 { weight * own[i] } else { 0.0 }
        });
        let want = (weighted.collect(), want_lse.clone());
        let check = || -> Result<(), String> {
            let op = CorrectAttnOut { dtype: states.dtype, head_size: dim as u32 };
            backend.once(op, 0..tokens as u32, &args).map_err(text)?;
            let got = out_at.read("output", backend, &output)?;
            let lse = lse_at.read("output_lse", backend, &output_lse)?;
            states.judge((&got, Some(&lse)), &want)
        };
        check().map_err(|error| format!("rank {rank}, {}: {error}", states.line()))?;
    }
    under.count("correct_attn_out");
    Ok(())
}
