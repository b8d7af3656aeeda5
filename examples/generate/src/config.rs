//! `config.json` of DeepSeek-V2/V3-style models and of GLM-5, as transformers writes it and as it is shipped.

use std::path::Path;

use serde_json::Value;
use wgpu_mla::MlaShape;

use crate::defaults::{Defaults, GLM_DSA, V2, V3, V32};
use crate::fields::Fields;
use crate::indexer::{self, IndexerConfig};
use crate::{Error, Result, RopeConfig, files};

/// A model's dims and options.
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
    /// Whether the attention's projections have biases.
    pub attention_bias: bool,
    /// Whether the dense MLPs and the shared experts have.
    pub mlp_bias: bool,
    pub max_position_embeddings: usize,
    pub rope: RopeConfig,
    /// What chooses the tokens that are attended; only for a model whose attention is sparse.
    pub indexer: Option<IndexerConfig>,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
    /// `quant_method` of `quantization_config`, which says how to get plain weights where those of the files are not.
    pub quant_method: Option<String>,
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

impl Config {
    /// Reads and checks `DIR/config.json`. Absent fields have transformers' defaults.
    ///
    /// # Errors
    /// [`Error::File`] that names the field and the cure.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let text = files::read_text(&path, "name the directory of a checkpoint in Hugging Face's format")?;
        Self::parse(&text).map_err(|why| Error::file(&path, why))
    }

    /// Like [`Config::open`], from the file's text.
    ///
    /// # Errors
    /// [`Error::File`] that names the field and the cure.
    pub fn from_json(text: &str) -> Result<Self> {
        Self::parse(text).map_err(|why| Error::file(Path::new("config.json"), why))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(text)
            .map_err(|error| format!("{error}; it has to be the config of a DeepSeek-V2/V3-style model"))?;
        let fields = Fields::of(&value)?;
        // First, as another model has other fields.
        let (is_v3, defaults) = match fields.text("model_type")?.unwrap_or("missing") {
            "deepseek_v2" => (false, &V2),
            "deepseek_v3" | "kimi_k2" => (true, &V3),
            "deepseek_v32" => (true, &V32),
            "glm_moe_dsa" => (true, &GLM_DSA),
            other => {
                return Err(format!(
                    "model_type {other}: must be deepseek_v2, deepseek_v3, kimi_k2, deepseek_v32 or glm_moe_dsa"
                ));
            }
        };
        check_what_is_served(&fields, is_v3)?;
        let num_layers = fields.size("num_hidden_layers", defaults.num_hidden_layers)?;
        let shape = MlaShape {
            num_heads: fields.size("num_attention_heads", defaults.num_attention_heads)? as u32,
            kv_lora_rank: fields.size("kv_lora_rank", 512)? as u32,
            qk_rope_head_dim: fields.size("qk_rope_head_dim", 64)? as u32,
        };
        // The crate's name of the field is shorter.
        let named = |error: wgpu_mla::Error| error.to_string().replace("num_heads", "num_attention_heads");
        shape.check().map_err(named)?;
        let max_position_embeddings =
            fields.size("max_position_embeddings", defaults.max_position_embeddings)?;
        let interleaved = !is_v3 || fields.flag("rope_interleave", true)?;
        let eps = fields.number("rms_norm_eps")?.unwrap_or(defaults.rms_norm_eps) as f32;
        if eps < 0.0 {
            return Err(format!("rms_norm_eps {eps}: must be 0 or more"));
        }
        let quantization = fields.object("quantization_config")?;
        let quant_method = quantization.map(|it| it.text("quant_method")).transpose()?.flatten();
        Ok(Self {
            vocab_size: fields.size("vocab_size", defaults.vocab_size)?,
            hidden_size: fields.size("hidden_size", defaults.hidden_size)?,
            num_layers,
            shape,
            qk_nope_head_dim: fields.size("qk_nope_head_dim", defaults.qk_nope_head_dim)?,
            v_head_dim: fields.size("v_head_dim", defaults.v_head_dim)?,
            q_lora_rank: fields.optional_size("q_lora_rank", defaults.q_lora_rank)?,
            intermediate_size: fields.size("intermediate_size", defaults.intermediate_size)?,
            experts: experts(&fields, defaults, is_v3, num_layers)?,
            rms_norm_eps: eps,
            tie_word_embeddings: fields.flag("tie_word_embeddings", false)?,
            attention_bias: fields.flag("attention_bias", false)?,
            mlp_bias: !is_v3 && fields.flag("mlp_bias", false)?,
            rope: RopeConfig::parse(&fields, interleaved, shape.qk_rope_head_dim, max_position_embeddings)?,
            max_position_embeddings,
            indexer: defaults
                .indexer
                .as_ref()
                .map(|defaults| indexer::parse(&fields, defaults, num_layers, shape.qk_rope_head_dim))
                .transpose()?,
            eos: fields.tokens("eos_token_id", defaults.eos_token_id)?,
            quant_method: quant_method.map(Into::into),
        })
    }

    /// The factor of the attention's logits.
    ///
    /// # Errors
    /// The errors of [`wgpu_mla::softmax_scale`].
    pub fn softmax_scale(&self) -> wgpu_mla::Result<f32> {
        let (factor, m) = self.rope.softmax_mscale;
        wgpu_mla::softmax_scale(self.qk_nope_head_dim as u32, self.shape.qk_rope_head_dim, factor, m)
    }

    /// A layer's indexer, where it has one of its own.
    pub fn indexer_of(&self, layer: usize) -> Option<&IndexerConfig> {
        self.indexer.as_ref().filter(|indexer| indexer.is_full.get(layer) == Some(&true))
    }

    /// Whether a layer has experts.
    pub fn experts_of(&self, layer: usize) -> Option<&ExpertsConfig> {
        self.experts.as_ref().filter(|experts| layer >= experts.first_layer)
    }
}

