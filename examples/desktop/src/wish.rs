//! What a person wishes to be written.

use wgpu_mla::Dtype;

/// A text to write.
#[derive(Clone, PartialEq)]
pub struct Wish {
    pub prompt: String,
    /// New tokens of each sequence.
    pub new_tokens: usize,
    /// 0: always the likeliest token.
    pub temperature: f32,
    pub seed: u64,
    /// Dtype of the cache.
    pub kv: Dtype,
}

/// The page of examples/web has the same.
impl Default for Wish {
    fn default() -> Self {
        let prompt = "First Citizen:\nGood morrow, neighbour. Have you heard the news?\n\nSecond Citizen:\n";
        Self { prompt: prompt.into(), new_tokens: 200, temperature: 0.5, seed: 1, kv: Dtype::F16 }
    }
}
