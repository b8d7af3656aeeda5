//! `kv_b_proj` of a layer, which checkpoints have as one matrix, and GGUF files since 2025 as two stacks of a matrix a head.

use std::borrow::Cow;

use wgpu_mla::Dtype;

use crate::matrix::Matrix;
use crate::weights::{Dim, Weights};
use crate::{Config, Result};

pub enum KvB {
    /// `[H * (P + V), L]`.
    Whole(Matrix),
    Parts {
        /// `attn_k_b`, `[H * L, P]`.
        keys: Matrix,
        /// `attn_v_b`, `[H * V, L]`.
        values: Matrix,
        heads: usize,
        latent: usize,
    },
}

impl KvB {
    pub fn take(weights: &mut Weights, config: &Config, layer: usize) -> Result<Self> {
        let (heads, latent) = (config.shape.num_heads as usize, config.shape.kv_lora_rank as usize);
        let name = |part: &str| format!("model.layers.{layer}.self_attn.{part}.weight");
        let of_heads = Dim(heads, "num_attention_heads");
        let (key, value) =
            (Dim(config.qk_nope_head_dim, "qk_nope_head_dim"), Dim(config.v_head_dim, "v_head_dim"));
        let latents = Dim(latent, "kv_lora_rank");
        let Some(keys) = weights.matrix_if_there(&name("k_b_proj"), &[of_heads, latents, key])? else {
            let rows =
                Dim(heads * (key.0 + value.0), "num_attention_heads * (qk_nope_head_dim + v_head_dim)");
            return Ok(Self::Whole(weights.matrix(&name("kv_b_proj"), rows, latents)?));
        };
        let part = name("v_b_proj");
        let values = weights.matrix_if_there(&part, &[of_heads, value, latents])?;
        Ok(Self::Parts { keys, values: values.ok_or_else(|| weights.missing(&part))?, heads, latent })
    }

    /// All elements, `[H, P + V, L]`.
    pub fn values(&self) -> Vec<f32> {
        let (keys, values, heads, latent) = match self {
            Self::Whole(whole) => return whole.values(),
            Self::Parts { keys, values, heads, latent } => (keys.values(), values.values(), *heads, *latent),
        };
        let (nope, of_values) = (keys.len() / (heads * latent), values.len() / heads);
        let mut all = Vec::with_capacity(keys.len() + values.len());
        for (keys, values) in keys.chunks_exact(nope * latent).zip(values.chunks_exact(of_values)) {
            // From `[L, P]` to `[P, L]`.
            (0..nope).for_each(|row| all.extend(keys.iter().skip(row).step_by(nope)));
            all.extend_from_slice(values);
        }
        all
    }

    /// The same as bytes of a dtype: as the file has them, or as f32.
    pub fn bytes(&self) -> (Dtype, Cow<'_, [u8]>) {
        match self {
            Self::Whole(whole) => match whole.dtype() {
                Some(dtype) => (dtype, whole.bytes().into()),
                None => (Dtype::F32, Dtype::F32.encode_all(&whole.values()).into()),
            },
            Self::Parts { .. } => (Dtype::F32, Dtype::F32.encode_all(&self.values()).into()),
        }
    }
}
