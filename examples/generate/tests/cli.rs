//! The command line: what it prints, and its errors for wrong arguments.

mod common;

use std::process::{Command, Output, Stdio};

fn generate(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_generate"));
    command.args(["--backend", "cpu", "--max-tokens", "4"]).args(words);
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

fn output(words: &[&str]) -> Output {
    generate(words).output().expect("it runs")
}

#[test]
fn it_says_what_it_did() {
    let output = output(&["--prompt", "KING HENRY:", "--temperature", "0"]);
    assert!(output.status.success());
    assert!(text(&output.stdout).starts_with("KING HENRY:\n"), "{}", text(&output.stdout));
    let told = text(&output.stderr);
    for what in [
        "4 layers, 8 heads of 512+64",
        "weights: 10.4 MB in ",
        "attention: CPU",
        "f16 cache of 590 kB",
        "prefill: ",
        "first token after ",
        "decode: 3 tokens, ",
    ] {
        assert!(told.contains(what), "{told}\nlacks {what}");
    }
    assert!(told.contains("cache: at most 1 of 2 pages of 64 tokens in use"), "{told}");
}

/// A cache of e4m3 without scales is less exact, and nothing else would say why.
#[test]
fn an_e4m3_cache_without_scales_says_that_it_takes_1() {
    const SAID: &str = "e4m3 cache: no kv_cache_scales.json, so k_scale is 1 in every layer";
    let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-scales");
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("a folder");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(common::path("model").join(file), dir.join(file)).expect("a copy");
    }
    let without = dir.to_str().expect("UTF-8");
    let text_to_foretell = common::path("data/held_out.txt");
    let evaluate =
        ["--evaluate", text_to_foretell.to_str().expect("UTF-8"), "--window", "16", "--windows", "1"];
    for (words, is_said) in [
        (vec![without, "--kv-dtype", "e4m3"], true),
        ([&[without, "--kv-dtype", "e4m3"][..], &evaluate].concat(), true),
        (vec![without], false),
        (vec!["--kv-dtype", "e4m3"], false),
    ] {
        let output = output(&words);
        let told = text(&output.stderr);
        assert!(output.status.success(), "{words:?}: {told}");
        assert_eq!(told.contains(SAID), is_said, "{words:?}: {told}");
    }
}

#[test]
fn prompts_that_begin_alike_share_pages() {
    let scene = "First Citizen:\nGood morrow, neighbour. Have you heard the news?\n\n";
    let [a, b, c] = ["Second Citizen:\n", "Third Citizen:\n", ""].map(|who| format!("{scene}{who}"));
    let words = ["--page-size", "8", "--prompt", &a, "--prompt", &b, "--prompt", &c, "--batch", "5"];
    let output = output(&words);
    let (said, told) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{told}");
    assert!((1..=5).all(|sequence| said.contains(&format!("[{sequence}] First Citizen:\n"))), "{said}");
    assert!(told.contains("shared with another prompt"), "{told}");
}

#[test]
fn odd_characters_are_written_as_they_came() {
    let prompt = "\u{1F3AD} na\u{EF}ve \u{4F60}\u{597D} \u{0}x";
    // No shell passes a NUL on.
    let prompt = prompt.replace('\u{0}', "\u{7}");
    let output = output(&["--prompt", &prompt]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).starts_with(&prompt));
}

