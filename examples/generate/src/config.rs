//! `config.json` of a model with DeepSeek's attention, as transformers writes it and as it is shipped.

use std::path::Path;

use serde_json::{Map, Value};
use wgpu_mla::MlaShape;

use crate::fields::Fields;
use crate::indexer::{self, IndexerConfig};
use crate::models::{Fielded, ModelType, Pairs, Router};
use crate::{Error, Generation, Result, RopeConfig, files};

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
    pub scales: Scales,
    /// Whether the model is the part of another that reads and writes text.
    pub is_wrapped: bool,
    /// What a person is to be told of the config: fields that ask for what this type of model does not do.
    pub notices: Vec<String>,
}

/// Factors, which most models do not have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scales {
    /// What embeddings are multiplied by.
    pub embeddings: f32,
    /// The factor of what each half of a layer adds.
    pub residuals: f32,
    /// The factor of the head's input.
    pub head: f32,
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
    /// Whether their sum is normed.
    pub norm: bool,
    /// Groups of experts, and how many of them a token may choose from.
    pub groups: usize,
    pub chosen_groups: usize,
    pub scaling: f32,
    pub gate: Gate,
}

/// How a router's logits become weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gate {
    /// A sigmoid of each, with a bias that only the choice sees; or else the softmax of all.
    pub sigmoid: bool,
    /// A group is as good as so many of its experts together, the best.
    pub best_of_group: usize,
    /// Whether the weights of a token sum to 1.
    pub normalise: bool,
}

impl Config {
    /// Reads and checks `DIR/config.json`. Absent fields have transformers' defaults. Tokens that end a text are those of
    /// `generation_config.json`, where it has any. A GGUF file has all of it in its metadata.
    ///
    /// # Errors
    /// [`Error::File`] that names the field and the cure.
    pub fn open(dir: &Path) -> Result<Self> {
        #[cfg(not(target_arch = "wasm32"))]
        if let Some(gguf) = crate::gguf::Gguf::of(dir)? {
            return gguf.config();
        }
        let path = dir.join("config.json");
        let text = files::read_text(&path, files::missing_config(dir))?;
        let mut config = Self::parse(&text).map_err(|why| Error::file(&path, why))?;
        if let Some(eos) = Generation::open(dir)?.eos {
            config.eos = eos;
        }
        Ok(config)
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
        let Value::Object(config) = value else { return Err("must be an object of fields".into()) };
        Self::from_fields(config)
    }

