//! A checkpoint that cannot be served is an error that names the cure; what transformers loads, loads.

mod common;

use common::changed::{Stored, changed, must_refuse, with_fields, with_tensors};
use common::path;
use generate::{Checkpoint, Config};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

#[test]
fn bad_configs_are_refused() {
    must_refuse(Config::open(&path("no such folder")), "name the directory of a checkpoint");
    must_refuse(Config::open(&path("Cargo.toml")), "name the directory of a checkpoint");
    let dir = changed("config", "v3-halves", "config.json", |text| text);
    let good = std::fs::read_to_string(dir.join("config.json")).expect("a config");
    for (field, value, cure) in [
        ("model_type", json!("llama"), "model_type llama: must be deepseek_v2"),
        ("kv_lora_rank", json!(500), "must be 512/64"),
        ("hidden_act", json!("gelu"), "must be silu"),
        ("scoring_func", json!("softmax"), "scoring_func softmax: must be sigmoid for this model_type"),
        ("topk_method", json!("greedy"), "topk_method greedy: must be noaux_tc"),
        ("rope_parameters", json!({"rope_type": "dynamic"}), "must be default or yarn"),
        ("rope_scaling", json!({"rope_type": "default", "type": "yarn"}), "must be the same"),
        ("rope_scaling", json!({"type": "yarn", "factor": "4"}), "factor \"4\": must be a number"),
        ("rope_scaling", json!([]), "rope_scaling []: must be an object"),
        ("n_group", json!(3), "groups must be of one size"),
        ("n_group", Value::Null, "n_group: missing"),
        ("vocab_size", json!(u64::MAX), "vocab_size 18446744073709551615: must be a whole number from 1 to"),
        ("num_hidden_layers", json!(-1), "num_hidden_layers -1: must be"),
        ("hidden_size", json!(0), "hidden_size 0: must be"),
        ("qk_rope_head_dim", json!(0), "qk_rope_head_dim 0: must be"),
        ("num_attention_heads", json!("x".repeat(1000)), "x..: must be a whole number"),
        ("max_position_embeddings", json!(1e30), "max_position_embeddings 1e+30: must be"),
        (
            "routed_scaling_factor",
            json!(1e300),
            "routed_scaling_factor 1e+300: must be a number that f32 holds",
        ),
        ("eos_token_id", json!([1, -1]), "eos_token_id [1,-1]: must be a token id"),
        ("norm_topk_prob", json!("yes"), "norm_topk_prob \"yes\": must be true or false"),
    ] {
        std::fs::write(dir.join("config.json"), &good).expect("a file");
        with_fields(&dir, &[(field, value)]);
        must_refuse(Config::open(&dir), cure);
    }
    for (text, cure) in [
        (r#"{"model_type": "gpt2", "n_embd": 768}"#, "model_type gpt2: must be deepseek_v2"),
        (r#"{"vocab_size": 8}"#, "model_type missing: must be"),
        ("[]", "must be an object"),
        ("{", "has to be the config of a DeepSeek"),
        (
            r#"{"model_type": "deepseek_v2", "scoring_func": "sigmoid"}"#,
            "must be softmax for this model_type",
        ),
        (r#"{"model_type": "kimi_k2", "scoring_func": "softmax"}"#, "must be sigmoid for this model_type"),
        (r#"{"model_type": "deepseek_v2"}"#, "num_experts_per_tok: missing"),
    ] {
        std::fs::write(dir.join("config.json"), text).expect("a file");
        must_refuse(Config::open(&dir), cure);
    }
}

/// The defaults are those of transformers 5.17.0.
#[test]
fn absent_fields_have_the_defaults_of_transformers() {
    let dir = changed("defaults", "v3-dense", "config.json", |_| r#"{"model_type": "deepseek_v3"}"#.into());
    let v3 = Config::open(&dir).expect("a config");
    assert_eq!((v3.vocab_size, v3.hidden_size, v3.num_layers), (129_280, 7168, 61));
    assert_eq!((v3.intermediate_size, v3.q_lora_rank, v3.rms_norm_eps), (18_432, Some(1536), 1e-6));
    assert_eq!((v3.shape.num_heads, v3.shape.kv_lora_rank, v3.shape.qk_rope_head_dim), (128, 512, 64));
    assert_eq!((v3.qk_nope_head_dim, v3.v_head_dim, v3.max_position_embeddings), (128, 128, 4096));
    assert_eq!((v3.tie_word_embeddings, v3.rope.interleaved, v3.eos), (false, true, vec![1]));
    let experts = v3.experts.expect("experts");
    assert_eq!((experts.first_layer, experts.num_experts, experts.num_shared), (3, 256, 1));
    assert_eq!((experts.per_token, experts.groups, experts.chosen_groups), (8, 8, 4));
    assert_eq!((experts.intermediate_size, experts.scaling), (2048, 2.5));

    let text = r#"{"model_type": "deepseek_v2", "num_experts_per_tok": 6, "q_lora_rank": null}"#;
    std::fs::write(dir.join("config.json"), text).expect("a file");
    let v2 = Config::open(&dir).expect("a config");
    assert_eq!((v2.vocab_size, v2.hidden_size, v2.num_layers), (102_400, 4096, 32));
    assert_eq!((v2.intermediate_size, v2.q_lora_rank, v2.shape.num_heads), (11_008, None, 32));
    assert_eq!((v2.max_position_embeddings, v2.eos), (2048, vec![2]));
    let experts = v2.experts.expect("experts");
    assert_eq!((experts.first_layer, experts.num_experts, experts.num_shared), (0, 64, 2));
    assert_eq!((experts.per_token, experts.groups, experts.scaling), (6, 1, 1.0));
}

/// The fields as DeepSeek ships them for DeepSeek-V3; its weights decide whether they are served.
#[test]
fn the_config_that_deepseek_ships_is_read() {
    let config = json!({
        "model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "num_attention_heads": 128,
        "n_shared_experts": 1, "n_routed_experts": 256, "ep_size": 1, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "topk_method": "noaux_tc",
        "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 3,
        "norm_topk_prob": true, "scoring_func": "sigmoid", "hidden_act": "silu", "max_position_embeddings": 163_840,
        "rms_norm_eps": 1e-6, "rope_theta": 10_000, "tie_word_embeddings": false, "eos_token_id": 1,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn"},
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": [128, 128]},
    });
    let dir = changed("shipped", "v3-dense", "config.json", |_| config.to_string());
    let config = Config::open(&dir).expect("a config");
    assert_eq!((config.rope.softmax_mscale, config.rope.interleaved), ((40.0, 1.0), true));
    assert_eq!((config.quant_method.as_deref(), config.eos), (Some("fp8"), vec![1]));
}

/// transformers adds `rope_type` where a config had `type`.
#[test]
fn a_config_that_transformers_saved_again_is_the_same() {
    let dir = changed("again", "v2-groups", "config.json", |text| text);
    let before = Config::open(&dir).expect("a config").rope;
    let both = |text: String| text.replace(r#""rope_type""#, r#""type": "yarn", "rope_type""#);
    let dir = changed("again", "v2-groups", "config.json", both);
    assert_eq!(Config::open(&dir).expect("a config").rope, before);
}

#[test]
fn files_that_are_not_the_checkpoints_are_refused() {
    let index = "model.safetensors.index.json";
    let missing = changed("lost", "v3-halves", index, |text| text.replace("model-00001", "model-00009"));
    must_refuse(Checkpoint::open(&missing), "download all files");
    for name in [
        "/dev/zero",
        "/dev/zero.safetensors",
        "../model.safetensors",
        "..",
        "a/b.safetensors",
        "C:x.safetensors",
        "..\\x.safetensors",
        "NUL.safetensors",
        "com1.safetensors",
        ".safetensors",
        "x.bin",
        "",
    ] {
        let text = json!({"weight_map": {"model.norm.weight": name}}).to_string();
        let dir = changed("outside", "v3-halves", index, |_| text.clone());
        must_refuse(Checkpoint::open(&dir), "must be the name of a .safetensors file");
    }
    let short = changed("short", "v3-halves", "config.json", |text| text);
    for bytes in [&b"cut off"[..], b"", b"\xff\xff\xff\xff\xff\xff\xff\xff{}", b"\x02\0\0\0\0\0\0\0{}more"] {
        std::fs::write(short.join("model-00001-of-00006.safetensors"), bytes).expect("a file");
        must_refuse(Checkpoint::open(&short), "download it again");
    }
    for (file, cure) in [
        (
            "pytorch_model.bin",
            "pytorch_model.bin is a file of PyTorch, which is not read here; save it as safetensors",
        ),
        ("model.gguf", "model.gguf has weights too: name that file instead of the directory"),
    ] {
        let dir = changed("other", "v3-dense", "config.json", |text| text);
        std::fs::rename(dir.join("model.safetensors"), dir.join(file)).expect("a file");
        must_refuse(Checkpoint::open(&dir), cure);
    }
    let gguf = changed("gguf", "v3-dense", "config.json", |text| text);
    std::fs::rename(gguf.join("config.json"), gguf.join("model.gguf")).expect("a file");
    must_refuse(Checkpoint::open(&gguf), "there are GGUF files: name one of them instead of the directory");
    must_refuse(Checkpoint::open(&gguf.join("model.gguf")), "it must be GGUF of version 1 to 3");
    let none = changed("none", "v3-halves", "config.json", |text| text);
    must_refuse(Checkpoint::open(&none).and_then(|checkpoint| checkpoint.tokenizer()), "tokenizer.json");
}

#[cfg(unix)]
#[test]
fn a_device_is_not_opened_and_a_link_to_a_file_is() {
    use std::os::unix::fs::symlink;
    let dir = changed("links", "v3-dense", "config.json", |text| text);
    std::fs::rename(dir.join("model.safetensors"), dir.join("blob")).expect("a file");
    symlink(dir.join("blob"), dir.join("model.safetensors")).expect("a link");
    Checkpoint::open(&dir).expect("as in Hugging Face's cache");
    for file in ["model.safetensors", "config.json", "kv_cache_scales.json"] {
        let dir = changed("devices", "v3-dense", "config.json", |text| text);
        let _ = std::fs::remove_file(dir.join(file));
        symlink("/dev/zero", dir.join(file)).expect("a link");
        must_refuse(Checkpoint::open(&dir), "not a regular file");
    }
    let pipe = changed("pipes", "v3-dense", "config.json", |text| text);
    std::fs::remove_file(pipe.join("model.safetensors")).expect("a file");
    let made = std::process::Command::new("mkfifo").arg(pipe.join("model.safetensors")).status();
    assert!(made.expect("mkfifo").success());
    must_refuse(Checkpoint::open(&pipe), "not a regular file");
}

/// A size is compared with the tensor's before anything of that size is made.
#[test]
fn sizes_that_the_tensors_do_not_have_are_refused() {
    for (field, size, cure) in [
        ("vocab_size", 1 << 24, "16777216 (vocab_size), 32 (hidden_size)"),
        ("num_hidden_layers", 1 << 24, "no tensor model.layers.2."),
        ("intermediate_size", 1 << 24, "16777216 (intermediate_size)"),
        ("q_lora_rank", 1 << 24, "16777216 (q_lora_rank)"),
        ("v_head_dim", 1 << 24, "* v_head_dim)"),
        ("qk_nope_head_dim", 1 << 24, "(qk_nope_head_dim + "),
        ("num_attention_heads", 128, "(num_attention_heads * "),
        ("num_attention_heads", 1 << 24, "num_attention_heads 16777216: must be 1..=128"),
        ("first_k_dense_replace", 0, "experts.0.gate_proj.weight; its config.json asks for it"),
    ] {
        let dir = changed("sizes", "v3-dense", "config.json", |text| text);
        with_fields(&dir, &[("num_experts_per_tok", json!(2)), (field, json!(size))]);
        must_refuse(Checkpoint::open(&dir), cure);
    }
    let wider = changed("wider", "v3-halves", "config.json", |text| {
        text.replace("v_head_dim\": 8", "v_head_dim\": 16")
    });
    must_refuse(Checkpoint::open(&wider), "its config.json asks for");
    let other =
        changed("wider", "v3-halves", "config.json", |text| text.replace("\"hidden_size\"", "\"width\""));
    must_refuse(Checkpoint::open(&other), "7168 (hidden_size)");
    let biased = changed("wider", "v3-dense", "config.json", |text| text);
    with_fields(&biased, &[("attention_bias", json!(true))]);
    must_refuse(Checkpoint::open(&biased), ".bias; its config.json asks for it");
}

const LINEAR: &str = "model.layers.1.mlp.up_proj.weight";

fn stored(dtype: Dtype, shape: &[usize]) -> Stored {
    let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
    Stored { dtype, shape: shape.into(), bytes: vec![0x38; bytes] }
}

#[test]
fn quantised_weights_are_refused_with_their_own_cure() {
    const CAST: &str = "convert them to bf16 with DeepSeek's `fp8_cast_bf16.py`";
    for (method, dtype, name, cure) in [
        (None, Dtype::F8_E4M3, LINEAR, CAST),
        (Some("fp8"), Dtype::F8_E4M3, LINEAR, CAST),
        // The weights were renamed, not cast.
        (None, Dtype::F32, "model.layers.1.mlp.up_proj.weight_scale_inv", CAST),
        (Some("fp8"), Dtype::F32, "model.layers.1.mlp.up_proj.weight_scale_inv", CAST),
        (Some("awq"), Dtype::I32, "model.layers.1.mlp.up_proj.qweight", "quant_method awq"),
        (Some("gptq"), Dtype::F16, "model.layers.1.mlp.up_proj.scales", "quant_method gptq"),
        (Some("compressed-tensors"), Dtype::F8_E4M3, LINEAR, "quant_method compressed-tensors"),
        (None, Dtype::U8, LINEAR, "download the unquantised checkpoint"),
        (None, Dtype::F64, LINEAR, "up_proj.weight has dtype F64"),
    ] {
        let dir = changed("quantised", "v3-dense", "config.json", |text| text);
        if let Some(method) = method {
            with_fields(&dir, &[("quantization_config", json!({"quant_method": method}))]);
        }
        with_tensors(&dir, |all| {
            all.insert(name.into(), stored(dtype, &[48, 32]));
        });
        must_refuse(Checkpoint::open(&dir), cure);
        must_refuse(Checkpoint::open(&dir), name);
        if method.is_some_and(|method| method != "fp8") {
            must_refuse(Checkpoint::open(&dir), "dequantise this one to bf16");
        }
    }
    // Packed weights have other names.
    let dir = changed("quantised", "v3-dense", "config.json", |text| text);
    with_fields(&dir, &[("quantization_config", json!({"quant_method": "gptq"}))]);
    with_tensors(&dir, |all| drop(all.remove(LINEAR)));
    must_refuse(Checkpoint::open(&dir), "quant_method gptq");
    // A cast does not bring a tensor that is missing.
    with_fields(&dir, &[("quantization_config", json!({"quant_method": "fp8"}))]);
    must_refuse(Checkpoint::open(&dir), "up_proj.weight; its config.json asks for it");
}

/// After the cast, config.json still has `quantization_config`.
#[test]
fn plain_weights_load_whatever_they_were_cast_from() {
    for method in ["fp8", "awq"] {
        let dir = changed("cast", "v3-dense", "config.json", |text| text);
        with_fields(&dir, &[("quantization_config", json!({"quant_method": method}))]);
        Checkpoint::open(&dir).expect("a checkpoint");
    }
}

#[test]
fn tensors_that_are_left_are_named() {
    let dir = changed("left", "v3-dense", "config.json", |text| text);
    // A layer of multi-token prediction in FP8, and what old checkpoints have.
    with_tensors(&dir, |all| {
        all.insert("model.layers.2.eh_proj.weight".into(), stored(Dtype::F8_E4M3, &[4, 8]));
        all.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), stored(Dtype::F32, &[32]));
    });
    Checkpoint::open(&dir).expect("a checkpoint");
    with_tensors(&dir, |all| {
        for name in ["a", "b", "c", "d", "e"] {
            all.insert(format!("model.layers.0.{name}"), stored(Dtype::F32, &[1]));
        }
    });
    must_refuse(
        Checkpoint::open(&dir),
        "does not use: model.layers.0.a, model.layers.0.b, model.layers.0.c and 2 more",
    );
    must_refuse(Checkpoint::open(&dir), "take config.json and the weights from one checkpoint");
    // With attention_bias false transformers would leave it away.
    let dir = changed("left", "v3-dense", "config.json", |text| text);
    with_tensors(&dir, |all| {
        drop(all.insert("model.layers.0.self_attn.o_proj.bias".into(), stored(Dtype::F32, &[32])))
    });
    must_refuse(Checkpoint::open(&dir), "o_proj.bias");
}

#[test]
fn scales_that_no_cache_has_are_refused() {
    let dir = changed("scales", "v3-dense", "config.json", |text| text);
    let at = dir.join("kv_cache_scales.json");
    let write = |layers: Value| {
        let all = json!({"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": layers}}});
        std::fs::write(&at, all.to_string()).expect("a file");
    };
    write(json!({"0": 0.5, "1": 0.25}));
    assert_eq!(Checkpoint::open(&dir).expect("a checkpoint").k_scales, [0.5, 0.25]);
    for bad in
        [json!({"0": 1}), json!({"0": 1, "1": 0}), json!({"0": 1, "1": -2}), json!({"0": 1, "1": 1e-40})]
    {
        write(bad);
        must_refuse(
            Checkpoint::open(&dir),
            "layer 1: must be there and above 0; delete the file for scales of 1",
        );
    }
    std::fs::write(&at, r#"{"kv_cache": {"scaling_factor"#).expect("a file");
    must_refuse(Checkpoint::open(&dir), "download it again, or delete it for scales of 1");
}
