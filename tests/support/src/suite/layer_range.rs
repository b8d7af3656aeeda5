//! Layers of f16 whose products between the ops are past f16's range, though input and output are inside.

use wgpu_mla::{
    Backend, Dtype, Error, KvSpec, KvView, LayerBatch, LayerCapacity, LayerOptions, MlaLayer, MlaLayerArgs,
    MlaShape, PageTable, Result, RopeLayout, SplitPolicy, View,
};

use super::Session;
use super::layer_rig::{Amplitudes, PREFIX_ROWS, Rig, StepOutput, Submitted, spec};
use crate::close::close;

/// Keys and absorbed queries have a standard deviation of some 100,000, values of 30,000.
const LOUD: Amplitudes =
    Amplitudes { w_uk: 400.0, w_uv: 90.0, q: 50.0, kv_c: 20.0, softmax_scale: Some(5e-8) };

/// Past it an output may round to infinity, and is not compared.
const MOST: f64 = 60_000.0;

fn check(step: &StepOutput) -> Result<(), String> {
    let is_compared: Vec<bool> = step.want.iter().map(|want| want.abs() < MOST).collect();
    let only = |index: usize| is_compared[index];
    let got: Vec<f32> = step.got.iter().enumerate().filter(|&(i, _)| only(i)).map(|(_, &x)| x).collect();
    let want: Vec<f64> = step.want.iter().enumerate().filter(|&(i, _)| only(i)).map(|(_, &x)| x).collect();
    if step.got.iter().any(|x| x.is_nan()) {
        return Err(format!("{} outputs are NaN", step.got.iter().filter(|x| x.is_nan()).count()));
    }
    let mut tolerance = step.tolerance;
    // The largest value, where other layers have the largest latent.
    tolerance.abs *= 1e5;
    close("out", &got, &want, &tolerance).into_result().map(drop)
}

/// Prompts in one chunk and in several, decodes, forks and expanded prefixes.
pub fn loud_f16_layers<B: Backend>(session: &Session<'_, B>) {
    let note = |name: String, steps: Result<Vec<(String, StepOutput)>>| match steps {
        Ok(steps) => {
            steps.iter().for_each(|(step, output)| session.note(&format!("{name}, {step}"), check(output)))
        }
        Err(error) => session.note(&name, Err(error.to_string())),
    };
    for (cache, rows) in [(Dtype::F16, 64), (Dtype::F16, 8), (Dtype::E4m3, 24)] {
        let spec = spec(Dtype::F16, cache, RopeLayout::Interleaved, rows);
        let rig = |prefix_rows| {
            let pool = (spec, spec.kv.num_pages);
            Rig::with(session.backend, pool, prefix_rows, Submitted, 13, LOUD)
        };
        let name = format!("{cache}, a workspace of {rows} rows");
        let life = rig(0).and_then(|mut rig| rig.life(SplitPolicy::Auto));
        note(name, life.map(numbered));
        if rows == 64 {
            let cascade = rig(PREFIX_ROWS).and_then(|mut rig| rig.cascade());
            let named = cascade.map(|steps| steps.into_iter().map(|(name, step)| (name.to_owned(), step)));
            note(format!("{cache}, expanded prefixes"), named.map(Iterator::collect));
        }
    }
    session.finish("f16 layers of large products");
}

fn numbered(steps: Vec<StepOutput>) -> Vec<(String, StepOutput)> {
    steps.into_iter().enumerate().map(|(index, step)| (format!("step {index}"), step)).collect()
}

/// Two equal tokens, so that the output is their value, decoded and prefilled: `q . W_UK` and `kv_c . W_UK` are 66,048.
pub fn products_past_f16<B: Backend>(session: &Session<'_, B>) {
    for (latent, rope) in session.one_in(2, [(512, 64), (256, 32)]) {
        for cache in [Dtype::F16, Dtype::E4m3] {
            // 512 latents.
            let halved = 512.0 / latent as f32;
            for (q, w_uk, kv_c, w_uv, want) in [
                (64.5, 8.0, 0.0078125, 0.5 * halved, 2.0),
                (0.001, 32.25 * halved, 4.0, 0.0078125 * halved, 16.0),
            ] {
                for decode_threshold in [0, 1] {
                    let spec = MlaLayer {
                        shape: MlaShape { num_heads: 1, kv_lora_rank: latent, qk_rope_head_dim: rope },
                        qk_nope_head_dim: 128,
                        v_head_dim: 128,
                        kv: KvSpec { layout: cache.into(), page_size: 2, num_pages: 1 },
                        dtype: Dtype::F16,
                        query: Dtype::F16,
                        weight: Dtype::F16,
                        out: Dtype::F16,
                        rope: RopeLayout::Interleaved,
                        decode_threshold,
                        workspace_bytes: 1 << 20,
                    };
                    let name = format!("{latent}/{rope} over {cache}, threshold {decode_threshold}, {want}");
                    let out = two_tokens(session.backend, &spec, [q, w_uk, kv_c, w_uv]);
                    session.note(
                        &name,
                        match out {
                            Ok(out) if out.iter().all(|&x| (x - want).abs() <= want / 64.0) => Ok(()),
                            Ok(out) => Err(format!("{want} is right, not {:?}", &out[..4])),
                            Err(error) => Err(error.to_string()),
                        },
                    );
                }
            }
        }
    }
    session.finish("products past f16");
}

