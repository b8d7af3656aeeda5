//! Models with something of their own beyond DeepSeek-V3, against what transformers computed with them (`scripts/train.sh models`): greedy
//! tokens for every dtype of the cache, and configs and names of tensors in every style. Backends are those of `model.rs`.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use common::changed::{Stored, changed, must_refuse, with_fields, with_tensors};
use common::{DTYPES, Golden, backends, checkpoint, device, furthest};
use generate::{Checkpoint, Config, Options, Paged, Sampling, Setup, Where};
use serde_json::{Value, json};
use wgpu_mla::Dtype;

const MODELS: [&str; 7] = ["youtu", "glm4-moe-lite", "sarvam", "kimi-k25", "minicpm3", "axk1", "mistral4"];

/// For logits of up to 8.
const TOLERANCE: f32 = 1e-4;

fn setup(kv: Dtype) -> Setup {
    Setup { kv: kv.into(), page_size: 16, tokens: 128, step_tokens: 64, exact: true, ..Setup::default() }
}

fn golden(name: &str) -> Golden {
    Golden::open(&format!("tests/tiny/{name}"))
}

#[test]
fn greedy_tokens_equal_those_of_transformers() {
    for backend in backends() {
        let device = device(backend);
        for name in MODELS {
            let (checkpoint, golden) = (checkpoint(&format!("tests/tiny/{name}")), golden(name));
            let prompt = golden.run("f32").prompt;
            // A GPU's driver compiles kernels for each dtype; with all of them it took 10 s on lavapipe, and passed.
            let few = |dtype| backend == Where::Cpu || name == "mistral4" || dtype == Dtype::F16;
            for (dtype_name, dtype) in DTYPES.into_iter().filter(|it| few(it.1)) {
                let tokens = golden.tokens(dtype_name);
                let (prompt, want) = tokens.split_at(prompt);
                let mut attention =
                    Paged::new(&device, &checkpoint.model, &setup(dtype)).expect("an attention");
                let options = Options {
                    max_tokens: want.len(),
                    sampling: Sampling { temperature: 0.0, seed: 1, ..Sampling::default() },
                };
                let prompts = [prompt.to_vec()];
                let done =
                    generate::generate(&checkpoint.model, &mut attention, &prompts, &options, &mut |_, _| {
                        Ok(())
                    });
                assert_eq!(want.len(), 32);
                assert_eq!(done.expect("tokens").tokens[0], want, "{backend:?}, {name}, {dtype_name}");
            }
        }
    }
}

/// The logits of a run, which are to be transformers'.
fn must_equal(dir: &Path, golden: &Golden, run: &str, positions: u32) {
    let checkpoint = Checkpoint::open(dir).expect("a checkpoint");
    let mut run = golden.run(run);
    run.prompt = run.prompt.min(run.tokens.len());
    let setup = Setup { backend: Where::Cpu, positions, ..setup(Dtype::F32) };
    let mut attention = generate::paged(&checkpoint.model, &setup).expect("an attention");
    let apart = furthest(&run.follow(&checkpoint.model, attention.as_mut()), &run.logits);
    println!("{}: at most {apart:.1e} apart", dir.display());
    assert!(apart <= TOLERANCE, "{}: {apart}", dir.display());
}

#[test]
fn logits_equal_those_of_transformers() {
    for name in MODELS {
        must_equal(&common::path("tests/tiny").join(name), &golden(name), "f32", 128);
    }
}

/// MiniCPM3's short factors.
#[test]
fn a_run_that_cannot_outgrow_the_short_factors_has_them() {
    must_equal(&common::path("tests/tiny/minicpm3"), &golden("minicpm3"), "short", 16);
}

