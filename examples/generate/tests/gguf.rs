//! GGUF files against checkpoints of safetensors that hold the same values. Backends are those of `model.rs`.

mod common;

use std::path::{Path, PathBuf};

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value;
use common::changed::{changed, must_refuse, with_fields, with_tensors};
use common::gguf::{Made, Style, folder};
use common::{Golden, backends, device, furthest};
use generate::{Checkpoint, Config, Options, Paged, Sampling, Setup, Text, Where};
use serde_json::json;
use wgpu_mla::Dtype;

const PROMPT: &str = "KING HENRY:\nWhat news, my lord?";

fn setup(kv: Dtype) -> Setup {
    Setup { kv: kv.into(), page_size: 16, tokens: 128, step_tokens: 64, exact: true, ..Setup::default() }
}

/// Logits of a prompt in one step, then along the tokens that follow, one by one.
fn logits(checkpoint: &Checkpoint, prompt: &[u32], rest: &[u32]) -> Vec<f32> {
    let mut attention =
        generate::paged(&checkpoint.model, &Setup { backend: Where::Cpu, ..setup(Dtype::F32) })
            .expect("an attention");
    let run =
        common::Run { tokens: [prompt, rest].concat(), logits: Vec::new(), prompt: prompt.len(), text: None };
    run.follow(&checkpoint.model, attention.as_mut())
}

fn greedy(checkpoint: &Checkpoint, backend: Where, prompt: &[u32], count: usize) -> Vec<u32> {
    let device = device(backend);
    let mut attention = Paged::new(&device, &checkpoint.model, &setup(Dtype::F16)).expect("an attention");
    let options = Options {
        max_tokens: count,
        sampling: Sampling { temperature: 0.0, seed: 1, ..Sampling::default() },
    };
    let prompts = [prompt.to_vec()];
    let done = generate::generate(&checkpoint.model, &mut attention, &prompts, &options, &mut |_, _| Ok(()));
    done.expect("tokens").tokens.remove(0)
}

/// How far a logit of the checkpoint, of up to 20, may be from that of the same values in f32, where few tokens at a time are multiplied
/// with activations of 8 bits: those of a decode, and those of a prompt that go to one expert.
const DECODE: f32 = 0.3;
const PREFILL: f32 = 0.15;

/// The same of weights that are not quantised.
const PLAIN: f32 = 1e-4;

/// The checkpoint in the repo without its last two layers.
fn shortened() -> PathBuf {
    let dir = folder("gguf-short");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(common::path("model").join(file), dir.join(file)).expect("a copy");
    }
    with_fields(&dir, &[("num_hidden_layers", json!(2))]);
    with_tensors(&dir, |all| {
        all.retain(|name, _| !name.contains("layers.2.") && !name.contains("layers.3."))
    });
    dir
}

