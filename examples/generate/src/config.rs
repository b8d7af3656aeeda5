//! `config.json` of DeepSeek-V2/V3-style models, as transformers writes it and as DeepSeek ships it.

use std::path::Path;

use serde::Deserialize;
use wgpu_mla::MlaShape;

use crate::rope::{RawRope, RopeConfig};
use crate::{Error, Result};

/// What a model is made of.
#[derive(Debug, Clone)]
pub struct Config {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_layers: usize,
    /// H, L and R of the attention.
    pub shape: MlaShape,
    /// P.
    pub qk_nope_head_dim: usize,
    /// V.
    pub v_head_dim: usize,
    /// Whether queries go through a low rank of their own.
    pub q_lora_rank: Option<usize>,
    pub intermediate_size: usize,
    pub experts: Option<ExpertsConfig>,
    pub rms_norm_eps: f32,
    pub tie_word_embeddings: bool,
    pub max_position_embeddings: usize,
    pub rope: RopeConfig,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
}

/// Routed and shared experts.
#[derive(Debug, Clone)]
pub struct ExpertsConfig {
    /// Layers before this one are dense.
    pub first_layer: usize,
    pub num_experts: usize,
    pub num_shared: usize,
    pub intermediate_size: usize,
    pub per_token: usize,
    /// Groups of experts, and how many of them a token may choose from.
    pub groups: usize,
    pub chosen_groups: usize,
    pub scaling: f32,
    pub gate: Gate,
}

/// How a router's logits become weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// DeepSeek-V2: softmax; a group is as good as its best expert.
    Softmax,
    /// DeepSeek-V3: sigmoid, a bias that only the choice sees; a group is as good as its best two experts together.
    Sigmoid { normalise: bool },
}

#[derive(Deserialize)]
struct Raw {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: u32,
    kv_lora_rank: u32,
    qk_rope_head_dim: u32,
    qk_nope_head_dim: usize,
    v_head_dim: usize,
    q_lora_rank: Option<usize>,
    intermediate_size: usize,
    #[serde(default = "silu")]
    hidden_act: String,
    #[serde(default = "eps")]
    rms_norm_eps: f32,
    #[serde(default)]
    tie_word_embeddings: bool,
    max_position_embeddings: usize,
    rope_interleave: Option<bool>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRope>,
    rope_parameters: Option<RawRope>,
    eos_token_id: Option<OneOrMore>,
    quantization_config: Option<serde_json::Value>,
    #[serde(default)]
    first_k_dense_replace: usize,
    moe_layer_freq: Option<usize>,
    n_routed_experts: Option<usize>,
    n_shared_experts: Option<usize>,
    moe_intermediate_size: Option<usize>,
    num_experts_per_tok: Option<usize>,
    n_group: Option<usize>,
    topk_group: Option<usize>,
    topk_method: Option<String>,
    routed_scaling_factor: Option<f32>,
    norm_topk_prob: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(u32),
    More(Vec<u32>),
}

fn silu() -> String {
    "silu".into()
}

fn eps() -> f32 {
    1e-6
}

