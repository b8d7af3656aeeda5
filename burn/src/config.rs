//! What an attention is made with.

use burn::config::Config;
use burn::nn::{LinearConfig, RmsNormConfig};
use burn::tensor::Device;
use wgpu_mla::{Dtype, RopeFrequencies, RopeLayout};

use crate::attention::MlaAttention;

/// The dims of a layer's attention, by the names that they have in a model's `config.json`: `MlaAttentionConfig::load("config.json")` reads
/// them there.
#[derive(Config, Debug)]
pub struct MlaAttentionConfig {
    /// Elements of the hidden state.
    pub hidden_size: usize,
    /// `H`.
    pub num_attention_heads: usize,
    /// Elements of a query's latent; `None` in models that project queries at once, as DeepSeek-V2-Lite.
    pub q_lora_rank: Option<usize>,
    /// `L`: 512, or 256.
    pub kv_lora_rank: usize,
    /// `P`.
    pub qk_nope_head_dim: usize,
    /// `R`.
    pub qk_rope_head_dim: usize,
    /// `V`.
    pub v_head_dim: usize,
    /// The epsilon of both latents' norms.
    #[config(default = 1e-6)]
    pub rms_norm_eps: f64,
    /// The base of RoPE's frequencies.
    #[config(default = 10000.0)]
    pub rope_theta: f64,
}

impl MlaAttentionConfig {
    /// An attention with random weights of the device's default float dtype.
    #[must_use]
    pub fn init(&self, device: &Device) -> MlaAttention {
        let (heads, key) = (self.num_attention_heads, self.qk_nope_head_dim + self.qk_rope_head_dim);
        let linear = |input, output| LinearConfig::new(input, output).with_bias(false).init(device);
        let norm = |dim| RmsNormConfig::new(dim).with_epsilon(self.rms_norm_eps).init(device);
        MlaAttention {
            q_a_proj: self.q_lora_rank.map(|rank| linear(self.hidden_size, rank)),
            q_a_layernorm: self.q_lora_rank.map(norm),
            q_b_proj: self.q_lora_rank.map(|rank| linear(rank, heads * key)),
            q_proj: self.q_lora_rank.is_none().then(|| linear(self.hidden_size, heads * key)),
            kv_a_proj_with_mqa: linear(self.hidden_size, self.kv_lora_rank + self.qk_rope_head_dim),
            kv_a_layernorm: norm(self.kv_lora_rank),
            kv_b_proj: linear(self.kv_lora_rank, heads * (self.qk_nope_head_dim + self.v_head_dim)),
            o_proj: linear(heads * self.v_head_dim, self.hidden_size),
        }
    }
}

/// How a [`PagedCache`](crate::PagedCache) keeps tokens, and how large its steps may be.
#[derive(Debug, Clone)]
pub struct CacheOptions {
    /// What a token of the cache is held in: f32, f16, bf16 or e4m3. `None`: the dtype of the weights.
    pub kv: Option<Dtype>,
    /// An e4m3 cache holds `x / k_scale`.
    pub k_scale: f32,
    /// `k_scale` of each layer, where these differ; layers beyond it have [`CacheOptions::k_scale`].
    pub k_scales: Vec<f32>,
    /// Tokens of a page.
    pub page_size: u32,
    /// Pages of the pool, for all sequences. Each layer has so many.
    pub num_pages: u32,
    /// The most new tokens of a step.
    pub max_tokens: u32,
    /// The most new tokens of a step that belong to decodes; sequences of one new token are decoded.
    pub max_decodes: u32,
    /// Positions of the table of RoPE: the longest sequence.
    pub max_position: u32,
    /// Bytes for the keys and values of prompts, which are attended in chunks as large as this.
    pub workspace_bytes: u64,
    /// RoPE's frequencies, such as those of YaRN; `None`: those of [`MlaAttentionConfig::rope_theta`].
    pub rope: Option<RopeFrequencies>,
    /// In place of both, RoPE's table itself, `[max_position, R]`, as [`RopeFrequencies::cos_sin`] lays it out: for an embedding that
    /// frequencies do not describe, as LongRoPE.
    pub cos_sin: Option<Vec<f32>>,
    /// Which elements rotate together.
    pub rope_layout: RopeLayout,
    /// Factor of the logits: [`wgpu_mla::softmax_scale`]. `None`: `1 / sqrt(P + R)`.
    pub softmax_scale: Option<f32>,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self {
            kv: None,
            k_scale: 1.0,
            k_scales: Vec::new(),
            page_size: 64,
            num_pages: 128,
            max_tokens: 2048,
            max_decodes: 64,
            max_position: 8192,
            workspace_bytes: 64 << 20,
            rope: None,
            cos_sin: None,
            rope_layout: RopeLayout::Interleaved,
            softmax_scale: None,
        }
    }
}
