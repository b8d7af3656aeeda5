//! The model types that are served, and what each has beyond DeepSeek-V3. The table is what a new one is added to.

use serde_json::{Map, Value};

use crate::defaults::{self, Defaults};

/// What a `model_type` of config.json stands for.
pub struct ModelType {
    pub name: &'static str,
    pub defaults: &'static Defaults,
    /// `None`: all layers are dense, whatever fields of experts say.
    pub router: Option<Router>,
    pub pairs: Pairs,
    /// Other names of fields, and the fields.
    pub aliases: &'static [(&'static str, &'static str)],
    /// Whether `mlp_layer_types` comes before `first_k_dense_replace`.
    pub layer_types: bool,
    /// Whether `mlp_bias` is read.
    pub mlp_bias: bool,
    /// Whether embeddings, residuals and the head's input are scaled: `scale_emb`, `scale_depth`, `dim_model_base`.
    pub scales: bool,
    /// Whether the experts' sum is normed.
    pub post_mlp_norm: bool,
    /// Whether queries are scaled by position: `llama_4_scaling_beta`.
    pub scaled_queries: bool,
    /// The rotary fields, as JSON, where a config has none. Otherwise RoPE is plain.
    pub rope: Option<&'static str>,
}

/// How experts are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Router {
    /// Softmax; `topk_method` says whether there are groups, and a group is as good as its best expert.
    V2,
    /// Sigmoid, and a bias that only the choice sees; a group is as good as its best two experts together.
    V3,
    /// Softmax; groups as for [`Router::V3`].
    Mistral4,
}

/// Which elements RoPE turns together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairs {
    /// `(x0, x1), (x2, x3), ..`
    Adjacent,
    /// `(x0, x[R/2]), ..`
    Halves,
    /// `rope_interleave` decides; adjacent unless it is given.
    Field,
}

const V3: ModelType = ModelType {
    name: "deepseek_v3",
    defaults: &defaults::V3,
    router: Some(Router::V3),
    pairs: Pairs::Field,
    aliases: &[("num_local_experts", "n_routed_experts")],
    layer_types: false,
    mlp_bias: false,
    scales: false,
    post_mlp_norm: false,
    scaled_queries: false,
    rope: None,
};
const V2: ModelType = ModelType {
    name: "deepseek_v2",
    defaults: &defaults::V2,
    router: Some(Router::V2),
    pairs: Pairs::Adjacent,
    mlp_bias: true,
    ..V3
};
const YOUTU: ModelType = ModelType { name: "youtu", defaults: &defaults::YOUTU, router: None, ..V3 };

static SERVED: [ModelType; 12] = [
    V2,
    V3,
    // DeepSeek-V3's code under a name of its own, without a class in transformers.
    ModelType { name: "kimi_k2", ..V3 },
    ModelType { name: "deepseek_v32", defaults: &defaults::V32, layer_types: true, ..V3 },
    ModelType { name: "glm_moe_dsa", defaults: &defaults::GLM_DSA, layer_types: true, ..V3 },
    ModelType { name: "glm4_moe_lite", defaults: &defaults::GLM4_MOE_LITE, layer_types: true, ..V3 },
    YOUTU,
    // The name in configs from before transformers had the class.
    ModelType { name: "youtu_llm", ..YOUTU },
    ModelType {
        name: "sarvam_mla",
        defaults: &defaults::SARVAM_MLA,
        aliases: &[
            ("num_local_experts", "n_routed_experts"),
            ("num_experts", "n_routed_experts"),
            ("num_shared_experts", "n_shared_experts"),
        ],
        ..V3
    },
    ModelType { name: "axk1", defaults: &defaults::AXK1, layer_types: true, post_mlp_norm: true, ..V3 },
    ModelType {
        name: "minicpm3",
        defaults: &defaults::MINICPM3,
        router: None,
        pairs: Pairs::Halves,
        mlp_bias: true,
        scales: true,
        ..V3
    },
    ModelType {
        name: "mistral4",
        defaults: &defaults::MISTRAL4,
        router: Some(Router::Mistral4),
        scaled_queries: true,
        rope: Some(defaults::MISTRAL4_ROPE),
        ..V3
    },
];