    /// From the fields of config.json.
    pub(crate) fn from_fields(config: Map<String, Value>) -> Result<Self, String> {
        // First, as another model has other fields.
        let Fielded { kind, fields, is_wrapped } = Fielded::of(config)?;
        let (fields, defaults) = (Fields(&fields), kind.defaults);
        check_what_is_served(&fields, kind)?;
        let num_layers = fields.size("num_hidden_layers", defaults.num_hidden_layers)?;
        let shape = MlaShape {
            num_heads: fields.size("num_attention_heads", defaults.num_attention_heads)? as u32,
            kv_lora_rank: fields.size("kv_lora_rank", defaults.kv_lora_rank)? as u32,
            qk_rope_head_dim: fields.size("qk_rope_head_dim", defaults.qk_rope_head_dim)? as u32,
        };
        // The crate's name of the field is shorter.
        let named = |error: wgpu_mla::Error| error.to_string().replace("num_heads", "num_attention_heads");
        shape.check().map_err(named)?;
        let max_position_embeddings =
            fields.size("max_position_embeddings", defaults.max_position_embeddings)?;
        let interleaved = match kind.pairs {
            Pairs::Adjacent => true,
            Pairs::Halves => false,
            Pairs::Field => fields.flag("rope_interleave", true)?,
        };
        let rope_dim = shape.qk_rope_head_dim;
        let mut rope = RopeConfig::parse(&fields, interleaved, rope_dim, max_position_embeddings, kind.rope)?;
        let ignored = rope.query_scaling.take_if(|_| !kind.scaled_queries);
        let notices = ignored.map(|it| {
            let (beta, name) = (it.beta, kind.name);
            format!("llama_4_scaling_beta {beta}: ignored, as {name} does not scale queries by position; other programs may")
        });
        let hidden_size = fields.size("hidden_size", defaults.hidden_size)?;
        let eps = fields.number("rms_norm_eps")?.unwrap_or(defaults.rms_norm_eps) as f32;
        if eps < 0.0 {
            return Err(format!("rms_norm_eps {eps}: must be 0 or more"));
        }
        let quantization = fields.object("quantization_config")?;
        let quant_method = quantization.map(|it| it.text("quant_method")).transpose()?.flatten();
        Ok(Self {
            vocab_size: fields.size("vocab_size", defaults.vocab_size)?,
            hidden_size,
            num_layers,
            shape,
            qk_nope_head_dim: fields.size("qk_nope_head_dim", defaults.qk_nope_head_dim)?,
            v_head_dim: match defaults.v_head_dim {
                Some(default) => fields.size("v_head_dim", default)?,
                None => {
                    let share = (hidden_size / shape.num_heads as usize).max(1);
                    fields.optional_size("v_head_dim", None)?.unwrap_or(share)
                }
            },
            q_lora_rank: fields.optional_size("q_lora_rank", defaults.q_lora_rank)?,
            intermediate_size: fields.size("intermediate_size", defaults.intermediate_size)?,
            experts: match kind.router {
                Some(router) => experts(&fields, kind, router, num_layers)?,
                None => None,
            },
            rms_norm_eps: eps,
            tie_word_embeddings: fields.flag("tie_word_embeddings", defaults.tie_word_embeddings)?,
            attention_bias: fields.flag("attention_bias", false)?,
            mlp_bias: kind.mlp_bias && fields.flag("mlp_bias", false)?,
            rope,
            max_position_embeddings,
            indexer: defaults
                .indexer
                .as_ref()
                .map(|defaults| indexer::parse(&fields, defaults, num_layers, shape.qk_rope_head_dim))
                .transpose()?,
            eos: fields.tokens("eos_token_id", defaults.eos_token_id)?,
            quant_method: quant_method.map(Into::into),
            scales: scales(&fields, kind, hidden_size, num_layers)?,
            is_wrapped,
            notices: notices.into_iter().collect(),
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

    /// # Errors
    /// [`Error::Input`] for a token that the model does not have.
    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let size = self.vocab_size;
        match tokens.iter().find(|&&token| token as usize >= size) {
            None => Ok(()),
            Some(token) => Err(Error::Input(format!(
                "token {token}: the model has {size}; use the tokenizer.json that came with it"
            ))),
        }
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

fn check_what_is_served(fields: &Fields<'_>, kind: &ModelType) -> Result<(), String> {
    let served = |name: &str, only: &str| match fields.text(name)? {
        Some(other) if other != only => Err(format!("{name} {other}: must be {only} for this model_type")),
        _ => Ok(()),
    };
    served("hidden_act", "silu")?;
    match kind.router {
        None => return Ok(()),
        Some(Router::V2 | Router::Mistral4) => served("scoring_func", "softmax")?,
        Some(Router::V3) => served("scoring_func", "sigmoid")?,
    }
    // A.X-K1 has a method of its own name, and the same router.
    if kind.router == Some(Router::V3) && !kind.post_mlp_norm {
        served("topk_method", "noaux_tc")?;
    }
    match fields.count("moe_layer_freq", 1)? {
        1 => Ok(()),
        other => Err(format!("moe_layer_freq {other}: must be 1")),
    }
}

/// MiniCPM3's; transformers reads `null` as no scaling.
fn scales(
    fields: &Fields<'_>,
    kind: &ModelType,
    hidden_size: usize,
    num_layers: usize,
) -> Result<Scales, String> {
    if !kind.scales {
        return Ok(Scales { embeddings: 1.0, residuals: 1.0, head: 1.0 });
    }
    let or = |name: &str, default: f64, none: f64| match fields.0.get(name) {
        None => Ok(default),
        Some(_) => Ok::<f64, String>(fields.number(name)?.unwrap_or(none)),
    };
    let layers = (num_layers as f64).sqrt();
    Ok(Scales {
        embeddings: or("scale_emb", 12.0, 1.0)? as f32,
        residuals: (or("scale_depth", 1.4, layers)? / layers) as f32,
        head: (or("dim_model_base", 256.0, hidden_size as f64)? / hidden_size as f64) as f32,
    })
}

fn experts(
    fields: &Fields<'_>,
    kind: &ModelType,
    router: Router,
    num_layers: usize,
) -> Result<Option<ExpertsConfig>, String> {
    let defaults = kind.defaults;
    // `null` is a dense model, as in DeepSeek's own code.
    let Some(num_experts) = fields.optional_size("n_routed_experts", defaults.n_routed_experts)? else {
        return Ok(None);
    };
    let types = if kind.layer_types { fields.strings("mlp_layer_types")? } else { None };
    let first_layer = match types {
        Some(types) => first_sparse(&types, num_layers)?,
        None => fields.count("first_k_dense_replace", defaults.first_k_dense_replace)?,
    };
    if first_layer >= num_layers {
        return Ok(None);
    }
    let need = |name: &str, default: Option<usize>| {
        let missing = || format!("{name}: missing, and n_routed_experts is {num_experts}; give it");
        fields.optional_size(name, default)?.ok_or_else(missing)
    };
    let grouped = router != Router::V2
        || match fields.text("topk_method")?.unwrap_or("greedy") {
            "greedy" => false,
            "group_limited_greedy" => true,
            other => return Err(format!("topk_method {other}: must be greedy or group_limited_greedy")),
        };
    let groups = if grouped { need("n_group", defaults.n_group)? } else { 1 };
    let chosen_groups = if grouped { need("topk_group", defaults.topk_group)? } else { 1 };
    let per_token = need("num_experts_per_tok", defaults.num_experts_per_tok)?;
    let best_of_group = if router == Router::V2 { 1 } else { 2 };
    if num_experts % groups != 0 || num_experts / groups < best_of_group || chosen_groups > groups {
        return Err(format!(
            "n_routed_experts {num_experts}, n_group {groups}, topk_group {chosen_groups}: groups must be of one size, at least {best_of_group}, and as many as are chosen"
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
        norm: kind.post_mlp_norm,
        gate: Gate {
            sigmoid: router == Router::V3,
            best_of_group,
            // transformers' DeepseekV2 does not look at it.
            normalise: router != Router::V2 && fields.flag("norm_topk_prob", true)?,
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
