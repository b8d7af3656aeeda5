//! Softmax weights of one token, on the host: kernels do not give them away.

use crate::Config;
use crate::look::{Cached, Layer};

/// `[H, tokens]` of one layer, in absorbed form as a decode computes them.
///
/// `kv_b` is `[H, P + V, L]`, `q_pe` the rotated part of the queries, `[H, R]`.
pub fn softmax_weights(
    config: &Config,
    cached: &Cached,
    layer: usize,
    token: &Layer,
    q_pe: &[f64],
    kv_b: &[f32],
) -> Vec<f32> {
    let (heads, latent) = (config.shape.num_heads as usize, config.shape.kv_lora_rank as usize);
    let (rope, nope, value) =
        (config.shape.qk_rope_head_dim as usize, config.qk_nope_head_dim, config.v_head_dim);
    // A layer without a scale was refused before it attended.
    let scale = config.softmax_scale().unwrap_or(f32::NAN);
    let mut all = Vec::with_capacity(heads * cached.tokens());
    for head in 0..heads {
        let mut query = vec![0.0f32; latent];
        let matrix = &kv_b[head * (nope + value) * latent..][..nope * latent];
        let q_nope = &token.q[head * (nope + rope)..][..nope];
        for (q, row) in q_nope.iter().zip(matrix.chunks_exact(latent)) {
            query.iter_mut().zip(row).for_each(|(sum, w)| *sum += q * w);
        }
        query.extend(q_pe[head * rope..][..rope].iter().map(|&x| x as f32));
        let logits = cached.of_layer(layer).map(|row| scale * dot(&query, row));
        let begin = all.len();
        all.extend(logits);
        let max = all[begin..].iter().copied().fold(f32::NEG_INFINITY, f32::max);
        all[begin..].iter_mut().for_each(|x| *x = (*x - max).exp());
        let sum: f32 = all[begin..].iter().sum();
        all[begin..].iter_mut().for_each(|x| *x /= sum);
    }
    all
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    // Eight sums, which a compiler keeps in vectors.
    let mut sums = [0.0f32; 8];
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}
