//! GGUF files of checkpoints, as llama.cpp's converter lays them out, and what their quantised weights are as safetensors.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};

/// How a file is made.
#[derive(Clone, Copy)]
pub struct Style {
    pub dtype: GgmlDType,
    /// `attn_k_b` and `attn_v_b`, and not `attn_kv_b`.
    pub has_parts: bool,
    /// Gates and what they are multiplied with are one stack.
    pub is_fused: bool,
}

impl Style {
    pub fn new(dtype: GgmlDType) -> Self {
        Self { dtype, has_parts: true, is_fused: false }
    }
}

/// A file before it is written.
pub struct Made {
    pub keys: BTreeMap<String, Value>,
    pub tensors: BTreeMap<String, QTensor>,
    /// The same values, by transformers' names.
    pub values: BTreeMap<String, Tensor>,
    config: serde_json::Value,
}

/// A name in a layer, and that in a GGUF file.
const LAYER: [(&str, &str); 17] = [
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
];

impl Made {
    /// From a checkpoint, with keys of an architecture.
    pub fn new(dir: &Path, arch: &str, style: Style) -> Self {
        let text = std::fs::read_to_string(dir.join("config.json")).expect("a config");
        let config: serde_json::Value = serde_json::from_str(&text).expect("a config");
        let mut made =
            Self { keys: BTreeMap::new(), tensors: BTreeMap::new(), values: BTreeMap::new(), config };
        let mut all: BTreeMap<String, Tensor> =
            candle_core::safetensors::load(dir.join("model.safetensors"), &Device::Cpu)
                .expect("weights")
                .into_iter()
                .map(|(name, it)| (name, it.to_dtype(DType::F32).expect("f32")))
                .collect();
        made.stack_experts(&mut all, style);
        for (name, tensor) in all {
            if name.ends_with("kv_b_proj.weight") {
                made.kv_b(&name, &tensor, style);
            } else {
                let value = made.put(&gguf_name(&name), &tensor, style.dtype);
                made.values.insert(name, value);
            }
        }
        made.keys(arch);
        made
    }

    /// Adds a tensor. Gives what it holds.
    fn put(&mut self, name: &str, tensor: &Tensor, dtype: GgmlDType) -> Tensor {
        let columns = *tensor.dims().last().expect("a dim");
        let is_small = tensor.rank() == 1 || name.contains("ffn_gate_inp.");
        let fallback = [dtype, GgmlDType::Q8_0, GgmlDType::F32]
            .into_iter()
            .find(|it| columns.is_multiple_of(it.block_size()));
        let dtype = if is_small { GgmlDType::F32 } else { fallback.expect("a type") };
        let quantised = QTensor::quantize(tensor, dtype).expect(name);
        let value = quantised.dequantize(&Device::Cpu).expect("values");
        self.tensors.insert(name.into(), quantised);
        value
    }

    fn size(&self, name: &str) -> usize {
        self.config[name].as_u64().unwrap_or_else(|| panic!("{name}")) as usize
    }

    fn kv_b(&mut self, name: &str, tensor: &Tensor, style: Style) {
        let layer = layer_of(name);
        if !style.has_parts {
            let value = self.put(&format!("blk.{layer}.attn_kv_b.weight"), tensor, style.dtype);
            self.values.insert(name.into(), value);
            return;
        }
        let (heads, nope) = (self.size("num_attention_heads"), self.size("qk_nope_head_dim"));
        let (value, latent) = (self.size("v_head_dim"), self.size("kv_lora_rank"));
        let all = tensor.reshape((heads, nope + value, latent)).expect("heads");
        let keys = all.narrow(1, 0, nope).and_then(|it| it.transpose(1, 2)?.contiguous()).expect("keys");
        let values = all.narrow(1, nope, value).and_then(|it| it.contiguous()).expect("values");
        let keys = self.put(&format!("blk.{layer}.attn_k_b.weight"), &keys, style.dtype);
        let values = self.put(&format!("blk.{layer}.attn_v_b.weight"), &values, style.dtype);
        let both = Tensor::cat(&[keys.transpose(1, 2).expect("keys"), values], 1).expect("both");
        let rows = heads * (nope + value);
        self.values.insert(name.into(), both.reshape((rows, latent)).expect("rows"));
    }

