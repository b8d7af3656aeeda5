//! One decode against the f64 oracle, which shares no code with any kernel.

use mla_support::reference::{LayerSequence, mla_layer};

use crate::Config;
use crate::look::{Cached, Layer};

/// Where the device and the oracle are furthest apart.
#[derive(Debug, Clone, Copy, Default)]
pub struct Furthest {
    pub error: f64,
    pub layer: usize,
    pub head: usize,
    /// The largest element of all that were compared.
    pub largest: f64,
    pub elements: usize,
}

impl Furthest {
    /// Compares one layer's output of a token that sees all rows of the cache.
    pub fn compare(
        &mut self,
        config: &Config,
        cached: &Cached,
        layer: usize,
        token: &Layer,
        q_pe: &[f64],
        kv_b: &[f32],
    ) {
        let (rope, nope) = (config.shape.qk_rope_head_dim as usize, config.qk_nope_head_dim);
        let wide = |xs: &[f32]| xs.iter().copied().map(f64::from).collect::<Vec<_>>();
        let q_nope: Vec<f64> =
            token.q.chunks_exact(nope + rope).flat_map(|head| wide(&head[..nope])).collect();
        let rows: Vec<f64> = cached.of_layer(layer).flat_map(wide).collect();
        let want = mla_layer(&LayerSequence {
            num_heads: config.shape.num_heads as usize,
            kv_lora_rank: config.shape.kv_lora_rank as usize,
            qk_rope_head_dim: rope,
            qk_nope_head_dim: nope,
            v_head_dim: config.v_head_dim,
            q_nope: &q_nope,
            q_pe,
            rows: &rows,
            kv_b_proj: &wide(kv_b),
            visible: &[cached.tokens()],
            softmax_scale: config.softmax_scale().unwrap_or(f32::NAN).into(),
        });
        for (at, (got, want)) in token.out.iter().zip(&want).enumerate() {
            let error = (f64::from(*got) - want).abs();
            // A NaN is as far as can be.
            let error = if error.is_nan() { f64::INFINITY } else { error };
            self.largest = self.largest.max(want.abs());
            self.elements += 1;
            if error > self.error {
                (self.error, self.layer, self.head) = (error, layer, at / config.v_head_dim);
            }
        }
    }
}
