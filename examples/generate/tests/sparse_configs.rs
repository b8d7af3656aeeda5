//! Configs and weights of models whose attention is sparse: what is read, and what is refused with its cure.

mod common;

use common::changed::{changed, must_refuse, with_fields, with_tensors};
use generate::{Checkpoint, Config, IndexerConfig};
use serde_json::{Value, json};
use wgpu_mla::{Dtype, IndexFormat, RopeLayout};

fn indexer(config: &Value) -> IndexerConfig {
    Config::from_json(&config.to_string()).expect("a config").indexer.expect("an indexer")
}

/// The defaults are those of transformers 5.24.0.
#[test]
fn absent_fields_have_the_defaults_of_transformers() {
    let v32 = Config::from_json(r#"{"model_type": "deepseek_v32"}"#).expect("a config");
    assert_eq!((v32.vocab_size, v32.hidden_size, v32.num_layers), (129_280, 7168, 61));
    assert_eq!((v32.max_position_embeddings, v32.q_lora_rank, v32.eos), (163_840, Some(1536), vec![1]));
    assert_eq!((v32.shape.num_heads, v32.qk_nope_head_dim, v32.v_head_dim), (128, 128, 128));
    let experts = v32.experts.expect("experts");
    assert_eq!((experts.first_layer, experts.groups, experts.chosen_groups), (3, 8, 4));
    let of_v32 = v32.indexer.expect("an indexer");
    assert_eq!((of_v32.num_heads, of_v32.topk, of_v32.rope), (64, 2048, RopeLayout::HalfSplit));
    assert_eq!(of_v32.is_full, [true; 61]);
    assert_eq!(of_v32.format(Dtype::E4m3), IndexFormat::DEEPSEEK_V32);
    assert_eq!(of_v32.weight_scale(), (64.0_f32 * 128.0).sqrt().recip());

    let glm = Config::from_json(r#"{"model_type": "glm_moe_dsa"}"#).expect("a config");
    assert_eq!((glm.vocab_size, glm.hidden_size, glm.num_layers), (154_880, 6144, 78));
    assert_eq!((glm.intermediate_size, glm.q_lora_rank, glm.rms_norm_eps), (12_288, Some(2048), 1e-5));
    assert_eq!((glm.shape.num_heads, glm.qk_nope_head_dim, glm.v_head_dim), (64, 192, 256));
    let experts = glm.experts.expect("experts");
    assert_eq!((experts.first_layer, experts.groups, experts.chosen_groups), (3, 1, 1));
    let of_glm = glm.indexer.expect("an indexer");
    assert_eq!((of_glm.num_heads, of_glm.topk, of_glm.rope), (32, 2048, RopeLayout::Interleaved));
    assert_eq!(of_glm.format(Dtype::E4m3), IndexFormat::GLM_5);
}

#[test]
fn configs_as_they_are_shipped_are_read() {
    let v32 = indexer(&json!({
        "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "num_hidden_layers": 61,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 1, "rope_theta": 10_000,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn"},
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128]},
    }));
    assert_eq!(v32.rope, RopeLayout::HalfSplit);
    // GLM-5.2: its full layers are 0, 1, 2, then every fourth from 6 on.
    let glm = indexer(&json!({
        "model_type": "glm_moe_dsa", "num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3,
        "indexer_rope_interleave": true, "index_share_for_mtp_iteration": true,
        "rope_parameters": {"rope_theta": 8_000_000, "rope_type": "default"},
    }));
    let full: Vec<usize> = (0..78).filter(|&layer| glm.is_full[layer]).collect();
    let every_fourth = (6..78).step_by(4);
    assert_eq!(full, [0, 1, 2].into_iter().chain(every_fourth).collect::<Vec<usize>>());
    assert_eq!(full.len(), 21);
}

#[test]
fn layers_are_full_or_shared_as_transformers_reads_it() {
    let of = |field: &str, value: Value| {
        let mut config =
            json!({"model_type": "glm_moe_dsa", "num_hidden_layers": 4, "first_k_dense_replace": 1});
        config[field] = value;
        indexer(&config).is_full
    };
    let want = [true, false, false, true];
    assert_eq!(of("indexer_types", json!(["full", "shared", "shared", "full"])), want);
    assert_eq!(of("index_topk_pattern", json!("FSSF")), want);
    assert_eq!(of("index_topk_pattern", json!(["full", "shared", "shared", "full"])), want);
    assert_eq!(of("index_topk_freq", json!(2)), [true, true, false, true]);
    assert_eq!(of("index_topk_freq", json!(0)), [true; 4]);
}

