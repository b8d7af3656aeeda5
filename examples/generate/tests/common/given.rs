//! An attention whose cache gets the rows that transformers stored.
//!
//! Where a value is near the middle of two codes, two correct programs, or one on two machines, may round it to different ones, and
//! with bf16 and e4m3 a logit may then move by more than 2e-3. So two comparisons are made: logits from the same stored rows, closely;
//! and those of a whole run, with room for such codes.

use generate::attention::{Attention, Rows};
use generate::{Model, Pages, Result};
use wgpu_mla::{Dtype, SeqId};

pub struct Given<'a> {
    pub inner: &'a mut dyn Attention,
    pub rows: &'a StoredRows,
}

/// `[layers, tokens, L + R]` of a sequence.
pub struct StoredRows {
    values: Vec<f32>,
    tokens: usize,
    latent: usize,
    rope: usize,
    /// `[positions, R]`.
    cos_sin: Vec<f32>,
}

impl StoredRows {
    pub fn new(bytes: &[u8], dtype: Dtype, k_scale: f32, tokens: usize, model: &Model) -> Self {
        let scale = if dtype == Dtype::E4m3 { k_scale } else { 1.0 };
        let values = dtype.decode_all(bytes).into_iter().map(|x| x * scale).collect();
        let shape = model.config.shape;
        Self {
            values,
            tokens,
            latent: shape.kv_lora_rank as usize,
            rope: shape.qk_rope_head_dim as usize,
            cos_sin: model.config.rope.cos_sin(model.config.max_position_embeddings as u32).expect("a table"),
        }
    }

    /// A row's two parts, its rotation undone and its pairs together.
    fn row(&self, layer: usize, position: usize) -> (&[f32], Vec<f32>) {
        let (rope, elems) = (self.rope, self.latent + self.rope);
        let row = &self.values[(layer * self.tokens + position) * elems..][..elems];
        let (latent, rotated) = row.split_at(self.latent);
        let (cos, sin) = self.cos_sin[position * rope..][..rope].split_at(rope / 2);
        let mut k_pe = Vec::new();
        for pair in 0..rope / 2 {
            let (x, y) = (rotated[pair], rotated[pair + rope / 2]);
            k_pe.extend([x * cos[pair] + y * sin[pair], y * cos[pair] - x * sin[pair]]);
        }
        (latent, k_pe)
    }
}

impl Attention for Given<'_> {
    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn pages(&self) -> &Pages {
        self.inner.pages()
    }

    fn pages_mut(&mut self) -> &mut Pages {
        self.inner.pages_mut()
    }

    fn cache_bytes(&self) -> u64 {
        self.inner.cache_bytes()
    }

    fn begin(&mut self, batch: &[(SeqId, u32)]) -> Result<()> {
        self.inner.begin(batch)
    }

    fn attend(&mut self, layer: usize, rows: &Rows) -> Result<Vec<f32>> {
        let (mut kv_c, mut k_pe) = (Vec::new(), Vec::new());
        for &position in &self.inner.pages().positions {
            let (latent, rotary) = self.rows.row(layer, position as usize);
            kv_c.extend_from_slice(latent);
            k_pe.extend(rotary);
        }
        // The model's own rows equal the replaced ones but for last bits, and codes that these changed.
        let apart = |a: &[f32], b: &[f32]| {
            let squares = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
            let all = a.iter().map(|a| f64::from(*a).powi(2)).sum::<f64>();
            (squares / all).sqrt()
        };
        let furthest = apart(&rows.kv_c, &kv_c).max(apart(&rows.k_pe, &k_pe));
        assert!(furthest < 0.05, "layer {layer}: rows are not what transformers stored: {furthest}");
        self.inner.attend(layer, &Rows { kv_c, k_pe, ..rows.clone() })
    }
}