/// The fields that transformers 4.57 wrote, and those of the models' own repositories.
#[test]
fn configs_of_every_style_are_the_same() {
    for name in MODELS {
        let read = |file: &str| {
            let text =
                std::fs::read_to_string(common::path("tests/tiny").join(name).join(file)).expect("a config");
            format!("{:?}", Config::from_json(&text).expect("a config"))
        };
        assert_eq!(read("config.json"), read("config-4.json"), "{name}");
    }
}

fn renamed(dir: &Path, own: impl Fn(&str) -> Option<String>) {
    with_tensors(dir, |all| {
        let tensors = std::mem::take(all).into_iter();
        all.extend(tensors.filter_map(|(name, tensor)| Some((own(&name)?, tensor))));
    });
}

fn copy(name: &str, model: &str) -> PathBuf {
    changed(name, model, "config.json", |text| text)
}

/// transformers 5.24's, the repository's, and those of transformers in memory; what sees is left out.
#[test]
fn wrappers_have_names_of_every_style() {
    for (style, to) in
        [("repository", "language_model.model.layers."), ("memory", "model.language_model.layers.")]
    {
        let dir = copy(&format!("wrapped-{style}"), "kimi-k25");
        renamed(&dir, |name| {
            let name = name.replace("language_model.model.blocks.", to);
            Some(match style {
                "memory" => name.replace("language_model.model.", "model.language_model."),
                _ => name,
            })
        });
        must_equal(&dir, &golden("kimi-k25"), "f32", 128);
    }
    let dir = copy("wrapped-not", "kimi-k25");
    renamed(&dir, |name| Some(name.replace("language_model.", "")));
    must_refuse(Checkpoint::open(&dir), "no tensor model.embed_tokens.weight");
}

/// One tensor of a stack.
fn part(of: &Stored, begin: usize, shape: &[usize]) -> Stored {
    let bytes = 2 * shape.iter().product::<usize>();
    Stored { dtype: of.dtype, shape: shape.into(), bytes: of.bytes[2 * begin..][..bytes].into() }
}

#[test]
fn experts_are_stacked_or_have_tensors_of_their_own() {
    let dir = copy("unstacked", "mistral4");
    with_tensors(&dir, |all: &mut BTreeMap<String, Stored>| {
        let experts = "model.layers.1.mlp.experts";
        let both = all.remove(&format!("{experts}.gate_up_proj")).expect("a stack");
        let down = all.remove(&format!("{experts}.down_proj")).expect("a stack");
        let &[count, rows, hidden] = &both.shape[..] else { panic!("{:?}", both.shape) };
        let inner = rows / 2;
        for expert in 0..count {
            let at = expert * rows * hidden;
            for (name, part) in [
                ("gate_proj", part(&both, at, &[inner, hidden])),
                ("up_proj", part(&both, at + inner * hidden, &[inner, hidden])),
                ("down_proj", part(&down, expert * hidden * inner, &[hidden, inner])),
            ] {
                all.insert(format!("{experts}.{expert}.{name}.weight"), part);
            }
        }
    });
    must_equal(&dir, &golden("mistral4"), "f32", 128);
}

#[test]
fn the_norm_of_axk1_has_names_of_every_style() {
    let norm = "model.layers.1.post_mlp_layernorm.weight";
    let dir = copy("norms", "axk1");
    renamed(&dir, |name| Some(name.replace("1.post_mlp", "1.mlp.post_mlp")));
    with_tensors(&dir, |all| {
        let own = all["model.layers.1.mlp.post_mlp_layernorm.weight"].clone();
        all.insert("model.layers.0.post_mlp_layernorm.weight".into(), own);
    });
    must_equal(&dir, &golden("axk1"), "f32", 128);
    with_tensors(&dir, |all| drop(all.remove(&norm.replace("1.post", "1.mlp.post"))));
    must_refuse(Checkpoint::open(&dir), &format!("no tensor {norm}"));
    // It was released without the router's bias, which other models must have.
    for (model, is_served) in [("axk1", true), ("glm4-moe-lite", false)] {
        let dir = copy("no-bias", model);
        with_tensors(&dir, |all| drop(all.remove("model.layers.1.mlp.gate.e_score_correction_bias")));
        match is_served {
            true => drop(Checkpoint::open(&dir).expect("a checkpoint")),
            false => must_refuse(
                Checkpoint::open(&dir),
                "no tensor model.layers.1.mlp.gate.e_score_correction_bias",
            ),
        }
    }
}

