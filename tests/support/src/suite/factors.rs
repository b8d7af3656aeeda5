//! Factors of what an op writes: with a power of two the output is that of 1, multiplied, bit for bit.

use wgpu_mla::{
    Backend, Dtype, Error, HeadDims, HeadProject, HeadProjectArgs, KvAppend, KvAppendArgs, KvSpec, KvView,
    LseBase, MergeState, MergeStateArgs, MergeStates, MergeStatesArgs, MlaDecode, MlaPrefill, MlaPrefillArgs,
    MlaShape, PrefillSequence, Result, Rope, RopeAppend, RopeAppendArgs, RopeAppendBatch, RopeArgs,
    RopeLayout, View, WeightView,
};

use super::Session;
use crate::paint::Rng;

const FACTOR: f32 = 0.25;
const WIDE: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

/// A backend's buffers of random values.
struct Arrays<'a, B: Backend> {
    backend: &'a B,
    dtype: Dtype,
    rng: Rng,
}

impl<B: Backend> Arrays<'_, B> {
    fn random(&mut self, count: usize) -> Result<B::Buffer> {
        let values: Vec<f32> = (0..count).map(|_| self.rng.randn()).collect();
        self.of(self.dtype, &values)
    }

    fn of(&self, dtype: Dtype, values: &[f32]) -> Result<B::Buffer> {
        let mut bytes = dtype.encode_all(values);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let buffer = self.backend.buffer(bytes.len() as u64)?;
        self.backend.upload(&buffer, 0, &bytes).map(|()| buffer)
    }

    fn zeros(&self, count: usize) -> Result<B::Buffer> {
        self.backend.buffer((count * self.dtype.bytes()).next_multiple_of(4) as u64)
    }

    fn read(&self, buffer: &B::Buffer, count: usize) -> Result<Vec<f32>> {
        let bytes = (count * self.dtype.bytes()).next_multiple_of(4) as u64;
        Ok(self.dtype.decode_all(&self.backend.download(buffer, bytes)?)[..count].to_vec())
    }
}

/// `run` gives the output with a factor.
fn check(run: impl Fn(f32) -> Result<Vec<f32>>) -> Result<(), String> {
    let [whole, part] = [run(1.0), run(FACTOR)];
    let (whole, part) = (whole.map_err(|error| error.to_string())?, part.map_err(|error| error.to_string())?);
    // Below that f16 rounds the product once more.
    let same = |(whole, part): (&f32, &f32)| whole.abs() < 1e-2 || *part == whole * FACTOR;
    if !whole.iter().zip(&part).all(same) || whole.iter().all(|&x| x == 0.0) {
        return Err(format!("{part:?} is not {FACTOR} of {whole:?}"));
    }
    for wrong in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        match run(wrong) {
            Err(Error::Scale { .. }) => {}
            other => return Err(format!("a factor of {wrong} gives {other:?}")),
        }
    }
    Ok(())
}

pub fn factors<B: Backend>(session: &Session<'_, B>) {
    for dtype in WIDE {
        let arrays = || Arrays { backend: session.backend, dtype, rng: Rng(3) };
        for (name, checked) in [
            ("head_project", check(|scale| projected(arrays(), scale))),
            ("mla_prefill", check(|scale| prefilled(arrays(), scale))),
            ("merge_state", check(|scale| merged_pair(arrays(), 16, scale))),
            ("merge_state, odd", check(|scale| merged_pair(arrays(), 7, scale))),
            ("merge_states", check(|scale| merged_sets(arrays(), 16, scale))),
            ("merge_states, odd", check(|scale| merged_sets(arrays(), 7, scale))),
            ("rope", check(|scale| rotated(arrays(), scale))),
            ("rope_append, queries", check(|scale| appended(arrays(), scale).map(|(queries, _)| queries))),
        ] {
            session.note(&format!("{name} in {dtype}"), checked);
        }
        let keys = |scale| appended(arrays(), scale).map(|(_, keys)| keys);
        let same = match (keys(1.0), keys(FACTOR)) {
            (Ok(a), Ok(b)) if a == b => Ok(()),
            other => Err(format!("{other:?}")),
        };
        session.note(&format!("rope_append, keys in {dtype}"), same);
    }
    session.note("saturation", saturates(session.backend));
    session.finish("factors");
}

fn projected<B: Backend>(mut arrays: Arrays<'_, B>, scale: f32) -> Result<Vec<f32>> {
    let (dims, dtype) = (dims(), arrays.dtype);
    let (x, weight) = (arrays.random(3 * 2 * 64)?, arrays.random(dims.elements() as usize)?);
    let y = arrays.zeros(3 * 2 * 32)?;
    let args = HeadProjectArgs {
        x: View::dense(&x, 2, 64),
        weight: WeightView::w_uv(&dims, &weight),
        y: View::dense(&y, 2, 32),
        scale,
        out_scale: 1.0,
        saturates: false,
        guard: None,
    };
    arrays.backend.once(HeadProject::v_up(&dims, dtype, dtype, dtype), 0..3, &args)?;
    arrays.read(&y, 3 * 2 * 32)
}

