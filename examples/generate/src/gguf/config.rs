//! The config of a GGUF file: its keys as the fields that config.json has, which are then checked as those.

use serde_json::{Map, Value, json};

use super::Gguf;
use super::keys::{Keys, decimal, missing};
use super::names::FACTORS;
use super::tokenizer;
use crate::Config;
use crate::rope::QueryScaling;

/// What is read, and what serves others.
const SERVED: [&str; 3] = ["deepseek2", "minicpm3", "mistral4"];

/// Keys that say nothing more than tensors or other keys do.
const KNOWN: [&str; 8] = [
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "vocab_size",
    "nextn_predict_layers",
    "expert_feed_forward_length",
    "expert_shared_count",
    "rope.scaling.finetuned",
];

/// What parts of a model the keys of its attention, RoPE and experts begin with: one that nothing reads may change what it computes.
const MATTERS: [&str; 5] = ["attention.", "rope.", "expert", "embedding_scale", "logit_scale"];

/// Numbers of `expert_gating_func`.
const SOFTMAX: usize = 1;
const SIGMOID: usize = 2;

/// # Errors
/// A model that is not served; a key that is missing, malformed, or unexpected.
pub fn read(gguf: &Gguf) -> Result<Config, String> {
    let keys = &gguf.keys;
    let arch = keys.text("general.architecture")?.ok_or_else(|| missing("general.architecture"))?;
    if !SERVED.contains(&arch) {
        return Err(format!(
            "general.architecture {arch}: must be {}; take a checkpoint in Hugging Face's format of other models",
            SERVED.join(", ")
        ));
    }
    let model = Model { gguf, keys, arch };
    let (fields, mut notices) = model.fields()?;
    let mut config = Config::from_fields(fields)?;
    config.rope.query_scaling = model.query_scaling()?;
    if arch == "mistral4" && config.rope.query_scaling.is_none() {
        let what = "queries are not scaled by position, as the model was trained beyond its first ones";
        notices.push(format!("mistral4.attention.temperature_scale is missing: {what}"));
    }
    config.eos = tokenizer::ends(keys)?;
    for key in keys.left(&format!("{arch}.")) {
        let part = &key[arch.len() + 1..];
        if KNOWN.contains(&part) {
            continue;
        }
        match MATTERS.iter().any(|begin| part.starts_with(begin)) {
            true => {
                return Err(format!(
                    "{key} is not known, and may change what the model computes; take a checkpoint in Hugging Face's format"
                ));
            }
            false => notices.push(format!("{key} is not known, and ignored")),
        }
    }
    config.notices.extend(notices);
    Ok(config)
}

struct Model<'a> {
    gguf: &'a Gguf,
    keys: &'a Keys,
    arch: &'a str,
}