#[test]
fn wrong_words_are_refused_with_the_cure() {
    let long = "word ".repeat(2000);
    for (words, status, cure) in [
        (&["--kv-dtype", "fp8"][..], 2, "must be f32, f16, bf16, e4m3 or fp8_ds_mla"),
        (&["--index-dtype", "fp8"], 2, "--index-dtype fp8: must be f32, f16, bf16 or e4m3"),
        (
            &["--index-dtype", "f16"],
            1,
            "--index-dtype: the model has no indexer, and attends all tokens; leave it out",
        ),
        (&["--temperature", "-1"], 2, "--temperature -1: must be a number, 0 or more"),
        (&["-t", "nan"], 2, "-t nan: must be a number, 0 or more"),
        (&["--max-tokens", "0"], 2, "must be at least 1"),
        (&["--max-tokens", "some"], 2, "must be a number"),
        (&["--max-tokens", "-1"], 2, "--max-tokens -1: must be a number, whole and from 0 to 2^64 - 1"),
        (&["--seed", "1.5"], 2, "--seed 1.5: must be a number, whole and from 0 to 2^64 - 1"),
        (&["--page-size", "4294967296"], 2, "must be a number, whole and from 0 to 2^32 - 1"),
        (&["--temperature", "warm"], 2, "--temperature warm: must be a number, 0 or more"),
        (&["--batch", "4097"], 2, "must be 1, the prompts, to 4096"),
        (&["--evaluate", ""], 2, "--evaluate needs a file"),
        (&["--batch", "0"], 2, "must be at least 1"),
        (&["--prompt", "a", "--prompt", "b", "--batch", "1"], 2, "must be 2, the prompts, to 4096"),
        (&["--page-size", "0"], 2, "must be 1 to 256"),
        (&["--backend", "vulkan"], 2, "must be auto, cuda, wgpu or cpu"),
        (&["--backend"], 2, "needs a value"),
        (&["--engine", "candle"], 2, "--engine candle: must be burn or cpu"),
        (
            &["--engine", "burn"],
            1,
            "built without burn; in the repository, run: cargo run --release --manifest-path burn/generate/Cargo.toml -- --engine burn",
        ),
        (&["--engine", "burn", "--accuracy"], 2, "it measures the engine cpu; leave --engine out"),
        (&["--weight-dtype", "e4m3"], 2, "--weight-dtype e4m3: must be f32, f16 or bf16"),
        (
            &["--weight-dtype", "f16"],
            1,
            "the engine cpu multiplies with weights as the file has them; leave it out",
        ),
        (&["--verbose"], 2, "no such option"),
        (&["--verbose=1"], 2, "--verbose: no such option"),
        (&["--exact=1"], 2, "--exact takes no value"),
        (&["--top-p", "1.5"], 2, "--top-p 1.5: must be a number, from 0 to 1"),
        (&["--min-p=-1"], 2, "--min-p -1: must be a number, from 0 to 1"),
        (&["--top-k", "x"], 2, "--top-k x: must be a number"),
        (&["--repetition-penalty", "0"], 2, "must be more than 0"),
        (&["-f", "nowhere"], 2, "nowhere: "),
        (&["--stop", ""], 2, "--stop needs a text"),
        (&["--system", "x"], 2, "--system: only with --chat; give it too"),
        (&["--chat", "--think", "loudly"], 2, "--think loudly: must be show, hide or off"),
        (&["--chat", "--context", "0"], 2, "--context 0: must be at least 1"),
        (&["--chat", "--batch", "2"], 2, "--batch and --chat: one at a time"),
        (&["--chat"], 1, "no chat_template.jinja, and none in tokenizer_config.json; take a checkpoint"),
        (&["--chat", "--chat-template", "nowhere"], 1, "nowhere: not there; name a file of a chat template"),
        (&["--chat", "--chat-template", "Cargo.toml"], 1, "room is for 1024"),
        (&["-m", "a", "b"], 2, "one directory at a time"),
        (&["a", "b"], 2, "one directory at a time"),
        (&["nowhere"], 1, "name the directory of a checkpoint"),
        (&["--prompt", ""], 1, "give it at least one character"),
        (&["--prompt", &long], 1, "shorten it"),
        (&["--evaluate", "nowhere"], 1, "nowhere"),
        (&["--accuracy="], 2, "needs a file"),
        (&["--accuracy=no/such/folder"], 1, "no/such/folder: "),
        (&["--accuracy=-", "--window", "2000"], 1, "must be 1 to 1024"),
        (&["--windows", "0"], 2, "must be at least 1"),
        (&["--evaluate", "Cargo.toml", "--window", "4000000000"], 1, "must be 1 to 1024"),
        (&["--evaluate", "model/kv_cache_scales.json", "--window", "1024"], 1, "use a longer text"),
    ] {
        let output = output(words);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{words:?}: {told}");
        let last = told.lines().next_back().unwrap_or_default();
        assert!(last.starts_with("generate: ") && last.contains(cure), "{words:?}: {told}\nlacks: {cure}");
        assert!(!told.contains("panicked"), "{words:?}: {told}");
        // All of it is known before a weight is read.
        assert!(!told.contains("weights: "), "{words:?}: {told}");
    }
}