fn dims() -> HeadDims {
    HeadDims { num_heads: 2, kv_lora_rank: 64, qk_nope_head_dim: 32, v_head_dim: 32 }
}

/// What f16 does not hold saturates or is infinite, as asked; NaN and infinity of the input stay.
fn saturates<B: Backend>(backend: &B) -> Result<(), String> {
    let run = |saturates| {
        let arrays = Arrays { backend, dtype: Dtype::F16, rng: Rng(3) };
        let dims = dims();
        let mut values = [0.0f32; 4 * 2 * 64];
        for (token, x) in [40.0, -40.0, f32::INFINITY, f32::NAN].into_iter().enumerate() {
            values[token * 128] = x;
            values[token * 128 + 64] = x;
        }
        let x = arrays.of(Dtype::F16, &values)?;
        let weight = arrays.of(Dtype::F16, &vec![3000.0; dims.elements() as usize])?;
        let y = arrays.zeros(4 * 2 * 32)?;
        let args = HeadProjectArgs {
            x: View::dense(&x, 2, 64),
            weight: WeightView::w_uv(&dims, &weight),
            y: View::dense(&y, 2, 32),
            scale: 1.0,
            out_scale: 1.0,
            saturates,
            guard: None,
        };
        let op = HeadProject::v_up(&dims, Dtype::F16, Dtype::F16, Dtype::F16);
        backend.once(op, 0..4, &args)?;
        let y = arrays.read(&y, 4 * 2 * 32)?;
        Ok([0, 1, 2, 3].map(|token| y[token * 64]))
    };
    let inf = f32::INFINITY;
    for (asked, want) in [(true, [65_504.0, -65_504.0]), (false, [inf, -inf])] {
        let got: [f32; 4] = run(asked).map_err(|error: Error| error.to_string())?;
        // 0 * inf is NaN in the row of an infinity.
        let rest = !got[2].is_finite() && got[3].is_nan();
        if got[..2] != want || !rest {
            return Err(format!("saturates {asked}: {got:?}"));
        }
    }
    Ok(())
}

fn prefilled<B: Backend>(mut arrays: Arrays<'_, B>, v_scale: f32) -> Result<Vec<f32>> {
    let dtype = arrays.dtype;
    let [q, k, v] = [(); 3].map(|()| arrays.random(5 * 2 * 16));
    let (q, k, v) = (q?, k?, v?);
    let (out, lse) = (arrays.zeros(5 * 2 * 16)?, arrays.backend.buffer(5 * 2 * 4)?);
    let spec = MlaPrefill {
        num_heads: 2,
        qk_nope_head_dim: 16,
        qk_rope_head_dim: 0,
        v_head_dim: 16,
        dtype,
        out: dtype,
    };
    let view = |buffer| View::dense(buffer, 2, 16);
    let args = MlaPrefillArgs {
        q_nope: view(&q),
        q_pe: view(&q),
        k_nope: view(&k),
        k_pe: view(&k),
        v: view(&v),
        out: view(&out),
        lse: View::dense(&lse, 2, 1),
        softmax_scale: 0.25,
        v_scale,
    };
    arrays.backend.once(spec, &[PrefillSequence::causal(0, 5, 0, 5)], &args)?;
    arrays.read(&out, 5 * 2 * 16)
}

/// LSEs of two sets: of three tokens both are there, of one each is alone, of the last none is.
const LSES: [[f32; 6]; 2] = [
    [0.5, -1.0, 2.0, f32::NEG_INFINITY, 1.0, f32::NAN],
    [0.25, 3.0, 2.0, 1.0, f32::INFINITY, f32::NEG_INFINITY],
];

fn merged_pair<B: Backend>(mut arrays: Arrays<'_, B>, head_size: usize, scale: f32) -> Result<Vec<f32>> {
    let (dtype, count) = (arrays.dtype, 6 * head_size);
    let (prefix, suffix) = (arrays.random(count)?, arrays.random(count)?);
    let [prefix_lse, suffix_lse] = LSES.map(|lse| arrays.of(Dtype::F32, &lse));
    let (prefix_lse, suffix_lse, output) = (prefix_lse?, suffix_lse?, arrays.zeros(count)?);
    let view = |buffer| View::dense(buffer, 1, head_size as u32);
    let args = MergeStateArgs {
        prefix_output: view(&prefix),
        prefix_lse: View::dense(&prefix_lse, 1, 1),
        suffix_output: view(&suffix),
        suffix_lse: View::dense(&suffix_lse, 1, 1),
        output: view(&output),
        output_lse: None,
        num_tokens: 6,
        num_heads: 1,
        output_scale: scale,
    };
    arrays.backend.once(MergeState { dtype, head_size: head_size as u32 }, (), &args)?;
    arrays.read(&output, count)
}

