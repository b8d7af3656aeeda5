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
    /// Nothing reads these of experts in a model that is dense.
    pub n_routed_experts: usize,
    pub n_shared_experts: usize,
    /// `None`: the field has to be given.
    pub num_experts_per_tok: Option<usize>,
    pub n_group: Option<usize>,
    pub topk_group: Option<usize>,
    pub routed_scaling_factor: f64,
    pub q_lora_rank: Option<usize>,
    pub kv_lora_rank: usize,
    pub qk_rope_head_dim: usize,
    pub qk_nope_head_dim: usize,
    /// `None`: the model's width over its heads.
    pub v_head_dim: Option<usize>,
    pub rms_norm_eps: f64,
    pub tie_word_embeddings: bool,
    pub eos_token_id: u32,
    /// Only for models whose attention is sparse.
    pub indexer: Option<IndexerDefaults>,
}

/// Defaults of a lightning indexer.
pub struct IndexerDefaults {
    pub index_n_heads: usize,
    pub index_topk: usize,
    pub index_head_dim: usize,
    /// Whether its RoPE turns pairs `(x0, x1), (x2, x3), ..`, and not halves: `indexer_rope_interleave`.
    pub interleaved: bool,
    /// Whether a layer may attend the list of an earlier one.
    pub shares_lists: bool,
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
    q_lora_rank: Some(1536),
    kv_lora_rank: 512,
    qk_rope_head_dim: 64,
    qk_nope_head_dim: 128,
    v_head_dim: Some(128),
    rms_norm_eps: 1e-6,
    tie_word_embeddings: false,
    eos_token_id: 2,
    indexer: None,
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
    q_lora_rank: Some(1536),
    kv_lora_rank: 512,
    qk_rope_head_dim: 64,
    qk_nope_head_dim: 128,
    v_head_dim: Some(128),
    rms_norm_eps: 1e-6,
    tie_word_embeddings: false,
    eos_token_id: 1,
    indexer: None,
};

/// transformers 5.24.0, `configuration_deepseek_v32.py`.
pub const V32: Defaults = Defaults {
    max_position_embeddings: 163_840,
    indexer: Some(IndexerDefaults {
        index_n_heads: 64,
        index_topk: 2048,
        index_head_dim: 128,
        interleaved: false,
        shares_lists: false,
    }),
    ..V3
};

/// transformers 5.24.0, `configuration_glm_moe_dsa.py`.
pub const GLM_DSA: Defaults = Defaults {
    vocab_size: 154_880,
    hidden_size: 6144,
    intermediate_size: 12_288,
    num_hidden_layers: 78,
    num_attention_heads: 64,
    max_position_embeddings: 202_752,
    n_group: Some(1),
    topk_group: Some(1),
    q_lora_rank: Some(2048),
    qk_nope_head_dim: 192,
    v_head_dim: Some(256),
    rms_norm_eps: 1e-5,
    indexer: Some(IndexerDefaults {
        index_n_heads: 32,
        index_topk: 2048,
        index_head_dim: 128,
        interleaved: true,
        shares_lists: true,
    }),
    ..V3
};

/// transformers 5.24.0, `configuration_youtu.py`.
pub const YOUTU: Defaults = Defaults {
    vocab_size: 128_256,
    hidden_size: 2048,
    intermediate_size: 6144,
    num_hidden_layers: 32,
    num_attention_heads: 16,
    max_position_embeddings: 131_072,
    tie_word_embeddings: true,
    eos_token_id: 128_001,
    ..V3
};

/// transformers 5.24.0, `configuration_glm4_moe_lite.py`.
pub const GLM4_MOE_LITE: Defaults = Defaults {
    vocab_size: 154_880,
    hidden_size: 2048,
    intermediate_size: 10_240,
    moe_intermediate_size: 1536,
    num_hidden_layers: 47,
    num_attention_heads: 20,
    max_position_embeddings: 202_752,
    first_k_dense_replace: 1,
    n_routed_experts: 64,
    num_experts_per_tok: Some(4),
    n_group: Some(1),
    topk_group: Some(1),
    routed_scaling_factor: 1.8,
    q_lora_rank: Some(768),
    qk_nope_head_dim: 192,
    v_head_dim: Some(256),
    rms_norm_eps: 1e-5,
    ..V3
};

/// transformers 5.24.0, `configuration_sarvam_mla.py`.
pub const SARVAM_MLA: Defaults = Defaults {
    vocab_size: 262_144,
    hidden_size: 4096,
    intermediate_size: 16_384,
    num_hidden_layers: 32,
    num_attention_heads: 64,
    first_k_dense_replace: 1,
    n_routed_experts: 128,
    n_group: Some(1),
    topk_group: Some(1),
    q_lora_rank: None,
    ..V3
};

/// transformers 5.24.0, `configuration_axk1.py`.
pub const AXK1: Defaults = Defaults {
    vocab_size: 163_840,
    num_attention_heads: 64,
    max_position_embeddings: 32_768,
    first_k_dense_replace: 1,
    n_routed_experts: 192,
    eos_token_id: 163_691,
    ..V3
};

/// transformers 5.24.0, `configuration_minicpm3.py`.
pub const MINICPM3: Defaults = Defaults {
    vocab_size: 73_448,
    hidden_size: 2560,
    intermediate_size: 6400,
    num_hidden_layers: 62,
    num_attention_heads: 40,
    max_position_embeddings: 32_768,
    q_lora_rank: Some(768),
    kv_lora_rank: 256,
    qk_rope_head_dim: 32,
    qk_nope_head_dim: 64,
    v_head_dim: None,
    rms_norm_eps: 1e-5,
    tie_word_embeddings: true,
    eos_token_id: 2,
    ..V3
};

/// transformers 5.24.0, `configuration_mistral4.py`.
pub const MISTRAL4: Defaults = Defaults {
    vocab_size: 131_072,
    hidden_size: 4096,
    intermediate_size: 12_288,
    num_hidden_layers: 36,
    num_attention_heads: 32,
    max_position_embeddings: 1_048_576,
    first_k_dense_replace: 0,
    n_routed_experts: 128,
    num_experts_per_tok: Some(4),
    n_group: Some(1),
    topk_group: Some(1),
    routed_scaling_factor: 1.0,
    q_lora_rank: Some(1024),
    kv_lora_rank: 256,
    qk_nope_head_dim: 64,
    eos_token_id: 2,
    ..V3
};

/// What [`MISTRAL4`] has where a config says nothing of RoPE.
pub const MISTRAL4_ROPE: &str = r#"{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0,
    "original_max_position_embeddings": 8192, "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
    "llama_4_scaling_beta": 0.1}"#;
