//! A checkpoint of Youtu-LLM-2B's size, in a file of zeros that takes no room on the disk: the program says what it does, and what is
//! wrong, before it reads the weights.
#![cfg(unix)]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const LAYERS: usize = 32;
const SOON: Duration = Duration::from_millis(500);

/// Others may have the machine for a while.
const TRIES: usize = 8;

fn shapes() -> Vec<(String, Vec<usize>)> {
    let [hidden, heads, q, latent, rope, nope, value, inner, vocab]: [usize; 9] =
        [2048, 16, 1536, 512, 64, 128, 128, 6144, 128_256];
    let mut all = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocab, hidden]),
        ("model.norm.weight".into(), vec![hidden]),
    ];
    for layer in 0..LAYERS {
        let of =
            |(name, shape): (&str, &[usize])| (format!("model.layers.{layer}.{name}.weight"), shape.to_vec());
        let tensors: [(&str, &[usize]); 12] = [
            ("input_layernorm", &[hidden]),
            ("post_attention_layernorm", &[hidden]),
            ("self_attn.q_a_proj", &[q, hidden]),
            ("self_attn.q_a_layernorm", &[q]),
            ("self_attn.q_b_proj", &[heads * (nope + rope), q]),
            ("self_attn.kv_a_proj_with_mqa", &[latent + rope, hidden]),
            ("self_attn.kv_a_layernorm", &[latent]),
            ("self_attn.kv_b_proj", &[heads * (nope + value), latent]),
            ("self_attn.o_proj", &[hidden, heads * value]),
            ("mlp.gate_proj", &[inner, hidden]),
            ("mlp.up_proj", &[inner, hidden]),
            ("mlp.down_proj", &[hidden, inner]),
        ];
        all.extend(tensors.map(of));
    }
    all
}

/// `config.json` and the weights; a copy of the small model's tokenizer.
fn large(name: &str, vocab: usize) -> PathBuf {
    let dir = common::gguf::folder(name);
    let config = format!(
        r#"{{"model_type": "youtu", "hidden_size": 2048, "num_hidden_layers": {LAYERS}, "num_attention_heads": 16, "num_key_value_heads": 16,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "intermediate_size": 6144, "vocab_size": {vocab}, "tie_word_embeddings": true, "max_position_embeddings": 131072,
        "rope_parameters": {{"rope_type": "default", "rope_theta": 1600000.0}}}}"#
    );
    std::fs::write(dir.join("config.json"), config).expect("a file");
    std::fs::copy(common::path("model/tokenizer.json"), dir.join("tokenizer.json")).expect("a copy");
    let (mut header, mut at) = (serde_json::Map::new(), 0);
    for (name, shape) in shapes() {
        let end = at + 2 * shape.iter().product::<usize>();
        let of = serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [at, end]});
        header.insert(name, of);
        at = end;
    }
    let mut text = serde_json::to_string(&header).expect("json");
    text += &" ".repeat(text.len().next_multiple_of(8) - text.len());
    let mut file = std::fs::File::create(dir.join("model.safetensors")).expect("a file");
    file.write_all(&(text.len() as u64).to_le_bytes()).expect("a disk");
    file.write_all(text.as_bytes()).expect("a disk");
    file.set_len((8 + text.len() + at) as u64).expect("a disk of sparse files");
    dir
}

fn generate(dir: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_generate"));
    command.args(["--backend", "cpu", "-m"]).arg(dir).args(words);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// The least time of several tries.
fn soonest(what: &str, mut time: impl FnMut() -> Duration) {
    let mut least = Duration::MAX;
    for _ in 0..TRIES {
        least = least.min(time());
        if least <= SOON {
            println!("{what}: {least:.2?}");
            return;
        }
    }
    panic!("{what}: after {least:?}");
}

#[test]
fn the_first_word_comes_soon() {
    let dir = large("soon", 128_256);
    soonest("the first word", || {
        let begin = Instant::now();
        let mut child = generate(&dir, &["-p", "a", "-n", "1"]).spawn().expect("it runs");
        let mut line = String::new();
        BufReader::new(child.stderr.take().expect("a pipe")).read_line(&mut line).expect("a line");
        let time = begin.elapsed();
        child.kill().expect("a program");
        child.wait().expect("a program");
        assert!(line.ends_with(": 32 layers, 16 heads of 512+64\n"), "{line}");
        time
    });
    std::fs::remove_dir_all(dir).expect("a folder");
}

#[test]
fn a_mistake_is_told_soon() {
    let (good, wrong) = (large("mistakes", 128_256), large("mistakes-vocabulary", 128_255));
    let long = "word ".repeat(1000);
    let file = good.join("long.txt");
    std::fs::write(&file, long).expect("a file");
    let file = file.to_str().expect("UTF-8");
    for (dir, words, why) in [
        (&good, &["-p", ""][..], "give it at least one character"),
        (&good, &["-p", "a", "--page-size", "300"], "must be 1 to 256"),
        (&good, &["-p", "a", "--tokenizer", "nowhere"], "nowhere"),
        (&good, &["--chat"], "no chat_template.jinja"),
        (&good, &["-p", "a", "--backend", "cuda"], "backend cuda"),
        (&good, &["--evaluate", file, "--window", "1000000"], "must be 1 to"),
        (&wrong, &["-p", "a"], "has shape [128256, 2048], its config.json asks for [128255 (vocab_size)"),
    ] {
        if cfg!(feature = "cuda") && words.contains(&"cuda") {
            continue;
        }
        soonest(why, || {
            let begin = Instant::now();
            let output = generate(dir, words).output().expect("it runs");
            let time = begin.elapsed();
            let told = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && told.contains(why), "{words:?}: {told}");
            assert!(!told.contains("weights: "), "{words:?}: {told}");
            time
        });
    }
    for dir in [good, wrong] {
        std::fs::remove_dir_all(dir).expect("a folder");
    }
}