impl Config {
    /// Reads and checks `DIR/config.json`.
    ///
    /// # Errors
    /// [`Error::File`] that names the field and the cure.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let text = std::fs::read_to_string(&path).map_err(|error| {
            Error::file(
                &path,
                format!("{error}; name the directory of a checkpoint in Hugging Face's format"),
            )
        })?;
        Self::parse(&text).map_err(|why| Error::file(&path, why))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let raw: Raw = serde_json::from_str(text)
            .map_err(|error| format!("{error}; it has to be the config of a DeepSeek-V2/V3-style model"))?;
        let is_v3 = match raw.model_type.as_str() {
            "deepseek_v2" => false,
            "deepseek_v3" | "kimi_k2" => true,
            other => {
                return Err(format!("model_type {other}: must be deepseek_v2, deepseek_v3 or kimi_k2"));
            }
        };
        raw.check()?;
        let experts = raw.experts(is_v3)?;
        let shape = MlaShape {
            num_heads: raw.num_attention_heads,
            kv_lora_rank: raw.kv_lora_rank,
            qk_rope_head_dim: raw.qk_rope_head_dim,
        };
        shape.check().map_err(|error| error.to_string())?;
        if raw.qk_rope_head_dim == 0 {
            return Err("qk_rope_head_dim 0: this program serves models with a rotary part".into());
        }
        let interleaved = !is_v3 || raw.rope_interleave.unwrap_or(true);
        let (rope, most) = (raw.rope_parameters.or(raw.rope_scaling), raw.max_position_embeddings);
        let rope = RopeConfig::new(
            rope.unwrap_or_default(),
            raw.rope_theta,
            interleaved,
            shape.qk_rope_head_dim,
            most,
        )?;
        let eos = match raw.eos_token_id {
            None => Vec::new(),
            Some(OneOrMore::One(id)) => vec![id],
            Some(OneOrMore::More(ids)) => ids,
        };
        Ok(Self {
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            num_layers: raw.num_hidden_layers,
            shape,
            qk_nope_head_dim: raw.qk_nope_head_dim,
            v_head_dim: raw.v_head_dim,
            q_lora_rank: raw.q_lora_rank,
            intermediate_size: raw.intermediate_size,
            experts,
            rms_norm_eps: raw.rms_norm_eps,
            tie_word_embeddings: raw.tie_word_embeddings,
            max_position_embeddings: raw.max_position_embeddings,
            rope,
            eos,
        })
    }

    /// The factor of the attention's logits.
    pub fn softmax_scale(&self) -> f32 {
        let (factor, m) = self.rope.softmax_mscale;
        wgpu_mla::softmax_scale(self.qk_nope_head_dim as u32, self.shape.qk_rope_head_dim, factor, m)
    }

    /// Cosines and sines of all positions, `[max_position_embeddings, R]`.
    ///
    /// # Errors
    /// [`wgpu_mla::Error::Shape`].
    pub fn cos_sin(&self) -> crate::Result<Vec<f32>> {
        Ok(self.rope.cos_sin(u32::try_from(self.max_position_embeddings).unwrap_or(u32::MAX))?)
    }

    /// Whether a layer has experts.
    pub fn experts_of(&self, layer: usize) -> Option<&ExpertsConfig> {
        self.experts.as_ref().filter(|experts| layer >= experts.first_layer)
    }
}

impl Raw {
    fn check(&self) -> Result<(), String> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("v_head_dim", self.v_head_dim),
            ("intermediate_size", self.intermediate_size),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        if let Some((what, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(format!("{what} 0: must be at least 1"));
        }
        if self.hidden_act != "silu" {
            return Err(format!("hidden_act {}: must be silu", self.hidden_act));
        }
        if self.quantization_config.is_some() {
            let cure = "convert them to bf16 first, with DeepSeek's `fp8_cast_bf16.py`";
            return Err(format!("quantization_config: quantised weights are not served; {cure}"));
        }
        if self.moe_layer_freq.unwrap_or(1) != 1 {
            return Err("moe_layer_freq: must be 1".into());
        }
        Ok(())
    }

    fn experts(&self, is_v3: bool) -> Result<Option<ExpertsConfig>, String> {
        let Some(num_experts) = self.n_routed_experts else { return Ok(None) };
        if self.first_k_dense_replace >= self.num_hidden_layers {
            return Ok(None);
        }
        let need = |what: &str, value: Option<usize>| {
            value
                .filter(|&value| value > 0)
                .ok_or(format!("{what}: missing or 0, and n_routed_experts is given"))
        };
        let grouped = match self.topk_method.as_deref() {
            _ if is_v3 => true,
            None | Some("greedy") => false,
            Some("group_limited_greedy") => true,
            Some(other) => {
                return Err(format!("topk_method {other}: must be greedy or group_limited_greedy"));
            }
        };
        let groups = if grouped { need("n_group", self.n_group)? } else { 1 };
        let chosen_groups = if grouped { need("topk_group", self.topk_group)? } else { 1 };
        let per_token = need("num_experts_per_tok", self.num_experts_per_tok)?;
        let least = if is_v3 { 2 } else { 1 };
        if num_experts % groups != 0 || num_experts / groups < least || chosen_groups > groups {
            return Err(format!(
                "n_routed_experts {num_experts}, n_group {groups}, topk_group {chosen_groups}: groups must be of one size, at least {least}, and as many as are chosen"
            ));
        }
        if per_token > num_experts / groups * chosen_groups {
            return Err(format!("num_experts_per_tok {per_token}: more than the chosen groups have"));
        }
        let normalise = self.norm_topk_prob.unwrap_or(true);
        Ok(Some(ExpertsConfig {
            first_layer: self.first_k_dense_replace,
            num_experts,
            num_shared: self.n_shared_experts.unwrap_or(0),
            intermediate_size: need("moe_intermediate_size", self.moe_intermediate_size)?,
            per_token,
            groups,
            chosen_groups,
            scaling: self.routed_scaling_factor.unwrap_or(1.0),
            gate: if is_v3 { Gate::Sigmoid { normalise } } else { Gate::Softmax },
        }))
    }
}
