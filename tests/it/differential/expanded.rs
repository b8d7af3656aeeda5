//! The expanded form: projections by head, and prefills of prompts whose context is attended in parts and merged.

use std::cell::Cell;

use wgpu_mla::{
    Backend, Dtype, HeadProject, HeadProjectArgs, Mask, MergeState, MergeStateArgs, MlaPrefill,
    MlaPrefillArgs, OpOptions, PrefillOptions, PrefillSequence, View, WeightFormat, WeightOrder,
    WeightScales, WeightView,
};

use super::decode::FLOATS;
use super::draw::{Draw, bytes, values};
use super::judge::{LSE, judge, largest, of_attention, of_projection};
use super::place::Array;
use super::reference::{Sees, attend, dot, sees};
use super::{Under, text};

/// Every row times its head's matrix.
pub fn projections<B: Backend>(
    under: &Under<'_, B>,
    spec_draw: &mut Draw,
    draw: &mut Draw,
) -> Result<(), String> {
    let order = spec_draw.pick(&[WeightOrder::Kn, WeightOrder::Nk]);
    let [input, output] = [(); 2].map(|()| spec_draw.pick(&FLOATS));
    let formats =
        [Dtype::F32.into(), Dtype::F16.into(), Dtype::Bf16.into(), Dtype::E4m3.into(), WeightFormat::Q8_0];
    let weight: WeightFormat = spec_draw.pick(&formats);
    // What rows are made of, and where they may begin.
    let (whole, unit) = match weight {
        WeightFormat::Q8_0 => (32, 2),
        _ if weight.has_scales() => (16, 16),
        _ => (8, 8),
    };
    let [k, n] = [(); 2].map(|()| whole * spec_draw.within(1, 192 / whole));
    let heads = spec_draw.within(1, 6);
    let tokens = if draw.once_in(4) { draw.within(20, 70) } else { draw.within(1, 6) };
    let op = HeadProject {
        input,
        weight,
        output,
        num_heads: heads as u32,
        k: k as u32,
        n: n as u32,
        order,
        guard: false,
    };
    let backend = under.backend;
    let is_shared = draw.once_in(4);
    let x_heads = if is_shared { 1 } else { heads };
    let x = bytes(input, (0..tokens * x_heads * k).map(|_| draw.normal()).collect::<Vec<_>>());
    let w = (0..heads * k * n).map(|_| draw.normal() / 8.0).collect::<Vec<_>>();
    let (w, w_values) = match weight {
        WeightFormat::Elements(dtype) => {
            let w = bytes(dtype, w);
            let values = values(dtype, &w);
            (w, values)
        }
        WeightFormat::Q8_0 => blocks(draw, heads * k * n),
    };
    let scales: Vec<f64> = (0..heads).map(|_| draw.pick(&[1.0, -0.25, 0.7f32]).into()).collect();
    let scales_at = Array::dense(draw, [heads, 1, 1], 4, 1);
    let scales_buffer = scales_at.upload(backend, &bytes(Dtype::F32, scales.clone()))?;
    let scales_view = scales_at.strided(&scales_buffer);
    let of_head = |head: usize| if weight.has_scales() { scales[head] } else { 1.0 };
    let (matrix_rows, columns) = if order == WeightOrder::Kn { (k, n) } else { (n, k) };
    let scale = draw.pick(&[1.0f32, 1.0, 0.25, 0.7]);
    // Rows of a matrix are its tokens.
    let (units, unit_bytes) = match weight {
        WeightFormat::Elements(dtype) => (columns, dtype.bytes()),
        WeightFormat::Q8_0 => (columns / 32 * 34, 1),
    };
    let w_at = Array::dense(draw, [heads * matrix_rows, 1, units], unit_bytes, unit);
    let w_buffer = w_at.upload(backend, &w)?;
    let w_view = w_at.strided(&w_buffer);
    let x_at = Array::draw(draw, [tokens, x_heads, k], input.bytes(), 8);
    let x_buffer = x_at.upload(backend, &x)?;
    let x_view =
        if is_shared { View { head_stride: 0, ..x_at.view(&x_buffer) } } else { x_at.view(&x_buffer) };
    let y_at = Array::draw(draw, [tokens, heads, n], output.bytes(), 8);
    let (x, w) = (values(input, &x), w_values);
    let mut want = Vec::new();
    for row in 0..tokens * heads {
        let (token, head) = (row / heads, row % heads);
        let x = &x[(token * x_heads + head % x_heads) * k..][..k];
        let matrix = &w[head * k * n..][..k * n];
        for j in 0..n {
            let sum = match order {
                WeightOrder::Nk => dot(x, &matrix[j * k..][..k]),
                WeightOrder::Kn => x.iter().enumerate().map(|(i, x)| x * matrix[i * n + j]).sum(),
            };
            want.push(sum * of_head(head) * f64::from(scale));
        }
    }
    for variant in under.variants(&op, draw) {
        let check = || -> Result<(), String> {
            let y = y_at.nothing(backend)?;
            let weight = WeightView {
                buffer: &w_buffer,
                offset: w_view.offset,
                head_stride: w_view.token_stride * matrix_rows as u64,
                row_stride: w_view.token_stride,
                scales: weight.has_scales().then_some(WeightScales {
                    buffer: &scales_buffer,
                    offset: scales_view.offset,
                    head_stride: scales_view.token_stride,
                }),
            };
            let args = HeadProjectArgs {
                x: x_view,
                weight,
                y: y_at.view(&y),
                scale,
                out_scale: 1.0,
                saturates: false,
                guard: None,
            };
            let options = OpOptions { variant: Some(variant.to_owned()) };
            backend.once_with(op, &options, 0..tokens as u32, &args).map_err(text)?;
            let got = values(output, &y_at.read("y", backend, &y)?);
            judge("y", [tokens, heads, n], &got, &want, &of_projection(output))
        };
        check().map_err(|error| {
            format!("{variant}: {op:?} {tokens} tokens, shared {is_shared}, scale {scale}: {error}")
        })?;
        under.count(&format!("head_project {variant}"));
    }
    Ok(())
}

