//! What a host keeps to look into an attention: a token's query and output in each layer, and the rows that the cache holds.

use mla_support::reference::{Rotation, rope};
use wgpu_mla::RopeLayout;

use crate::{Config, Result};

/// A token in one layer.
#[derive(Clone)]
pub struct Layer {
    /// `[H, P + R]`, not rotated.
    pub q: Vec<f32>,
    /// `[H, V]`.
    pub out: Vec<f32>,
}

impl Layer {
    /// The last of so many tokens.
    pub fn last(q: &[f32], out: &[f32], tokens: usize) -> Self {
        Self::of(q, out, tokens, tokens.saturating_sub(1))
    }

    /// The token at `index` of so many.
    pub fn of(q: &[f32], out: &[f32], tokens: usize, index: usize) -> Self {
        let at = |rows: &[f32]| {
            let each = rows.len() / tokens.max(1);
            rows[each * index..][..each].to_vec()
        };
        Self { q: at(q), out: at(out) }
    }

    /// The rotary part of its query at a position, `[H, R]`.
    ///
    /// # Errors
    /// The errors of the RoPE table.
    pub fn rotated(&self, config: &Config, position: usize) -> Result<Vec<f64>> {
        let (heads, dim) = (config.shape.num_heads as usize, config.shape.qk_rope_head_dim as usize);
        let parts = self.q.chunks_exact(config.qk_nope_head_dim + dim).flat_map(|q| &q[q.len() - dim..]);
        let q_pe: Vec<f32> = parts.copied().collect();
        Ok(rope(&Rotation {
            x: &q_pe,
            positions: &[position as i32],
            cos_sin: &config.rope.cos_sin(position as u32 + 1)?,
            num_heads: heads,
            rope_dim: dim,
            layout: if config.rope.interleaved { RopeLayout::Interleaved } else { RopeLayout::HalfSplit },
        }))
    }
}

/// What the cache holds of a sequence, as far as it was read.
#[derive(Clone, Default)]
pub struct Cached {
    /// `[tokens, layers, L + R]`.
    pub rows: Vec<f32>,
    pub layers: usize,
    /// `L + R`.
    pub row_elems: usize,
}

impl Cached {
    /// Nothing yet, of a model.
    pub fn new(config: &Config) -> Self {
        Self { rows: Vec::new(), layers: config.num_layers, row_elems: config.shape.row_elems() as usize }
    }

    pub fn tokens(&self) -> usize {
        self.rows.len() / (self.layers * self.row_elems).max(1)
    }

    /// One layer's rows, `tokens` of `[L + R]`.
    pub fn of_layer(&self, layer: usize) -> impl Iterator<Item = &[f32]> {
        self.rows.chunks_exact(self.row_elems.max(1)).skip(layer).step_by(self.layers.max(1))
    }
}