impl Model<'_> {
    fn key(&self, part: &str) -> String {
        format!("{}.{part}", self.arch)
    }

    fn needed(&self, part: &str) -> Result<usize, String> {
        self.keys.needed(&self.key(part))
    }

    fn size(&self, part: &str) -> Result<Option<usize>, String> {
        self.keys.size(&self.key(part))
    }

    fn number(&self, part: &str) -> Result<Option<f64>, String> {
        self.keys.number(&self.key(part))
    }

    fn tensor(&self, name: &str) -> Result<&super::Tensor, String> {
        self.gguf.tensors.get(name).ok_or_else(|| format!("no tensor {name}; download the file again"))
    }

    /// The fields of config.json, and what a person is to be told.
    fn fields(&self) -> Result<(Map<String, Value>, Vec<String>), String> {
        let mut notices = Vec::new();
        let rotary = self.needed("rope.dimension_count")?;
        let (heads, hidden) = (self.needed("attention.head_count")?, self.needed("embedding_length")?);
        // Since 2025 the plain lengths are those of the cache's rows.
        let (key, value) = match self.size("attention.key_length_mla")? {
            Some(key) => (key, self.needed("attention.value_length_mla")?),
            None => {
                let value = self.size("attention.value_length")?;
                (self.needed("attention.key_length")?, value.unwrap_or(hidden / heads.max(1)))
            }
        };
        let nope = key.checked_sub(rotary).ok_or_else(|| {
            format!("{} {rotary}: must be at most the {key} of a key", self.key("rope.dimension_count"))
        })?;
        let eps = self.number("attention.layer_norm_rms_epsilon")?;
        let vocab = self.tensor("token_embd.weight")?.shape.first().copied().unwrap_or(0);
        let mut fields = json!({
            "vocab_size": vocab,
            "hidden_size": hidden,
            "num_hidden_layers": self.layers()?,
            "num_attention_heads": heads,
            "intermediate_size": self.needed("feed_forward_length")?,
            "max_position_embeddings": self.needed("context_length")?,
            "q_lora_rank": self.size("attention.q_lora_rank")?,
            "kv_lora_rank": self.needed("attention.kv_lora_rank")?,
            "qk_rope_head_dim": rotary,
            "qk_nope_head_dim": nope,
            "v_head_dim": value,
            "rms_norm_eps": eps.ok_or_else(|| missing(&self.key("attention.layer_norm_rms_epsilon")))?,
            "tie_word_embeddings": !self.gguf.tensors.contains_key("output.weight"),
            "rope_parameters": self.rope()?,
        });
        let (kind, experts) = match self.arch {
            "minicpm3" => ("minicpm3", Value::Null),
            arch => self.experts(arch, &mut notices)?,
        };
        fields["model_type"] = kind.into();
        for (name, value) in experts.as_object().into_iter().flatten() {
            fields[name] = value.clone();
        }
        match fields {
            Value::Object(fields) => Ok((fields, notices)),
            _ => Ok((Map::new(), notices)),
        }
    }

    /// Layers of the model's own: those that foretell several tokens come after them.
    fn layers(&self) -> Result<usize, String> {
        let all = self.needed("block_count")?;
        let is_nextn = |layer: &usize| {
            let begin = format!("blk.{layer}.nextn.");
            self.gguf.tensors.range(begin.clone()..).next().is_some_and(|(name, _)| name.starts_with(&begin))
        };
        Ok(all - (0..all.min(1 << 16)).rev().take_while(is_nextn).count())
    }

    /// The type of a model with experts, and their fields.
    fn experts(&self, arch: &str, notices: &mut Vec<String>) -> Result<(&'static str, Value), String> {
        let dense = json!({"n_routed_experts": null});
        let Some(count) = self.size("expert_count")?.filter(|&count| count > 0) else {
            return Ok((if arch == "mistral4" { "mistral4" } else { "deepseek_v3" }, dense));
        };
        let has_bias = self.gguf.tensors.keys().any(|name| name.ends_with(".exp_probs_b.bias"));
        let gate = match (self.size("expert_gating_func")?, has_bias) {
            (Some(0) | None, true) => SIGMOID,
            (Some(0) | None, false) => SOFTMAX,
            (Some(gate), _) => gate,
        };
        let norm = self.keys.flag(&self.key("expert_weights_norm"))?.unwrap_or(false);
        let kind = match (arch, gate) {
            ("mistral4", SOFTMAX) => "mistral4",
            ("deepseek2", SIGMOID) => "deepseek_v3",
            ("deepseek2", SOFTMAX) if !norm => "deepseek_v2",
            ("deepseek2", SOFTMAX) => {
                return Err(format!(
                    "{} true: must be false with a softmax",
                    self.key("expert_weights_norm")
                ));
            }
            _ => {
                let which = if arch == "mistral4" { "1" } else { "1 or 2" };
                return Err(format!("{} {gate}: must be {which}", self.key("expert_gating_func")));
            }
        };
        let (groups, chosen) = (self.size("expert_group_count")?, self.size("expert_group_used_count")?);
        if groups.is_none() && kind == "deepseek_v3" {
            notices.push(format!(
                "{} is missing: a token chooses among all experts",
                self.key("expert_group_count")
            ));
        }
        let groups = groups.unwrap_or(1).max(1);
        let scale = self.number("expert_weights_scale")?.filter(|&scale| scale != 0.0);
        Ok((
            kind,
            json!({
                "n_routed_experts": count,
                "num_experts_per_tok": self.needed("expert_used_count")?,
                "n_shared_experts": self.size("expert_shared_count")?.unwrap_or(0),
                "moe_intermediate_size": self.needed("expert_feed_forward_length")?,
                "first_k_dense_replace": self.size("leading_dense_block_count")?.unwrap_or(0),
                "n_group": groups,
                "topk_group": chosen.filter(|&chosen| chosen > 0).unwrap_or(groups),
                "topk_method": if kind == "deepseek_v2" && groups > 1 { "group_limited_greedy" }
                    else if kind == "deepseek_v2" { "greedy" } else { "noaux_tc" },
                "routed_scaling_factor": scale.unwrap_or(1.0),
                "norm_topk_prob": norm,
            }),
        ))
    }

    fn rope(&self) -> Result<Value, String> {
        let theta = self.number("rope.freq_base")?.unwrap_or(10_000.0);
        let original = self.size("rope.scaling.original_context_length")?;
        let factor = self.number("rope.scaling.factor")?;
        let kind = self.keys.text(&self.key("rope.scaling.type"))?;
        for (part, served) in [
            ("rope.scaling.attn_factor", 1.0),
            ("rope.scaling.yarn_attn_factor", 1.0),
            ("rope.scaling.yarn_ext_factor", 1.0),
            ("rope.scale_linear", 1.0),
        ] {
            if let Some(other) = self.number(part)?.filter(|&other| other != served) {
                return Err(format!("{} {other}: must be {served}", self.key(part)));
            }
        }
        let betas =
            [self.number("rope.scaling.yarn_beta_fast")?, self.number("rope.scaling.yarn_beta_slow")?];
        let log = self.number("rope.scaling.yarn_log_multiplier")?;
        if let Some([short, long]) = self.factors()? {
            let context = self.needed("context_length")?;
            return Ok(
                json!({"rope_type": "longrope", "rope_theta": theta, "short_factor": short, "long_factor": long,
                "original_max_position_embeddings": original.unwrap_or(context)}),
            );
        }
        match kind {
            Some("yarn") => {
                let factor = factor.ok_or_else(|| missing(&self.key("rope.scaling.factor")))?;
                let original =
                    original.ok_or_else(|| missing(&self.key("rope.scaling.original_context_length")))?;
                // The converter writes a tenth of it; models that have it have an equal `mscale`.
                let mscale = log.map(|log| 10.0 * log);
                Ok(
                    json!({"rope_type": "yarn", "rope_theta": theta, "factor": factor, "beta_fast": betas[0], "beta_slow": betas[1],
                    "original_max_position_embeddings": original, "mscale": mscale, "mscale_all_dim": mscale}),
                )
            }
            None | Some("none" | "linear") if factor.is_none_or(|factor| factor == 1.0 || factor == 0.0) => {
                Ok(json!({"rope_type": "default", "rope_theta": theta}))
            }
            other => Err(format!(
                "{} {}: must be yarn, or none",
                self.key("rope.scaling.type"),
                other.unwrap_or("missing, with a factor")
            )),
        }
    }

    /// LongRoPE's `short_factor` and `long_factor`.
    fn factors(&self) -> Result<Option<[Vec<f64>; 2]>, String> {
        let values = |name: &str| {
            let tensor = self.gguf.tensors.get(name)?;
            let values = tensor.encoding.decode(&self.gguf.files[tensor.file].all()[tensor.part.clone()]);
            Some(values.into_iter().map(decimal).collect())
        };
        match FACTORS.map(values) {
            [Some(short), Some(long)] => Ok(Some([short, long])),
            [None, None] => Ok(None),
            _ => Err(format!("only one of {}; download the file again", FACTORS.join(" and "))),
        }
    }

    /// The scale of queries by their position, of the models that have one.
    fn query_scaling(&self) -> Result<Option<QueryScaling>, String> {
        let beta = self.number("attention.temperature_scale")?.filter(|&beta| beta != 0.0);
        let length = match self.size("attention.temperature_length")?.filter(|&length| length > 0) {
            Some(length) => Some(length),
            None => self.size("rope.scaling.original_context_length")?,
        };
        let Some(beta) = beta else { return Ok(None) };
        match length.filter(|&length| length > 0) {
            Some(original) => Ok(Some(QueryScaling { beta, original: original as f64 })),
            None => Err(missing(&self.key("attention.temperature_length"))),
        }
    }
}