fn check_what_is_served(fields: &Fields<'_>, is_v3: bool) -> Result<(), String> {
    let (scoring, topk) = if is_v3 { ("sigmoid", "noaux_tc") } else { ("softmax", "") };
    let served = |name: &str, only: &str| match fields.text(name)? {
        Some(other) if other != only => Err(format!("{name} {other}: must be {only} for this model_type")),
        _ => Ok(()),
    };
    served("hidden_act", "silu")?;
    served("scoring_func", scoring)?;
    if is_v3 {
        served("topk_method", topk)?;
    }
    match fields.count("moe_layer_freq", 1)? {
        1 => Ok(()),
        other => Err(format!("moe_layer_freq {other}: must be 1")),
    }
}

fn experts(
    fields: &Fields<'_>,
    defaults: &Defaults,
    is_v3: bool,
    num_layers: usize,
) -> Result<Option<ExpertsConfig>, String> {
    // `null` is a dense model, as in DeepSeek's own code.
    let Some(num_experts) = fields.optional_size("n_routed_experts", defaults.n_routed_experts)? else {
        return Ok(None);
    };
    let first_layer = match defaults.indexer {
        Some(_) => {
            fields.strings("mlp_layer_types")?.map(|types| first_sparse(&types, num_layers)).transpose()?
        }
        None => None,
    };
    let first_layer = match first_layer {
        Some(first_layer) => first_layer,
        None => fields.count("first_k_dense_replace", defaults.first_k_dense_replace)?,
    };
    if first_layer >= num_layers {
        return Ok(None);
    }
    let need = |name: &str, default: Option<usize>| {
        let missing = || format!("{name}: missing, and n_routed_experts is {num_experts}; give it");
        fields.optional_size(name, default)?.ok_or_else(missing)
    };
    let grouped = is_v3
        || match fields.text("topk_method")?.unwrap_or("greedy") {
            "greedy" => false,
            "group_limited_greedy" => true,
            other => return Err(format!("topk_method {other}: must be greedy or group_limited_greedy")),
        };
    let groups = if grouped { need("n_group", defaults.n_group)? } else { 1 };
    let chosen_groups = if grouped { need("topk_group", defaults.topk_group)? } else { 1 };
    let per_token = need("num_experts_per_tok", defaults.num_experts_per_tok)?;
    let least = if is_v3 { 2 } else { 1 };
    if num_experts % groups != 0 || num_experts / groups < least || chosen_groups > groups {
        return Err(format!(
            "n_routed_experts {num_experts}, n_group {groups}, topk_group {chosen_groups}: groups must be of one size, at least {least}, and as many as are chosen"
        ));
    }
    let most = num_experts / groups * chosen_groups;
    if per_token > most {
        return Err(format!(
            "num_experts_per_tok {per_token}: more than the chosen groups have; must be at most {most}"
        ));
    }
    let scaling = fields.number("routed_scaling_factor")?.unwrap_or(defaults.routed_scaling_factor);
    Ok(Some(ExpertsConfig {
        first_layer,
        num_experts,
        num_shared: fields.count("n_shared_experts", defaults.n_shared_experts)?,
        intermediate_size: fields.size("moe_intermediate_size", defaults.moe_intermediate_size)?,
        per_token,
        groups,
        chosen_groups,
        scaling: scaling as f32,
        gate: match is_v3 {
            true => Gate::Sigmoid { normalise: fields.flag("norm_topk_prob", true)? },
            // transformers' DeepseekV2 does not look at norm_topk_prob.
            false => Gate::Softmax,
        },
    }))
}

/// The first layer with experts, by `mlp_layer_types`, which transformers takes before `first_k_dense_replace`.
fn first_sparse(types: &[&str], num_layers: usize) -> Result<usize, String> {
    let first = types.iter().take_while(|&&kind| kind == "dense").count();
    match types.len() == num_layers && types[first..].iter().all(|&kind| kind == "sparse") {
        true => Ok(first),
        false => {
            let order = "those that are dense first, then those that are sparse";
            Err(format!("mlp_layer_types has {} entries: must have {num_layers}, {order}", types.len()))
        }
    }
}
