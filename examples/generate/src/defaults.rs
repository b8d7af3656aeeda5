//! transformers' defaults for fields that config.json lacks.

/// Defaults that differ between model types.
pub struct Defaults {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub moe_intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub max_position_embeddings: usize,
    pub first_k_dense_replace: usize,
    pub n_routed_experts: usize,
    pub n_shared_experts: usize,
    /// `None`: the field has to be given.
    pub num_experts_per_tok: Option<usize>,
    pub n_group: Option<usize>,
    pub topk_group: Option<usize>,
    pub routed_scaling_factor: f64,
    pub eos_token_id: u32,
}

/// transformers 5.17.0, `configuration_deepseek_v2.py`.
pub const V2: Defaults = Defaults {
    vocab_size: 102_400,
    hidden_size: 4096,
    intermediate_size: 11_008,
    moe_intermediate_size: 1407,
    num_hidden_layers: 32,
    num_attention_heads: 32,
    max_position_embeddings: 2048,
    first_k_dense_replace: 0,
    n_routed_experts: 64,
    n_shared_experts: 2,
    num_experts_per_tok: None,
    n_group: None,
    topk_group: None,
    routed_scaling_factor: 1.0,
    eos_token_id: 2,
};

/// transformers 5.17.0, `configuration_deepseek_v3.py`; also for kimi_k2, which is DeepSeek-V3's code and has no class of its own there.
pub const V3: Defaults = Defaults {
    vocab_size: 129_280,
    hidden_size: 7168,
    intermediate_size: 18_432,
    moe_intermediate_size: 2048,
    num_hidden_layers: 61,
    num_attention_heads: 128,
    max_position_embeddings: 4096,
    first_k_dense_replace: 3,
    n_routed_experts: 256,
    n_shared_experts: 1,
    num_experts_per_tok: Some(8),
    n_group: Some(8),
    topk_group: Some(4),
    routed_scaling_factor: 2.5,
    eos_token_id: 1,
};
