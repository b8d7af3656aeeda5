//! One prepared `kv_b_proj` in each of its three projections.

use crate::reference::{Projection, head_project};
use wgpu_mla::{
    Backend, Dtype, E4m3Weights, Error, HeadDims, HeadProject, HeadProjectArgs, KvBProj, Result,
    ScaleSharing, WeightScales, WeightView,
};

use super::Session;
use super::memory::{Strides, upload};
use super::project::tolerance;
use super::run::{Layout, Output};
use crate::close::close;
use crate::paint::{POISON, Rng};

/// absorb, k_up and v_up read the three parts of one prepared `kv_b_proj`, from FP8 with block scales too.
pub fn kv_b_proj<B: Backend>(session: &Session<'_, B>) {
    for from in [Dtype::Bf16, Dtype::E4m3] {
        session.note(&format!("kv_b_proj of {from}"), check_kv_b_proj(session.backend, from, Dtype::Bf16));
    }
    session.note("kv_b_proj as e4m3", check_kv_b_proj(session.backend, Dtype::Bf16, Dtype::E4m3));
    session.finish("kv_b_proj");
}

fn check_kv_b_proj<B: Backend>(backend: &B, from: Dtype, to: Dtype) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let dims = HeadDims { num_heads: 3, kv_lora_rank: 144, qk_nope_head_dim: 40, v_head_dim: 56 };
    let (heads, latent, nope, value) = (3, 144, 40, 56);
    let mut rng = Rng(7);
    let weights: Vec<f32> = (0..dims.elements()).map(|_| rng.randn()).collect();
    let bytes = from.encode_all(&weights);
    // 288 rows and 144 columns: 3 x 2 blocks, and heads of 96 rows straddle them.
    let scales: Vec<f32> = (1..7).map(|i| i as f32 * 0.03).collect();
    let scale_bytes = Dtype::F32.encode_all(&scales);
    let proj = match from {
        Dtype::E4m3 => KvBProj::with_block_scales(dims, &bytes, &scale_bytes),
        _ => KvBProj::new(dims, from, &bytes),
    };
    let proj = proj.map_err(text)?;
    let (prepared, own_scales) = match to {
        Dtype::E4m3 => {
            let E4m3Weights { codes, scales, .. } = proj.prepare_e4m3(ScaleSharing::PerHead).map_err(text)?;
            (codes, scales)
        }
        _ => (proj.prepare(to).map_err(text)?, vec![1.0; 2 * heads]),
    };
    let scale_buffer = upload(backend, &Dtype::F32.encode_all(&own_scales)).map_err(text)?;
    let scale = |at: usize| match from {
        Dtype::E4m3 => scales[at / latent / 128 * 2 + at % latent / 128],
        _ => 1.0,
    };
    let scaled: Vec<f32> = from.decode_all(&bytes).iter().enumerate().map(|(at, w)| w * scale(at)).collect();
    let weights = match to {
        Dtype::E4m3 => to.decode_all(&prepared),
        _ => to.decode_all(&to.encode_all(&scaled)),
    };
    let buffer = upload(backend, &prepared).map_err(text)?;

    let part = |first: usize, rows: usize| -> Vec<f32> {
        let head = |head: usize| &weights[(head * (nope + value) + first) * latent..][..rows * latent];
        (0..heads).flat_map(head).copied().collect()
    };
    let [input, weight, output] = [Dtype::Bf16, to, Dtype::F32];
    let (of_w_uk, of_w_uv) = (WeightScales::w_uk(&scale_buffer), WeightScales::w_uv(&dims, &scale_buffer));
    for (name, spec, view, want_weight, scales) in [
        (
            "absorb",
            HeadProject::absorb(&dims, input, weight, output),
            WeightView::w_uk(&dims, &buffer),
            part(0, nope),
            of_w_uk,
        ),
        (
            "k_up",
            HeadProject::k_up(&dims, input, weight, output),
            WeightView::w_uk(&dims, &buffer),
            part(0, nope),
            of_w_uk,
        ),
        (
            "v_up",
            HeadProject::v_up(&dims, input, weight, output),
            WeightView::w_uv(&dims, &buffer),
            part(nope, value),
            of_w_uv,
        ),
    ] {
        let (k, n, tokens) = (spec.k as usize, spec.n as usize, 4);
        let x = input.encode_all(&(0..tokens * heads * k).map(|_| rng.randn()).collect::<Vec<f32>>());
        let x_buffer = upload(backend, &x).map_err(text)?;
        let y = Output::new([tokens, heads, n], output, Layout::Dense, 8);
        let y_buffer = upload(backend, &vec![POISON; y.len]).map_err(text)?;
        let args = HeadProjectArgs {
            x: Strides::dense(heads, k).view(&x_buffer),
            weight: if to.is_fp8() { view.with_scales(scales) } else { view },
            y: y.strides.view(&y_buffer),
            scale: 1.0,
            out_scale: 1.0,
            saturates: false,
            guard: None,
        };
        backend.once(spec, 0..tokens as u32, &args).map_err(text)?;
        let got = output.decode_all(&y.read(backend, &y_buffer)?);
        let x = input.decode_all(&x);
        let scales = &own_scales[scales.offset as usize..][..heads];
        let args =
            Projection { num_heads: heads, k, n, order: spec.order, x: &x, weight: &want_weight, scales };
        close(name, &got, &head_project(&args), &tolerance(output, n)).into_result()?;
    }
    Ok(())
}