fn merged_sets<B: Backend>(mut arrays: Arrays<'_, B>, head_size: usize, scale: f32) -> Result<Vec<f32>> {
    let (dtype, count) = (arrays.dtype, 6 * head_size);
    let states = arrays.random(2 * count)?;
    let (lse, output) = (arrays.of(Dtype::F32, LSES.as_flattened())?, arrays.zeros(count)?);
    let args = MergeStatesArgs {
        states: View::dense(&states, 1, head_size as u32),
        set_stride: count as u64,
        lse: View::dense(&lse, 1, 1),
        lse_set_stride: 6,
        output: View::dense(&output, 1, head_size as u32),
        output_lse: None,
        lse_base: LseBase::E,
        num_heads: 1,
        output_scale: scale,
    };
    arrays.backend.once(MergeStates { dtype, head_size: head_size as u32 }, (0..6, 2), &args)?;
    arrays.read(&output, count)
}

fn rotated<B: Backend>(mut arrays: Arrays<'_, B>, scale: f32) -> Result<Vec<f32>> {
    let (dtype, x, y) = (arrays.dtype, arrays.random(3 * 2 * 8)?, arrays.zeros(3 * 2 * 8)?);
    let (positions, cos_sin) = turns(&arrays, 8)?;
    let args = RopeArgs {
        x: View::dense(&x, 2, 8),
        y: View::dense(&y, 2, 8),
        positions: &positions,
        cos_sin: &cos_sin,
        max_position: 3,
        scale,
    };
    let spec = Rope { dtype, num_heads: 2, rope_dim: 8, layout: RopeLayout::Interleaved };
    arrays.backend.once(spec, 0..3, &args)?;
    arrays.read(&y, 3 * 2 * 8)
}

/// Rotated queries, and the cache.
fn appended<B: Backend>(mut arrays: Arrays<'_, B>, q_pe_scale: f32) -> Result<(Vec<f32>, Vec<f32>)> {
    let dtype = arrays.dtype;
    let shape = MlaShape { num_heads: 2, kv_lora_rank: 256, qk_rope_head_dim: 32 };
    let kv = KvSpec { layout: dtype.into(), page_size: 3, num_pages: 1 };
    let (q_pe, kv_c, k_pe) = (arrays.random(3 * 2 * 32)?, arrays.random(3 * 256)?, arrays.random(3 * 32)?);
    let (q_pe_out, cache) = (arrays.zeros(3 * 2 * 32)?, arrays.zeros(3 * 288)?);
    let (positions, cos_sin) = turns(&arrays, 32)?;
    let kv_view = KvView::dense(&cache, &MlaDecode { shape, kv, query: dtype, out: dtype });
    let args = RopeAppendArgs {
        q_pe: View::dense(&q_pe, 2, 32),
        q_pe_out: View::dense(&q_pe_out, 2, 32),
        layer: KvAppendArgs {
            kv_c: View::dense(&kv_c, 1, 256),
            k_pe: View::dense(&k_pe, 1, 32),
            kv: kv_view,
            k_scale: 1.0,
            guard: None,
        },
        positions: &positions,
        cos_sin: &cos_sin,
        max_position: 3,
        q_pe_scale,
        q_scale: 1.0,
    };
    let append = KvAppend { shape, kv, input: dtype, guard: false };
    let spec =
        RopeAppend { append, query: dtype, query_out: dtype, num_heads: 2, layout: RopeLayout::HalfSplit };
    arrays.backend.once(spec, RopeAppendBatch::slots(&[0, 1, 2]), &args)?;
    Ok((arrays.read(&q_pe_out, 3 * 2 * 32)?, arrays.read(&cache, 3 * 288)?))
}

/// Positions of three tokens, and their table.
fn turns<B: Backend>(arrays: &Arrays<'_, B>, rope_dim: u32) -> Result<(B::Buffer, B::Buffer)> {
    let positions = arrays.backend.buffer(3 * 4)?;
    arrays.backend.upload(&positions, 0, &[0i32, 1, 2].map(i32::to_le_bytes).concat())?;
    let table = wgpu_mla::RopeFrequencies::plain(rope_dim, 10_000.0)?.cos_sin(3)?;
    Ok((positions, arrays.of(Dtype::F32, &table)?))
}