#[test]
fn every_type_is_what_its_values_are() {
    let short = shortened();
    let prompt = Text::open(&short).expect("a tokenizer").encode(PROMPT).expect("tokens");
    let vocab = 1024;
    use GgmlDType::{BF16, F16, F32, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    for dtype in [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
        let dir = folder(&format!("gguf-{dtype:?}"));
        let made = Made::new(&short, "deepseek2", Style::new(dtype));
        let of_type = made.tensors.values().filter(|it| it.dtype() == dtype).count();
        assert!(of_type >= 10, "{dtype:?}: {of_type}");
        let file = Checkpoint::open(&made.write(&dir.join("model.gguf"))).expect("a file");
        made.write_values(&dir);
        let values = Checkpoint::open(&dir).expect("a checkpoint");
        assert_eq!(config(&file.model.config), config(&values.model.config), "{dtype:?}");
        // Weights stay as they are.
        let bytes: usize =
            made.tensors.values().filter(|it| it.rank() > 1).map(|it| it.storage_size_in_bytes()).sum();
        assert_eq!(file.model.bytes(), bytes as u64);
        let next = greedy(&values, Where::Cpu, &prompt, 12);
        assert_eq!(greedy(&file, Where::Cpu, &prompt, 12), next, "{dtype:?}");
        let (got, want) = (logits(&file, &prompt, &next), logits(&values, &prompt, &next));
        let apart = |from: usize, to: usize| {
            furthest(&got[from * vocab..to * vocab], &want[from * vocab..to * vocab])
        };
        let (prefill, decode) = (apart(0, prompt.len()), apart(prompt.len(), prompt.len() + next.len()));
        println!("{dtype:?}: a prompt's logits at most {prefill:.1e} apart, those of decodes {decode:.1e}");
        assert!(prefill <= PREFILL && decode <= DECODE, "{dtype:?}: {prefill} {decode}");
        let is_plain = [F32, F16, BF16].contains(&dtype);
        assert!(!is_plain || prefill.max(decode) <= PLAIN, "{dtype:?}: {prefill} {decode}");
        if dtype == Q4K {
            for backend in backends().into_iter().filter(|it| *it != Where::Cpu) {
                assert_eq!(greedy(&file, backend, &prompt, 12), next, "{backend:?}, {dtype:?}");
            }
        }
    }
}

/// All of a config that the model's results hang on.
fn config(config: &Config) -> String {
    format!("{:?}", Config { notices: Vec::new(), quant_method: None, ..config.clone() })
}

/// A checkpoint as a GGUF file, with weights that are exact.
fn must_equal(dir: &Path, arch: &str, style: Style) -> Checkpoint {
    let made = Made::new(dir, arch, style);
    let file = Checkpoint::open(&made.write(&dir.join("model.gguf"))).expect("a file");
    let values = Checkpoint::open(dir).expect("a checkpoint");
    assert_eq!(config(&file.model.config), config(&values.model.config), "{}", dir.display());
    let tokens: Vec<u32> = (0..40).map(|i| i * 7 % values.model.config.vocab_size as u32).collect();
    let (prompt, rest) = tokens.split_at(32);
    let (got, want) = (logits(&file, prompt, rest), logits(&values, prompt, rest));
    // Some of the checkpoints are bf16, whose products are summed in another order.
    let apart = furthest(&got, &want);
    assert!(apart <= 1e-5, "{}: {apart}", dir.display());
    file
}

fn f32s() -> Style {
    Style::new(GgmlDType::F32)
}

/// V2 with softmax and without a low rank, with groups; V3; dense; MiniCPM3; Mistral 4.
#[test]
fn architectures_are_those_of_safetensors() {
    let copy = |model: &str| changed(&format!("gguf-{model}"), model, "config.json", |text| text);
    must_equal(&copy("v2-lite"), "deepseek2", f32s());
    must_equal(&copy("youtu"), "deepseek2", f32s());
    must_equal(&copy("glm4-moe-lite"), "deepseek2", f32s());
    must_equal(&copy("mistral4"), "mistral4", f32s());
    // GGUF has no biases of these.
    let groups = copy("v2-groups");
    with_fields(&groups, &[("attention_bias", json!(false)), ("mlp_bias", json!(false))]);
    with_tensors(&groups, |all| {
        all.retain(|name, _| !name.ends_with("proj.bias") && !name.ends_with("mqa.bias"))
    });
    must_equal(&groups, "deepseek2", f32s());
    // One factor for both, as in all models that have them.
    let dense = copy("v3-dense");
    let yarn = json!({"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 0.5, "mscale_all_dim": 0.5});
    with_fields(&dense, &[("rope_scaling", yarn)]);
    must_equal(&dense, "deepseek2", f32s());
    // The program that made these files has its scales in its code.
    let mini = changed("gguf-minicpm3", "minicpm3", "config.json", |text| {
        // Numbers that f32 does not tell from those next to them.
        text.replace("4.199999999999999", "4.2").replace("1.1400000000000001", "1.14")
    });
    with_fields(
        &mini,
        &[("scale_emb", json!(12)), ("scale_depth", json!(1.4)), ("dim_model_base", json!(256))],
    );
    must_equal(&mini, "minicpm3", Style { has_parts: false, ..f32s() });
}

#[test]
fn weights_that_are_stored_in_other_ways() {
    for (number, (has_parts, is_fused)) in
        [(false, false), (true, true), (false, true)].into_iter().enumerate()
    {
        let dir = changed(&format!("gguf-styles-{number}"), "glm4-moe-lite", "config.json", |text| text);
        must_equal(&dir, "deepseek2", Style { has_parts, is_fused, ..f32s() });
    }
    let golden = Golden::open("tests/tiny/glm4-moe-lite");
    let dir = changed("gguf-golden", "glm4-moe-lite", "config.json", |text| text);
    let file = must_equal(&dir, "deepseek2", f32s());
    let run = golden.run("f32");
    let (prompt, rest) = run.tokens.split_at(run.prompt);
    assert!(furthest(&logits(&file, prompt, rest), &run.logits) <= 1e-4);
}

/// A file that was converted before 2025 has no keys of the compressed lengths.
#[test]
fn keys_of_older_files() {
    let dir = changed("gguf-older", "glm4-moe-lite", "config.json", |text| text);
    let mut made = Made::new(&dir, "deepseek2", Style { has_parts: false, ..f32s() });
    let want = config(&Checkpoint::open(&made.write(&dir.join("new.gguf"))).expect("a file").model.config);
    for name in ["key", "value"] {
        let length = made.keys.remove(&format!("deepseek2.attention.{name}_length_mla")).expect("a key");
        made.keys.insert(format!("deepseek2.attention.{name}_length"), length);
    }
    // Their router's bias says that it has a sigmoid.
    made.keys.remove("deepseek2.expert_gating_func");
    made.keys.remove("deepseek2.expert_group_count");
    made.keys.remove("deepseek2.expert_group_used_count");
    let older = Checkpoint::open(&made.write(&dir.join("older.gguf"))).expect("a file").model.config;
    assert_eq!(config(&older), want);
    assert_eq!(older.notices, ["deepseek2.expert_group_count is missing: a token chooses among all experts"]);
}

#[test]
fn keys_that_are_missing_or_unexpected_are_named() {
    let dir = changed("gguf-keys", "glm4-moe-lite", "config.json", |text| text);
    let with = |change: &[(&str, Option<Value>)]| {
        let mut made = Made::new(&dir, "deepseek2", f32s());
        for (name, value) in change {
            match value {
                Some(value) => drop(made.keys.insert((*name).into(), value.clone())),
                None => drop(made.keys.remove(*name).expect("a key")),
            }
        }
        Checkpoint::open(&made.write(&dir.join("model.gguf")))
    };
    let text = |text: &str| Some(Value::String(text.into()));
    for (name, value, why) in [
        ("general.architecture", None, "general.architecture: missing"),
        (
            "general.architecture",
            text("llama"),
            "general.architecture llama: must be deepseek2, minicpm3, mistral4",
        ),
        ("deepseek2.block_count", None, "deepseek2.block_count: missing; download the file again"),
        ("deepseek2.block_count", text("two"), "deepseek2.block_count \"two\": must be a whole number"),
        ("deepseek2.attention.kv_lora_rank", None, "deepseek2.attention.kv_lora_rank: missing"),
        ("deepseek2.attention.value_length_mla", None, "deepseek2.attention.value_length_mla: missing"),
        ("deepseek2.attention.layer_norm_rms_epsilon", None, "layer_norm_rms_epsilon: missing"),
        ("deepseek2.expert_used_count", None, "deepseek2.expert_used_count: missing"),
        (
            "deepseek2.expert_gating_func",
            Some(Value::U32(3)),
            "deepseek2.expert_gating_func 3: must be 1 or 2",
        ),
        (
            "deepseek2.expert_gating_func",
            Some(Value::U32(1)),
            "deepseek2.expert_weights_norm true: must be false",
        ),
        (
            "deepseek2.rope.dimension_count",
            Some(Value::U32(64)),
            "rope.dimension_count 64: must be at most the 40",
        ),
        ("deepseek2.rope.scaling.type", text("su"), "deepseek2.rope.scaling.type su: must be yarn, or none"),
        ("deepseek2.rope.scaling.type", text("yarn"), "deepseek2.rope.scaling.factor: missing"),
        ("deepseek2.rope.scaling.factor", Some(Value::F32(4.0)), "rope.scaling.type missing, with a factor"),
        ("deepseek2.rope.scaling.yarn_attn_factor", Some(Value::F32(0.5)), "yarn_attn_factor 0.5: must be 1"),
        (
            "deepseek2.attention.sinks",
            Some(Value::U32(1)),
            "deepseek2.attention.sinks is not known, and may change",
        ),
        (
            "deepseek2.attention.temperature_scale",
            Some(Value::F32(0.1)),
            "attention.temperature_length: missing",
        ),
    ] {
        must_refuse(with(&[(name, value)]), why);
    }
    let odd = with(&[("deepseek2.odd", Some(Value::Bool(true)))]).expect("a file").model.config.notices;
    assert_eq!(odd, ["deepseek2.odd is not known, and ignored"]);
}

#[test]
fn tensors_that_are_others_are_named_as_in_the_file() {
    let dir = changed("gguf-tensors", "glm4-moe-lite", "config.json", |text| text);
    let with = |change: &dyn Fn(&mut Made)| {
        let mut made = Made::new(&dir, "deepseek2", f32s());
        change(&mut made);
        Checkpoint::open(&made.write(&dir.join("model.gguf")))
    };
    let moved = |from: &'static str, to: &'static str| {
        move |made: &mut Made| {
            let tensor = made.tensors.remove(from).expect(from);
            made.tensors.insert(to.into(), tensor);
        }
    };
    must_refuse(
        with(&moved("blk.1.attn_kv_a_mqa.weight", "blk.1.odd.weight")),
        "no tensor blk.1.attn_kv_a_mqa.weight; its metadata asks",
    );
    must_refuse(
        with(&moved("blk.1.ffn_up_exps.weight", "blk.9.odd.weight")),
        "no tensor blk.1.ffn_up_exps.weight",
    );
    must_refuse(with(&moved("blk.1.attn_v_b.weight", "blk.9.odd.weight")), "no tensor blk.1.attn_v_b.weight");
    must_refuse(
        with(&moved("blk.0.ffn_up.weight", "token_embd.weight")),
        "output.weight has shape [64, 8], its metadata asks for [16 (vocab_size), 8 (hidden_size)]",
    );
    let added = |made: &mut Made| {
        let tensor = candle_core::quantized::QTensor::quantize(
            &candle_core::Tensor::new(&[1f32], &candle_core::Device::Cpu).expect("a tensor"),
            GgmlDType::F32,
        );
        made.tensors.insert("blk.1.attn_sinks.weight".into(), tensor.expect("a tensor"));
    };
    must_refuse(
        with(&added),
        "tensors that the model does not use: blk.1.attn_sinks.weight; name the file of another",
    );
    // Layers that foretell several tokens come after the model's own.
    let nextn = |made: &mut Made| {
        moved("blk.1.attn_norm.weight", "blk.1.nextn.enorm.weight")(made);
        made.keys.insert("deepseek2.nextn_predict_layers".into(), Value::U32(1));
        made.keys.insert("deepseek2.leading_dense_block_count".into(), Value::U32(1));
    };
    assert_eq!(with(&nextn).expect("a file").model.config.num_layers, 1);
}

#[test]
fn split_files_are_found() {
    let dir = changed("gguf-split", "glm4-moe-lite", "config.json", |text| text);
    let made = Made::new(&dir, "deepseek2", f32s());
    let paths = made.write_split(&dir, 3);
    let whole = Checkpoint::open(&made.write(&dir.join("whole.gguf"))).expect("a file");
    let tokens: Vec<u32> = (0..20).map(|i| i * 5 % 64).collect();
    // Whichever is named.
    for path in &paths {
        let split = Checkpoint::open(path).expect("files");
        assert_eq!(split.model.bytes(), whole.model.bytes());
        assert_eq!(
            logits(&split, &tokens[..16], &tokens[16..]),
            logits(&whole, &tokens[..16], &tokens[16..])
        );
    }
    std::fs::copy(&paths[1], dir.join("alone.gguf")).expect("a copy");
    must_refuse(
        Checkpoint::open(&dir.join("alone.gguf")),
        "it says that it is file 2 of 3 and is named as 1 of 1",
    );
    std::fs::rename(&paths[1], dir.join("kept")).expect("a file");
    must_refuse(
        Checkpoint::open(&paths[0]),
        "model-00002-of-00003.gguf: not there; download all files of the split",
    );
    std::fs::copy(&paths[2], &paths[1]).expect("a copy");
    must_refuse(Checkpoint::open(&paths[0]), "it says that it is file 3 of 3 and is named as 2 of 3");
}

/// A tensor that candle cannot read is named all the same.
#[test]
fn files_that_cannot_be_read_are_refused_with_the_cure() {
    let dir = changed("gguf-refused", "glm4-moe-lite", "config.json", |text| text);
    let path = Made::new(&dir, "deepseek2", f32s()).write(&dir.join("model.gguf"));
    let good = std::fs::read(&path).expect("a file");
    let name = b"blk.1.ffn_down_exps.weight";
    let at = good.windows(name.len()).position(|it| it == name).expect("a name");
    // After the name: the number of dims, three sizes, the type.
    let at = at + name.len() + 4 + 3 * 8;
    assert_eq!(good[at..at + 4], [0, 0, 0, 0]);
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = good.clone();
        change(&mut bytes);
        std::fs::write(&path, bytes).expect("a file");
        Checkpoint::open(&path)
    };
    for (kind, shown) in [(39u8, "MXFP4"), (23, "IQ4_XS"), (9, "Q8_1"), (15, "Q8K"), (77, "of number 77")] {
        let why = format!("blk.1.ffn_down_exps.weight has the type {shown}");
        must_refuse(with(&|bytes| bytes[at] = kind), &why);
        must_refuse(
            with(&|bytes| bytes[at] = kind),
            "take a file of another quantisation, such as Q8_0 or Q4_K_M",
        );
    }
    // Rows of 8 elements.
    must_refuse(with(&|bytes| bytes[at] = 2), "has rows of 8 elements, which are no blocks of 32");
    must_refuse(
        with(&|bytes| bytes.truncate(bytes.len() - 4096)),
        "is beyond the end of the file; download it again",
    );
    must_refuse(
        with(&|bytes| bytes.truncate(100)),
        "it must be GGUF of version 1 to 3, whole: download it again",
    );
    must_refuse(with(&|bytes| bytes[0] = b'X'), "it must be GGUF of version 1 to 3");
    must_refuse(with(&|bytes| bytes[4] = 4), "it must be GGUF of version 1 to 3");
    must_refuse(Checkpoint::open(&dir.join("none.gguf")), "none.gguf: not there; name a .gguf file");
    // Version 3 is laid out as 2.
    drop(with(&|bytes| bytes[4] = 3).expect("a file"));
}