#[test]
fn configs_that_are_not_served_are_refused() {
    for (model, field, value, cure) in [
        ("v32", "index_head_dim", json!(64), "index_head_dim 64: must be 128"),
        ("v32", "index_n_heads", json!(65), "index_n_heads 65: must be 1 to 64"),
        ("v32", "index_n_heads", json!(0), "index_n_heads 0: must be a whole number from 1"),
        ("v32", "index_topk", json!(8193), "index_topk 8193: must be 1 to 8192"),
        ("v32", "index_topk", Value::Null, "index_topk null: must be a whole number"),
        ("v32", "qk_rope_head_dim", json!(32), "must be"),
        ("glm-dsa", "qk_rope_head_dim", json!(32), "qk_rope_head_dim 32: must be 64 for this model_type"),
        ("v32", "q_lora_rank", Value::Null, "q_lora_rank null: must be there for this model_type"),
        ("v32", "rope_interleave", json!(false), "rope_interleave false: must be true"),
        ("v32", "layer_types", json!(["full_attention"]), "layer_types has full_attention"),
        (
            "v32",
            "quantization_config",
            json!({"scale_fmt": "float"}),
            "scale_fmt float of quantization_config",
        ),
        (
            "v32",
            "indexer_types",
            json!(["full", "shared", "full"]),
            "indexer_types: must be full in every layer for this model_type",
        ),
        ("glm-dsa", "indexer_types", json!(["full", "shared"]), "has 2 entries: must have one for each of"),
        (
            "glm-dsa",
            "indexer_types",
            json!(["shared", "full", "full", "full", "full"]),
            "the first of them full",
        ),
        (
            "glm-dsa",
            "indexer_types",
            json!(["full", "none"]),
            "indexer_types has none: must be full or shared",
        ),
        ("glm-dsa", "indexer_types", json!("FSSS"), "indexer_types \"FSSS\": must be a list of strings"),
        ("glm-dsa", "mlp_layer_types", json!(["dense"]), "mlp_layer_types has 1 entries: must have 5"),
        (
            "glm-dsa",
            "mlp_layer_types",
            json!(["dense", "sparse", "dense", "sparse", "sparse"]),
            "those that are dense first",
        ),
        ("glm-dsa", "model_type", json!("gpt2"), "kimi_k2, deepseek_v32, glm_moe_dsa"),
    ] {
        let dir = changed("sparse_config", model, "config.json", |text| text);
        with_fields(&dir, &[(field, value)]);
        must_refuse(Config::open(&dir), cure);
    }
}

#[test]
fn weights_that_do_not_fit_the_indexers_are_refused() {
    let open = |model: &str, fields: &[(&str, Value)]| {
        let dir = changed("sparse_weights", model, "config.json", |text| text);
        with_fields(&dir, fields);
        Checkpoint::open(&dir)
    };
    open("v32", &[]).expect("a checkpoint");
    must_refuse(open("v32", &[("index_n_heads", json!(4))]), "512 (index_n_heads * index_head_dim)");
    let types = json!(["full", "shared", "full", "shared", "full"]);
    must_refuse(open("glm-dsa", &[("indexer_types", types)]), "layers.2.self_attn.indexer.wq_b.weight");
    let types = json!(["full", "shared", "shared", "shared", "shared"]);
    must_refuse(
        open("glm-dsa", &[("indexer_types", types)]),
        "does not use: model.layers.4.self_attn.indexer",
    );
    // A dense model would attend other tokens.
    must_refuse(
        open("v32", &[("model_type", json!("deepseek_v3"))]),
        "does not use: model.layers.0.self_attn.indexer",
    );
    let dir = changed("sparse_weights", "v32", "config.json", |text| text);
    with_tensors(&dir, |all| drop(all.remove("model.layers.1.self_attn.indexer.k_norm.bias")));
    must_refuse(Checkpoint::open(&dir), "no tensor model.layers.1.self_attn.indexer.k_norm.bias");
}