/// MLA models that are not served, and the part of each that is missing here. Their text and vision models have the name too.
const UNSERVED: [(&str, &str); 9] = [
    ("longcat_flash", "layers of two attentions, experts that do nothing, and a shortcut around the others"),
    (
        "kimi_linear",
        "Kimi Delta Attention, which most of its layers have, and attention without rotary positions",
    ),
    ("bailing_hybrid", "Kimi Delta Attention, which most of its layers have, and gates of heads"),
    ("glm5_next", "Kimi Delta Attention, an indexer of pooled keys, and hyper-connections"),
    ("hy_v4", "attention sinks that were learned, an output gate, and hyper-connections"),
    ("dots3_note", "gates of heads, a norm of rotary keys, and sliding windows"),
    ("mistral_large4", "layers without rotary positions, caches that layers share, and capped logits"),
    ("axk2", "a latent of 128 elements, gated norms, and an output gate"),
    ("deepseek_v4", "caches that are compressed over tokens, sliding windows, and hyper-connections"),
];

/// The fields of the language model, and what its type stands for.
pub struct Fielded {
    pub kind: &'static ModelType,
    pub fields: Map<String, Value>,
    /// Whether the config wraps that of a language model, as those of models that see do.
    pub is_wrapped: bool,
}

impl Fielded {
    /// From all of config.json. A wrapper's fields stand for those that its `text_config` lacks, and its `tie_word_embeddings` decides,
    /// as in transformers.
    ///
    /// # Errors
    /// A type that is not served; a field that has two names and two values.
    pub fn of(config: Map<String, Value>) -> Result<Self, String> {
        let name_of =
            |fields: &Map<String, Value>| fields.get("model_type").and_then(Value::as_str).map(str::to_owned);
        let outer_name = name_of(&config);
        if let Some(name) = &outer_name {
            check_served(name)?;
        }
        let text = config.get("text_config").and_then(Value::as_object).filter(|text| !text.is_empty());
        let is_wrapped = text.is_some();
        let mut fields = match text {
            Some(text) => wrapped(text, &config),
            None => config.clone(),
        };
        let name = match name_of(&fields) {
            // transformers' default for this wrapper.
            None if outer_name.as_deref() == Some("kimi_k25") => "deepseek_v3".into(),
            name => name.unwrap_or_else(|| "missing".into()),
        };
        check_served(&name)?;
        let Some(kind) = SERVED.iter().find(|kind| kind.name == name) else {
            return Err(format!("model_type {}: must be {}", crate::fields::short(&name), names()));
        };
        for (other, own) in kind.aliases {
            let Some(value) = fields.remove(*other) else { continue };
            match fields.get(*own) {
                Some(given) if *given != value => {
                    return Err(format!(
                        "{own} {given} and {other} {value}: must be the same; delete the wrong one"
                    ));
                }
                _ => drop(fields.insert((*own).into(), value)),
            }
        }
        Ok(Self { kind, fields, is_wrapped })
    }
}

fn wrapped(text: &Map<String, Value>, outer: &Map<String, Value>) -> Map<String, Value> {
    let mut fields = text.clone();
    for name in ["quantization_config", "eos_token_id"] {
        if let (None, Some(value)) = (fields.get(name), outer.get(name)) {
            fields.insert(name.into(), value.clone());
        }
    }
    let tied = match (outer.get("tie_word_embeddings"), outer.get("model_type").and_then(Value::as_str)) {
        (None, Some("kimi_k25")) => Some(Value::Bool(true)),
        (given, _) => given.cloned(),
    };
    if let Some(tied) = tied {
        fields.insert("tie_word_embeddings".into(), tied);
    }
    fields
}

fn check_served(name: &str) -> Result<(), String> {
    let stem = |name: &str| {
        ["_text", "_vl"].iter().fold(name.to_owned(), |name, end| name.trim_end_matches(end).into())
    };
    match UNSERVED.iter().find(|(unserved, _)| *unserved == stem(name)) {
        None => Ok(()),
        Some((_, missing)) => {
            Err(format!("model_type {name} is not served, as it needs {missing}; use one of {}", names()))
        }
    }
}

/// All types that are served, for an error.
fn names() -> String {
    let names: Vec<&str> = SERVED.iter().map(|kind| kind.name).collect();
    let (last, others) = names.split_last().unwrap_or((&"", &[]));
    format!("{} or {last}", others.join(", "))
}