/// Each pair is the same said in two ways.
#[test]
fn options_have_short_names_and_values_of_both_forms() {
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("prompt.txt");
    std::fs::write(&file, "KING HENRY:\n").expect("a file");
    let file = file.to_str().expect("UTF-8");
    let dir = common::path("model");
    let dir = dir.to_str().expect("UTF-8");
    let said = |words: &[&str]| {
        let output = output(words);
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let want = said(&["--prompt", "KING HENRY:", "--temperature", "0"]);
    for words in [
        &["-p", "KING HENRY:", "-t", "0", "-n", "4", "-s", "3", "-m", dir][..],
        &["--file", file, "--temperature=2", "--max-tokens=4", "--top-p", "0"],
    ] {
        assert_eq!(said(words), want, "{words:?}");
    }
    let mut command = generate(&["-f", "-", "-t", "0"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
    let mut input = child.stdin.take().expect("a pipe");
    std::io::Write::write_all(&mut input, b"KING HENRY:\n").expect("it reads");
    drop(input);
    assert_eq!(text(&child.wait_with_output().expect("it ends").stdout), want);
    assert!(said(&["--version"]).starts_with("generate of wgpu-mla "));
    let devices = said(&["--list-devices"]);
    for backend in ["CUDA: ", "wgpu: ", "CPU: CPU, "] {
        assert!(devices.contains(backend), "{devices}");
    }
}

/// `generation_config.json` says what ends a text and how tokens are chosen, and the command line decides.
#[test]
fn the_makers_advice_is_taken() {
    let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("advised");
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("a folder");
    for file in ["config.json", "model.safetensors", "tokenizer.json", "kv_cache_scales.json"] {
        std::fs::copy(common::path("model").join(file), dir.join(file)).expect("a copy");
    }
    let words = ["-p", "KING HENRY:", "-m", dir.to_str().expect("UTF-8")];
    let said = |advice: &str, more: &[&str]| {
        std::fs::write(dir.join("generation_config.json"), advice).expect("a file");
        let output = output(&[&words[..], more].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let greedy = said("{}", &["-t", "0"]);
    assert_eq!(said(r#"{"do_sample": false}"#, &[]), greedy);
    assert_eq!(said(r#"{"top_k": 1, "temperature": 1.5}"#, &[]), greedy);
    // The first token of the answer ends it.
    let tokenizer = generate::Text::open(&dir).expect("a tokenizer");
    let tokens = tokenizer.encode(greedy.trim_end()).expect("tokens");
    let first = tokens[tokenizer.encode("KING HENRY:").expect("tokens").len()];
    assert_eq!(said(&format!(r#"{{"eos_token_id": [7, {first}]}}"#), &["-t", "0"]), "KING HENRY:\n");
}

/// Questions of the command line come first. A stop is not written, nor what is reasoned, and the cache has what was said before.
#[test]
fn a_conversation() {
    let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("talk");
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("a folder");
    for file in ["config.json", "model.safetensors", "tokenizer.json", "kv_cache_scales.json"] {
        std::fs::copy(common::path("model").join(file), dir.join(file)).expect("a copy");
    }
    let template = "{% if enable_thinking is defined %}ROMEO:\nMy lord, the duke is dead.{% endif %}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}";
    std::fs::write(dir.join("chat_template.jinja"), template).expect("a file");
    let dir = dir.to_str().expect("UTF-8");
    let talk = |words: &[&str], lines: &str| {
        let words = [&["-m", dir, "--chat", "-t", "0", "--context", "64"], words].concat();
        let mut child = generate(&words);
        let child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = child.spawn().expect("it runs");
        let mut input = child.stdin.take().expect("a pipe");
        // A program that ended does not read.
        let _ = std::io::Write::write_all(&mut input, lines.as_bytes());
        drop(input);
        let output = child.wait_with_output().expect("it ends");
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (status, said, told) = talk(&["-p", "KING HENRY:", "--system", "A play."], "\nFirst Citizen:\r\n");
    assert_eq!(status, Some(0), "{told}");
    assert!(told.contains(" kept from earlier turns, ") && told.contains("decode: 6 tokens"), "{told}");
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines.len() >= 2, "{said}");
    // What one alone says, up to a stop.
    let (_, said, _) = talk(&[], "KING HENRY:\n");
    let stop: String = said.trim_end().chars().rev().take(3).collect::<Vec<_>>().into_iter().rev().collect();
    let (_, until, told) = talk(&["--stop", &stop], "KING HENRY:\n");
    assert_eq!(until, format!("{}\n", said.split(&stop).next().unwrap_or_default()), "{told}");
    // The template knows.
    assert_ne!(talk(&["--think", "off"], "KING HENRY:\n").1, said);
    assert_eq!(
        talk(&["--think", "hide"], "KING HENRY:\n").1,
        format!("{}\n", said.trim_start().trim_end_matches('\n'))
    );
    let (status, _, told) = talk(&[], &"word word word word word word\n".repeat(9));
    assert_eq!(status, Some(1), "{told}");
    assert!(
        told.ends_with(
            "room is for 64: begin another, or give a larger --context where the model has more\n"
        ),
        "{told}"
    );
}

#[test]
fn accuracy_is_a_page() {
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("accuracy.md");
    let _ = std::fs::remove_file(&file);
    let option = format!("--accuracy={}", file.display());
    let output = output(&[&option, "--window", "24", "--windows", "1"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let page = std::fs::read_to_string(&file).expect("a page");
    for what in [
        "24 tokens of the held-out text",
        "| CPU | f32 | ",
        "| CPU | f16 | ",
        "| CPU | bf16 | ",
        "| CPU | e4m3, `k_scale` of the checkpoint | ",
        "| CPU | e4m3, `k_scale` 1 | ",
        "(0.03125 in the first)",
        "pull/34597",
        "--windows 1` wrote this page on 2",
    ] {
        assert!(page.contains(what), "{page}\nlacks {what}");
    }
}

/// `tokenizers` panics on the file: the person sees one line.
#[test]
fn a_malformed_tokenizer_is_an_error() {
    let dir = common::changed::changed("tokenizer", "v3-dense", "config.json", |text| text);
    let model = r#"{"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}"#;
    let normalizer = r#"{"type": "Precompiled", "precompiled_charsmap": "AAAA"}"#;
    let tokenizer = format!(r#"{{"version": "1.0", "normalizer": {normalizer}, "model": {model}}}"#);
    std::fs::write(dir.join("tokenizer.json"), tokenizer).expect("a file");
    let output = output(&[dir.to_str().expect("UTF-8")]);
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("tokenizer.json: ") && told.contains("download it again"), "{told}");
    assert!(!told.contains("panicked") && told.lines().count() == 2, "{told}");
}

/// Under `| head -1` and `2>&1 | head -1` the program ends, and does not panic.
#[cfg(unix)]
#[test]
fn readers_may_go_away() {
    for both in [false, true] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let mut command = generate(&["--max-tokens", "900"]);
        command.stdout(writer.try_clone().expect("a handle"));
        if both {
            command.stderr(writer);
        } else {
            drop(writer);
            command.stderr(Stdio::piped());
        }
        let child = command.spawn().expect("it runs");
        drop((reader, command));
        let output = child.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{output:?}");
        let told = text(&output.stderr);
        assert!(!told.contains("decode:") && !told.contains("panicked"), "{told}");
    }
}

#[cfg(unix)]
#[test]
fn words_that_are_not_utf8_are_refused() {
    use std::os::unix::ffi::OsStrExt;
    let output = generate(&[]).arg(std::ffi::OsStr::from_bytes(b"\xff")).output().expect("it runs");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("must be UTF-8"));
}