#[test]
fn models_that_are_not_served_are_refused_with_what_is_missing() {
    for (name, missing) in [
        ("longcat_flash", "layers of two attentions"),
        ("kimi_linear", "Kimi Delta Attention"),
        ("bailing_hybrid", "Kimi Delta Attention"),
        ("glm5_next", "pooled keys"),
        ("glm5_next_text", "pooled keys"),
        ("hy_v4", "attention sinks"),
        ("hy_v4_vl", "attention sinks"),
        ("hy_v4_vl_text", "attention sinks"),
        ("dots3_note", "gates of heads"),
        ("mistral_large4", "layers without rotary positions"),
        ("axk2", "a latent of 128"),
        ("deepseek_v4", "compressed over tokens"),
    ] {
        let text = json!({"model_type": name}).to_string();
        must_refuse(Config::from_json(&text), &format!("model_type {name} is not served, as it needs "));
        must_refuse(Config::from_json(&text), missing);
        must_refuse(Config::from_json(&text), "use one of deepseek_v2, ");
        let wrapped = json!({"model_type": "x", "text_config": {"model_type": name}}).to_string();
        must_refuse(Config::from_json(&wrapped), missing);
    }
}

#[test]
fn fields_with_two_names() {
    let of = |fields: Value| {
        let mut config = json!({"model_type": "sarvam_mla", "num_experts": 32});
        config.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        Config::from_json(&config.to_string())
    };
    let experts = of(json!({"n_routed_experts": 32, "num_shared_experts": 2})).expect("a config").experts;
    assert_eq!(experts.map(|it| (it.num_experts, it.num_shared)), Some((32, 2)));
    must_refuse(
        of(json!({"n_routed_experts": 64})),
        "n_routed_experts 64 and num_experts 32: must be the same",
    );
}

/// What a wrapper says stands where its language model says nothing; of tied embeddings it alone decides.
#[test]
fn fields_of_wrappers() {
    let of = |outer: Value, text: Value| {
        let mut config = outer;
        config["text_config"] = text;
        Config::from_json(&config.to_string()).expect("a config")
    };
    let fp8 = json!({"quant_method": "fp8"});
    let config = of(
        json!({"model_type": "kimi_k25", "eos_token_id": 7, "quantization_config": fp8}),
        json!({"hidden_size": 64}),
    );
    assert_eq!((config.hidden_size, config.eos, config.num_layers), (64, vec![7], 61));
    assert_eq!((config.quant_method.as_deref(), config.tie_word_embeddings), (Some("fp8"), true));
    let config = of(
        json!({"model_type": "mistral3", "tie_word_embeddings": false, "eos_token_id": 7}),
        json!({"model_type": "mistral4", "eos_token_id": [8, 9], "tie_word_embeddings": true}),
    );
    assert_eq!((config.eos, config.tie_word_embeddings, config.is_wrapped), (vec![8, 9], false, true));
    let missing = json!({"model_type": "mistral3", "text_config": {"hidden_size": 64}});
    must_refuse(Config::from_json(&missing.to_string()), "model_type missing: must be deepseek_v2");
}

