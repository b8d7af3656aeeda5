//! What the page keeps of a step: the last token's query and output in each layer.

/// The result of a step.
#[derive(Default)]
pub struct Step {
    pub logits: Vec<f32>,
    /// What was awaited for the attention.
    pub attention_ms: f64,
    pub layers: Vec<Layer>,
}

/// A token in one layer.
pub struct Layer {
    /// `[H, P + R]`, not rotated.
    pub q: Vec<f32>,
    /// `[H, V]`.
    pub out: Vec<f32>,
}

impl Layer {
    /// The last of so many tokens.
    pub fn last(q: &[f32], out: &[f32], tokens: usize) -> Self {
        let last = |rows: &[f32]| rows[rows.len() / tokens * (tokens - 1)..].to_vec();
        Self { q: last(q), out: last(out) }
    }
}

/// What the cache holds of a sequence, as far as it was read.
#[derive(Default)]
pub struct Cached {
    /// `[tokens, layers, L + R]`.
    pub rows: Vec<f32>,
    pub layers: usize,
    /// `L + R`.
    pub row_elems: usize,
}

impl Cached {
    pub fn tokens(&self) -> usize {
        self.rows.len() / (self.layers * self.row_elems).max(1)
    }

    /// One layer's rows, `tokens` of `[L + R]`.
    pub fn of_layer(&self, layer: usize) -> impl Iterator<Item = &[f32]> {
        self.rows.chunks_exact(self.row_elems).skip(layer).step_by(self.layers)
    }
}