/// Blocks of `Q8_0`, any codes and scales, and their values.
fn blocks(draw: &mut Draw, elements: usize) -> (Vec<u8>, Vec<f64>) {
    let (mut all, mut numbers) = (Vec::new(), Vec::new());
    for _ in 0..elements / 32 {
        let scale = bytes(Dtype::F16, [draw.normal() / 512.0]);
        let codes: Vec<u8> = (0..32).map(|_| draw.below(256) as u8).collect();
        let value = values(Dtype::F16, &scale)[0];
        numbers.extend(codes.iter().map(|&code| value * f64::from(code as i8)));
        all.extend(scale.into_iter().chain(codes));
    }
    (all, numbers)
}

/// Prompts and their context, in parts.
struct Prompt {
    q_len: usize,
    /// Keys, the context's first.
    keys: usize,
    kv_begin: usize,
    sees: Sees,
}

/// Each prompt's keys in two parts, attended into two outputs and merged; or all at once.
pub fn prefills<B: Backend>(
    under: &Under<'_, B>,
    spec_draw: &mut Draw,
    draw: &mut Draw,
) -> Result<(), String> {
    let (heads, dtype) = (spec_draw.within(1, 5), spec_draw.pick(&FLOATS));
    let out = if spec_draw.once_in(2) { dtype } else { spec_draw.pick(&FLOATS) };
    let nope = 8 * spec_draw.within(1, 24);
    let (rope, dim) = (8 * spec_draw.below(9), 8 * spec_draw.within(1, 24));
    let spec = MlaPrefill {
        num_heads: heads as u32,
        qk_nope_head_dim: nope as u32,
        qk_rope_head_dim: rope as u32,
        v_head_dim: dim as u32,
        dtype,
        out,
    };
    let (mut prompts, mut keys, mut tokens) = (Vec::new(), 0, 0);
    let mut room = under.work / heads;
    for _ in 0..draw.within(1, 4) {
        let q_len = draw.pick(&[0, 1, 2, 5, 17, 33]).min(room / 2 + 1);
        let len = draw.pick(&[0, 1, 7, 63, 64, 65, 100, 130]).min(room / q_len.max(1));
        room = room.saturating_sub(q_len * len);
        let sees = match draw.below(4) {
            0 => Sees::All,
            1 => Sees::From(draw.within(0, 40) as i64 - 8),
            _ => Sees::BottomRight,
        };
        prompts.push(Prompt { q_len, keys: len, kv_begin: keys, sees });
        tokens += q_len;
        keys += len + draw.below(3);
    }
    let softmax_scale = draw.pick(&[0.114_721f32, 0.072_169, 0.3]);
    let v_scale = draw.pick(&[1.0f32, 1.0, 8.0]);
    let amplitude = draw.pick(&[0.3, 1.0]);
    let encoded = |draw: &mut Draw, count: usize, by: f64| {
        bytes(dtype, (0..count).map(|_| by * draw.normal()).collect::<Vec<_>>())
    };
    let [q_nope, q_pe] = [nope, rope].map(|d| encoded(draw, tokens * heads * d, amplitude));
    let [k_nope, v] = [nope, dim].map(|d| encoded(draw, keys * heads * d, amplitude));
    let is_shared = !draw.once_in(4);
    let k_heads = if is_shared { 1 } else { heads };
    let k_pe = encoded(draw, keys * k_heads * rope, amplitude);

    // The reference, a row at a time.
    let f = |encoded: &[u8]| values(dtype, encoded);
    let row = |array: &[f64], at: usize, d: usize| array[at * d..(at + 1) * d].to_vec();
    let (qn, qp, kn, kp, vs) = (f(&q_nope), f(&q_pe), f(&k_nope), f(&k_pe), f(&v));
    let (mut want, mut want_lse, mut token) = (Vec::new(), Vec::new(), 0);
    for prompt in &prompts {
        for i in 0..prompt.q_len {
            let seen =
                sees(&prompt.sees, i, prompt.q_len, prompt.keys).saturating_sub(usize::from(under.drops_key));
            for head in 0..heads {
                let at = token * heads + head;
                let q = [row(&qn, at, nope), row(&qp, at, rope)].concat();
                let range = prompt.kv_begin..prompt.kv_begin + seen;
                let key = |s: usize| {
                    [row(&kn, s * heads + head, nope), row(&kp, s * k_heads + head % k_heads, rope)].concat()
                };
                let all: Vec<Vec<f64>> = range.clone().map(key).collect();
                let keys: Vec<&[f64]> = all.iter().map(Vec::as_slice).collect();
                let values: Vec<&[f64]> = range.map(|s| &vs[(s * heads + head) * dim..][..dim]).collect();
                let (out, lse) = attend(&q, &keys, &values, dim, softmax_scale.into());
                want.extend(out.into_iter().map(|x| x * f64::from(v_scale)));
                want_lse.push(lse);
            }
            token += 1;
        }
    }

    // A context is attended apart where nothing but a causal diagonal hides keys: in f32, so that the merge adds no error.
    let in_parts = out == Dtype::F32 && draw.once_in(2);
    let mut parts: [Vec<PrefillSequence>; 2] = Default::default();
    let mut first = 0;
    for prompt in &prompts {
        let cut = if in_parts { draw.within(0, prompt.keys) } else { prompt.keys };
        let diagonal = match prompt.sees {
            Sees::BottomRight => Some(prompt.keys as i64 - prompt.q_len as i64 + 1),
            Sees::From(first) => Some(first),
            Sees::All | Sees::Bounds(_) => None,
        };
        for (part, (begin, end)) in parts.iter_mut().zip([(0, cut), (cut, prompt.keys)]) {
            let mask = match (&prompt.sees, diagonal) {
                (Sees::BottomRight, _) if !in_parts => Mask::Causal,
                (_, Some(diagonal)) => Mask::CausalFrom(diagonal - begin as i64),
                _ => Mask::Full,
            };
            part.push(PrefillSequence {
                q_begin: first,
                q_len: prompt.q_len as u32,
                kv_begin: (prompt.kv_begin + begin) as u32,
                kv_len: (end - begin) as u32,
                mask,
                out_begin: first,
            });
        }
        first += prompt.q_len as u32;
    }
    let u = largest(vs.iter().map(|x| x * f64::from(v_scale)));
    let backend = under.backend;
    let at = [
        (tokens, heads, nope),
        (tokens, heads, rope),
        (keys, heads, nope),
        (keys, k_heads, rope),
        (keys, heads, dim),
    ]
    .map(|(rows, heads, d)| Array::draw(draw, [rows, heads, d], dtype.bytes(), 8));
    let mut held = Vec::new();
    for (at, array) in at.iter().zip([&q_nope, &q_pe, &k_nope, &k_pe, &v]) {
        held.push(at.upload(backend, array)?);
    }
    let k_pe_view = at[3].view(&held[3]);
    let k_pe_view = if is_shared { View { head_stride: 0, ..k_pe_view } } else { k_pe_view };
    let out_at = Array::draw(draw, [tokens, heads, dim], out.bytes(), 8);
    let lse_at = Array::draw(draw, [tokens, heads, 1], 4, 1);
    for candidate in under.variants(&spec, draw) {
        let rounds_weights = Cell::new(false);
        let run = |sequences: &[PrefillSequence]| -> Result<(B::Buffer, B::Buffer), String> {
            let (rows, lse) = (out_at.nothing(backend)?, lse_at.nothing(backend)?);
            let args = MlaPrefillArgs {
                q_nope: at[0].view(&held[0]),
                q_pe: at[1].view(&held[1]),
                k_nope: at[2].view(&held[2]),
                k_pe: k_pe_view,
                v: at[4].view(&held[4]),
                out: out_at.view(&rows),
                lse: lse_at.view(&lse),
                softmax_scale,
                v_scale,
            };
            let options = PrefillOptions { variant: Some(candidate.to_owned()), query_tokens: 0 };
            let op = backend.compile_with(spec, &options).map_err(text)?;
            rounds_weights.set(rounds_weights.get() || op.rounds_weights());
            let mut step = op.step(0).map_err(text)?;
            op.prepare(&mut step, sequences).map_err(text)?;
            op.run(&step, &op.bind(&args, step.used()).map_err(text)?).map_err(text)?;
            Ok((rows, lse))
        };
        let check = || -> Result<(), String> {
            let (mut rows, mut lse) = run(&parts[0])?;
            if in_parts {
                let (more, more_lse) = run(&parts[1])?;
                let (merged, merged_lse) = (out_at.nothing(backend)?, lse_at.nothing(backend)?);
                let args = MergeStateArgs {
                    prefix_output: out_at.view(&rows),
                    prefix_lse: lse_at.view(&lse),
                    suffix_output: out_at.view(&more),
                    suffix_lse: lse_at.view(&more_lse),
                    output: out_at.view(&merged),
                    output_lse: Some(lse_at.view(&merged_lse)),
                    num_tokens: tokens as u32,
                    num_heads: heads as u32,
                    output_scale: 1.0,
                };
                backend.once(MergeState { dtype: out, head_size: dim as u32 }, (), &args).map_err(text)?;
                (rows, lse) = (merged, merged_lse);
            }
            let got_lse = values(Dtype::F32, &lse_at.read("lse", backend, &lse)?);
            judge("lse", [tokens, heads, 1], &got_lse, &want_lse, &LSE)?;
            let got = values(out, &out_at.read("out", backend, &rows)?);
            let limits = of_attention([dtype, dtype, out], rounds_weights.get(), u);
            judge("out", [tokens, heads, dim], &got, &want, &limits)
        };
        check().map_err(|error| {
            format!("{candidate}: {spec:?} scales {softmax_scale} {v_scale} in {parts:?} shared {is_shared}: {error}")
        })?;
        under.count(&format!("mla_prefill {candidate}"));
    }
    Ok(())
}