/// The outputs of one query token that sees two equal tokens.
fn two_tokens<B: Backend>(backend: &B, spec: &MlaLayer, [q, w_uk, kv_c, w_uv]: [f32; 4]) -> Result<Vec<f32>> {
    let MlaShape { kv_lora_rank: latent, qk_rope_head_dim: rope, .. } = spec.shape;
    let (nope, value) = (spec.qk_nope_head_dim, spec.v_head_dim);
    let filled = |parts: &[(u32, f32)]| {
        let values: Vec<f32> =
            parts.iter().flat_map(|&(count, x)| std::iter::repeat_n(x, count as usize)).collect();
        let buffer = backend.buffer(values.len() as u64 * 2)?;
        backend.upload(&buffer, 0, &Dtype::F16.encode_all(&values)).map(|()| buffer)
    };
    let (queries, keys) =
        (filled(&[(2 * nope, q), (2 * rope, 0.0)])?, filled(&[(2 * latent, kv_c), (2 * rope, 0.0)])?);
    let kv_b_proj = filled(&[(nope * latent, w_uk), (value * latent, w_uv)])?;
    let cos_sin = backend.buffer(u64::from(rope) * 2 * 4)?;
    backend.upload(&cos_sin, 0, &Dtype::F32.encode_all(&vec![1.0; rope as usize * 2]))?;
    let (cache, out) = (backend.buffer(spec.mla().cache_bytes())?, backend.buffer(u64::from(value) * 2 * 2)?);
    let args = MlaLayerArgs {
        q_nope: View::dense(&queries, 1, nope),
        q_pe: View { offset: u64::from(2 * nope), ..View::dense(&queries, 1, rope) },
        kv_c: View::dense(&keys, 1, latent),
        k_pe: View { offset: u64::from(2 * latent), ..View::dense(&keys, 1, rope) },
        kv: KvView::dense(&cache, &spec.mla()),
        kv_b_proj: &kv_b_proj,
        kv_b_scales: None,
        cos_sin: &cos_sin,
        max_position: 2,
        out: View::dense(&out, 1, value),
        softmax_scale: 1e-6,
        q_scale: 1.0,
        k_scale: if spec.kv.dtype() == Dtype::E4m3 { 1.0 / 32.0 } else { 1.0 },
        out_scale: 1.0,
        expanded: None,
        selection: wgpu_mla::Selection::All,
        guard: None,
    };
    let capacity = LayerCapacity { tokens: 2, decode_tokens: 2, ..LayerCapacity::default() };
    let layer = backend.compile_with(*spec, &LayerOptions { capacity, ..LayerOptions::default() })?;
    let mut step = layer.step(Default::default())?;
    let binding = layer.bind(&args, LayerCapacity { positions: 2, ..capacity })?;
    // The first token's step, then the second's; each writes the front of `out`.
    for (len, slot) in [(1, 0), (2, 1)] {
        let batch = LayerBatch {
            seq_lens: &[len],
            query_start_loc: &[0, 1],
            slot_mapping: &[slot],
            pages: PageTable::Dense { block_table: &[0], max_pages: 1 },
            shared_prefixes: &[],
            expanded: &[],
        };
        layer.prepare(&mut step, (&batch, SplitPolicy::Auto))?;
        layer.run(&step, &binding)?;
    }
    Ok(Dtype::F16.decode_all(&backend.download(&out, u64::from(value) * 2)?))
}

/// An f16 layer refuses a scale with which a code is past f16's range.
pub fn refuses_scales_past_f16<B: Backend>(session: &Session<'_, B>) {
    let spec = spec(Dtype::F16, Dtype::E4m3, RopeLayout::Interleaved, 64);
    let loud = Amplitudes { kv_c: 256.0 * 38.4, ..Amplitudes::USUAL };
    let rig = Rig::with(session.backend, (spec, spec.kv.num_pages), 0, Submitted, 5, loud);
    let life = rig.and_then(|mut rig| rig.life(SplitPolicy::Auto)).map(drop);
    session.note(
        "k_scale 256",
        match life {
            Err(Error::LayoutMismatch { detail }) if detail.contains("146") => Ok(()),
            other => Err(format!("{other:?}")),
        },
    );
    session.finish("scales past f16");
}