/// The defaults are those of transformers 5.24.0.
#[test]
fn absent_fields_have_the_defaults_of_transformers() {
    let of = |name: &str| Config::from_json(&json!({"model_type": name}).to_string()).expect("a config");
    for (name, sizes, heads, latent) in [
        ("youtu", (128_256, 2048, 6144, 32), (16, 128, 128, Some(1536)), (512, 64)),
        ("youtu_llm", (128_256, 2048, 6144, 32), (16, 128, 128, Some(1536)), (512, 64)),
        ("glm4_moe_lite", (154_880, 2048, 10_240, 47), (20, 192, 256, Some(768)), (512, 64)),
        ("sarvam_mla", (262_144, 4096, 16_384, 32), (64, 128, 128, None), (512, 64)),
        ("axk1", (163_840, 7168, 18_432, 61), (64, 128, 128, Some(1536)), (512, 64)),
        ("minicpm3", (73_448, 2560, 6400, 62), (40, 64, 64, Some(768)), (256, 32)),
        ("mistral4", (131_072, 4096, 12_288, 36), (32, 64, 128, Some(1024)), (256, 64)),
    ] {
        let it = of(name);
        assert_eq!((it.vocab_size, it.hidden_size, it.intermediate_size, it.num_layers), sizes, "{name}");
        assert_eq!((it.shape.num_heads, it.qk_nope_head_dim, it.v_head_dim, it.q_lora_rank), heads, "{name}");
        assert_eq!((it.shape.kv_lora_rank, it.shape.qk_rope_head_dim), latent, "{name}");
    }
    for (name, (count, shared, inner), (first, per_token, groups, chosen), scaling) in [
        ("glm4_moe_lite", (64, 1, 1536), (1, 4, 1, 1), 1.8),
        ("sarvam_mla", (128, 1, 2048), (1, 8, 1, 1), 2.5),
        ("axk1", (192, 1, 2048), (1, 8, 8, 4), 2.5),
        ("mistral4", (128, 1, 2048), (0, 4, 1, 1), 1.0),
    ] {
        let it = of(name).experts.expect("experts");
        assert_eq!((it.num_experts, it.num_shared, it.intermediate_size), (count, shared, inner), "{name}");
        assert_eq!(
            (it.first_layer, it.per_token, it.groups, it.chosen_groups),
            (first, per_token, groups, chosen)
        );
        assert_eq!(
            (it.scaling, it.gate.normalise, it.gate.sigmoid),
            (scaling, true, name != "mistral4"),
            "{name}"
        );
    }
    let (youtu, mini, mistral) = (of("youtu"), of("minicpm3"), of("mistral4"));
    assert!(
        youtu.experts.is_none()
            && mini.experts.is_none()
            && youtu.tie_word_embeddings
            && mini.tie_word_embeddings
    );
    assert_eq!((youtu.eos, youtu.max_position_embeddings), (vec![128_001], 131_072));
    assert_eq!((mini.eos, mini.rms_norm_eps, mini.rope.interleaved), (vec![2], 1e-5, false));
    let scales = (12.0, (1.4 / 62f64.sqrt()) as f32, 0.1);
    assert_eq!((mini.scales.embeddings, mini.scales.residuals, mini.scales.head), scales);
    let nulls =
        json!({"model_type": "minicpm3", "scale_emb": null, "scale_depth": null, "dim_model_base": null});
    let none = Config::from_json(&nulls.to_string()).expect("a config").scales;
    assert_eq!((none.embeddings, none.residuals, none.head), (1.0, 1.0, 1.0));
    assert_eq!((mistral.eos, mistral.max_position_embeddings), (vec![2], 1_048_576));
    assert_eq!(mistral.rope.softmax_mscale, (128.0, 1.0));
    let scaling = mistral.rope.query_scaling.expect("scaled queries");
    assert_eq!((scaling.of(8191), scaling.of(8192)), (1.0, (1.0 + 0.1 * 2f64.ln()) as f32));
}

/// With the fields of experts that other configs of its kind have, a dense model is dense.
#[test]
fn dense_types_read_no_fields_of_experts() {
    let dir = copy("dense", "youtu");
    with_fields(&dir, &[("n_routed_experts", json!(64)), ("scoring_func", json!("softmax"))]);
    must_equal(&dir, &golden("youtu"), "f32", 128);
}