    /// Experts that have tensors of their own become stacks, and the other way round.
    fn stack_experts(&mut self, all: &mut BTreeMap<String, Tensor>, style: Style) {
        let experts =
            ["n_routed_experts", "num_local_experts"].iter().find_map(|it| self.config[*it].as_u64());
        for layer in 0..self.size("num_hidden_layers") {
            let name = format!("model.layers.{layer}.mlp.experts");
            let stacks = match all.remove(&format!("{name}.gate_up_proj")) {
                Some(both) => {
                    let inner = both.dims()[1] / 2;
                    let down = all.remove(&format!("{name}.down_proj")).expect("a stack");
                    [
                        both.narrow(1, 0, inner).expect("gates"),
                        both.narrow(1, inner, inner).expect("ups"),
                        down,
                    ]
                }
                None if all.contains_key(&format!("{name}.0.gate_proj.weight")) => {
                    ["gate_proj", "up_proj", "down_proj"].map(|part| {
                        let own = |expert| all.remove(&format!("{name}.{expert}.{part}.weight")).expect(part);
                        Tensor::stack(&(0..experts.expect("a count")).map(own).collect::<Vec<_>>(), 0)
                            .expect(part)
                    })
                }
                None => continue,
            };
            let [gate, up, down] = stacks.map(|it| it.contiguous().expect("a stack"));
            let inner = gate.dims()[1];
            let (gate, up) = match style.is_fused {
                true => {
                    let both = Tensor::cat(&[gate, up], 1).expect("both");
                    let both = self.put(&format!("blk.{layer}.ffn_gate_up_exps.weight"), &both, style.dtype);
                    (both.narrow(1, 0, inner).expect("gates"), both.narrow(1, inner, inner).expect("ups"))
                }
                false => (
                    self.put(&format!("blk.{layer}.ffn_gate_exps.weight"), &gate, style.dtype),
                    self.put(&format!("blk.{layer}.ffn_up_exps.weight"), &up, style.dtype),
                ),
            };
            let down = self.put(&format!("blk.{layer}.ffn_down_exps.weight"), &down, style.dtype);
            for (part, stack) in [("gate_proj", gate), ("up_proj", up), ("down_proj", down)] {
                for expert in 0..stack.dims()[0] {
                    let own = stack.get(expert).and_then(|it| it.contiguous()).expect("an expert");
                    self.values.insert(format!("{name}.{expert}.{part}.weight"), own);
                }
            }
        }
    }

    fn keys(&mut self, arch: &str) {
        let config = self.config.clone();
        let size = |name: &str| Value::U32(config[name].as_u64().unwrap_or_else(|| panic!("{name}")) as u32);
        let sum =
            |a: &str, b: &str| Value::U32((config[a].as_u64().unwrap() + config[b].as_u64().unwrap()) as u32);
        let rope = ["rope_parameters", "rope_scaling"].map(|it| &config[it]);
        let rope = rope.into_iter().find(|it| it.is_object()).cloned().unwrap_or_default();
        let float = |value: &serde_json::Value| Value::F32(value.as_f64().expect("a number") as f32);
        let theta = if rope["rope_theta"].is_null() { &config["rope_theta"] } else { &rope["rope_theta"] };
        let mut keys: Vec<(&str, Value)> = vec![
            ("block_count", size("num_hidden_layers")),
            ("context_length", size("max_position_embeddings")),
            ("embedding_length", size("hidden_size")),
            ("feed_forward_length", size("intermediate_size")),
            ("attention.head_count", size("num_attention_heads")),
            ("attention.layer_norm_rms_epsilon", float(&config["rms_norm_eps"])),
            ("attention.kv_lora_rank", size("kv_lora_rank")),
            ("rope.dimension_count", size("qk_rope_head_dim")),
            ("rope.freq_base", float(theta)),
            ("vocab_size", size("vocab_size")),
        ];
        if !config["q_lora_rank"].is_null() {
            keys.push(("attention.q_lora_rank", size("q_lora_rank")));
        }
        match arch {
            "minicpm3" => {
                keys.push(("attention.key_length", sum("qk_nope_head_dim", "qk_rope_head_dim")));
                keys.push(("attention.value_length", size("v_head_dim")));
            }
            _ => keys.extend([
                ("attention.head_count_kv", Value::U32(1)),
                ("attention.key_length", sum("kv_lora_rank", "qk_rope_head_dim")),
                ("attention.value_length", size("kv_lora_rank")),
                ("attention.key_length_mla", sum("qk_nope_head_dim", "qk_rope_head_dim")),
                ("attention.value_length_mla", size("v_head_dim")),
            ]),
        }
        let experts = ["n_routed_experts", "num_local_experts"].iter().find_map(|it| config[*it].as_u64());
        let has_experts = self.tensors.keys().any(|name| name.ends_with("ffn_gate_inp.weight"));
        if let Some(experts) = experts.filter(|_| has_experts) {
            let is_sigmoid = self.tensors.keys().any(|name| name.ends_with("exp_probs_b.bias"));
            let norm = is_sigmoid || arch == "mistral4";
            let dense = (0..)
                .take_while(|layer| !self.tensors.contains_key(&format!("blk.{layer}.ffn_gate_inp.weight")));
            let scale = config["routed_scaling_factor"].as_f64().unwrap_or(1.0);
            keys.extend([
                ("expert_count", Value::U32(experts as u32)),
                ("expert_used_count", size("num_experts_per_tok")),
                ("expert_shared_count", size("n_shared_experts")),
                ("expert_feed_forward_length", size("moe_intermediate_size")),
                ("expert_weights_scale", Value::F32(scale as f32)),
                (
                    "expert_weights_norm",
                    Value::Bool(norm && config["norm_topk_prob"].as_bool().unwrap_or(true)),
                ),
                ("expert_gating_func", Value::U32(if is_sigmoid { 2 } else { 1 })),
                ("expert_group_count", Value::U32(config["n_group"].as_u64().unwrap_or(1) as u32)),
                ("expert_group_used_count", Value::U32(config["topk_group"].as_u64().unwrap_or(1) as u32)),
                ("leading_dense_block_count", Value::U32(dense.count() as u32)),
            ]);
        }
        let kind = if rope["rope_type"].is_null() { &rope["type"] } else { &rope["rope_type"] };
        let original =
            || Value::U32(rope["original_max_position_embeddings"].as_u64().expect("a length") as u32);
        match kind.as_str() {
            Some("yarn") => {
                let log = 0.1 * rope["mscale_all_dim"].as_f64().expect("a number");
                keys.extend([
                    ("rope.scaling.type", Value::String("yarn".into())),
                    ("rope.scaling.factor", float(&rope["factor"])),
                    ("rope.scaling.original_context_length", original()),
                    ("rope.scaling.yarn_log_multiplier", Value::F32(log as f32)),
                ]);
                if let Some(beta) = rope["llama_4_scaling_beta"].as_f64() {
                    keys.push(("attention.temperature_scale", Value::F32(beta as f32)));
                    keys.push(("attention.temperature_length", original()));
                }
            }
            Some("longrope") => {
                keys.push(("rope.scaling.original_context_length", original()));
                for part in ["short", "long"] {
                    let factors = rope[format!("{part}_factor")].as_array().expect("factors");
                    let factors: Vec<f32> =
                        factors.iter().map(|it| it.as_f64().expect("a number") as f32).collect();
                    let factors = Tensor::new(factors, &Device::Cpu).expect("factors");
                    self.put(&format!("rope_factors_{part}.weight"), &factors, GgmlDType::F32);
                }
            }
            _ => (),
        }
        self.keys = keys.into_iter().map(|(name, value)| (format!("{arch}.{name}"), value)).collect();
        self.keys.insert("general.architecture".into(), Value::String(arch.into()));
        if let Some(eos) = config["eos_token_id"].as_u64() {
            self.keys.insert("tokenizer.ggml.eos_token_id".into(), Value::U32(eos as u32));
        }
    }

    pub fn write(&self, path: &Path) -> PathBuf {
        write(path, &self.keys, self.tensors.iter())
    }

    /// In so many files.
    pub fn write_split(&self, dir: &Path, count: usize) -> Vec<PathBuf> {
        let each = self.tensors.len().div_ceil(count);
        let all: Vec<_> = self.tensors.iter().collect();
        let one = |(no, part): (usize, &[(&String, &QTensor)])| {
            let mut keys = if no == 0 { self.keys.clone() } else { BTreeMap::new() };
            keys.insert("split.no".into(), Value::U16(no as u16));
            keys.insert("split.count".into(), Value::U16(count as u16));
            keys.insert("split.tensors.count".into(), Value::I32(all.len() as i32));
            let name = format!("model-{:05}-of-{count:05}.gguf", no + 1);
            write(&dir.join(name), &keys, part.iter().copied())
        };
        all.chunks(each).enumerate().map(one).collect()
    }

    /// The same as a checkpoint of safetensors, in f32.
    pub fn write_values(&self, dir: &Path) {
        let all = self.values.iter().map(|(name, it)| (name.clone(), it.contiguous().expect("values")));
        let all: std::collections::HashMap<String, Tensor> = all.collect();
        candle_core::safetensors::save(&all, dir.join("model.safetensors")).expect("a file");
        std::fs::write(dir.join("config.json"), self.config.to_string()).expect("a file");
    }
}

fn write<'a>(
    path: &Path,
    keys: &BTreeMap<String, Value>,
    tensors: impl Iterator<Item = (&'a String, &'a QTensor)>,
) -> PathBuf {
    let keys: Vec<_> = keys.iter().map(|(name, value)| (name.as_str(), value)).collect();
    let tensors: Vec<_> = tensors.map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut file = File::create(path).expect("a file");
    gguf_file::write(&mut file, &keys, &tensors).expect("gguf");
    path.into()
}

fn layer_of(name: &str) -> &str {
    name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()).expect("a layer")
}

fn gguf_name(name: &str) -> String {
    match name {
        "model.embed_tokens.weight" => return "token_embd.weight".into(),
        "model.norm.weight" => return "output_norm.weight".into(),
        "lm_head.weight" => return "output.weight".into(),
        _ => (),
    }
    let layer = layer_of(name);
    let part = &name["model.layers.".len() + layer.len() + 1..];
    let known = |(own, theirs): &(&str, &str)| {
        let end = part.strip_prefix(own)?;
        match end {
            "" => Some(format!("blk.{layer}.{theirs}.bias")),
            ".weight" | ".bias" => Some(format!("blk.{layer}.{theirs}{end}")),
            _ => None,
        }
    };
    LAYER.iter().find_map(known).unwrap_or_else(|| panic!("{name}"))
}

/// An empty folder.
pub fn folder(name: &str) -> PathBuf {
    let to = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&to);
    std::fs::create_dir_all(&to).expect("a folder");
    to
}
