//! Batches are the sequences that they are made of, and bad input is an error that names the cure.

mod common;

use std::path::PathBuf;

use common::{Golden, backends, checkpoint, path, setup};
use generate::{Checkpoint, Config, Options, Sampling, Setup, Where, generate};
use wgpu_mla::Dtype;

const GREEDY: Sampling = Sampling { temperature: 0.0, seed: 1 };

fn cpu() -> Setup {
    Setup { backend: Where::Cpu, kv: Dtype::F32, page_size: 16, sequences: 4, ..Setup::default() }
}

fn run(checkpoint: &Checkpoint, setup: &Setup, prompts: &[Vec<u32>], sampling: Sampling) -> Vec<Vec<u32>> {
    let mut attention = generate::paged(&checkpoint.model, setup).expect("an attention");
    let options = Options { max_tokens: 12, sampling };
    let mut told = vec![Vec::new(); prompts.len()];
    let mut on_token = |sequence: usize, token: u32| {
        told[sequence].push(token);
        Ok(())
    };
    let done =
        generate(&checkpoint.model, attention.as_mut(), prompts, &options, &mut on_token).expect("tokens");
    assert_eq!(told, done.tokens);
    assert_eq!(attention.pages().used().0, 0, "all pages are free again");
    done.tokens
}

#[test]
fn a_batch_is_the_sequences_that_it_is_made_of() {
    backends().into_iter().for_each(batch_on);
}

fn batch_on(backend: Where) {
    let tiny = checkpoint("tests/tiny/v2-lite");
    let setup = || Setup { backend, ..cpu() };
    let a: Vec<u32> = (0..21).map(|i| i * 7 % 96).collect();
    let b: Vec<u32> = (0..37).map(|i| i * 5 % 96).collect();
    let alone = [&a, &b].map(|prompt| run(&tiny, &setup(), std::slice::from_ref(prompt), GREEDY).remove(0));
    // Equal prompts are forks; pages of 16 are shared in part, and copied when they are written.
    let batch = run(&tiny, &setup(), &[a.clone(), b.clone(), a.clone()], GREEDY);
    assert_eq!(batch, [alone[0].clone(), alone[1].clone(), alone[0].clone()]);
    // In pieces that end anywhere.
    let pieces = Setup { step_tokens: 5, ..setup() };
    assert_eq!(run(&tiny, &pieces, &[a.clone(), b], GREEDY), alone);

    let warm = Sampling { temperature: 1.5, seed: 7 };
    let sampled = run(&tiny, &setup(), &[a.clone(), a.clone()], warm);
    assert_ne!(sampled[0], sampled[1], "each sequence has a seed of its own");
    assert_eq!(run(&tiny, &setup(), &[a.clone(), a], warm), sampled, "and a seed gives the same text again");
}

#[test]
fn what_prompts_begin_with_alike_is_in_the_cache_once() {
    backends().into_iter().for_each(sharing_on);
}

fn sharing_on(backend: Where) {
    let tiny = checkpoint("tests/tiny/v2-lite");
    let tokens = |count: u32, last: u32| (0..count).map(|i| i * 7 % 96).chain([last]).collect::<Vec<u32>>();
    // 40 tokens alike with the first: two whole pages of 16. 32 are two pages, of which the last token is computed. The last is a fork.
    let prompts = [tokens(40, 1), tokens(40, 2), tokens(31, 25), tokens(20, 3), tokens(40, 2)];
    assert_eq!(prompts[0][..32], prompts[2]);
    for step_tokens in [256, 7] {
        let setup = Setup { backend, step_tokens, sequences: 5, ..cpu() };
        let mut attention = generate::paged(&tiny.model, &setup).expect("an attention");
        let options = Options { max_tokens: 12, sampling: GREEDY };
        let done = generate(&tiny.model, attention.as_mut(), &prompts, &options, &mut |_, _| Ok(()));
        let done = done.expect("tokens");
        for (prompt, tokens) in prompts.iter().zip(&done.tokens) {
            let alone = run(&tiny, &Setup { backend, ..cpu() }, std::slice::from_ref(prompt), GREEDY);
            assert_eq!(&alone[0], tokens);
        }
        assert_eq!((done.stats.prompt_tokens, done.stats.prefill_tokens), (176, 41 + 9 + 16 + 5));
        // By themselves they would have 4, 4, 3, 2 and 4 pages for 41, 41, 32, 21 and 41 tokens and 11 more.
        assert_eq!(attention.pages().used().1, 4 + 2 + 2 + 1 + 2, "{step_tokens}");
    }
}

#[test]
fn text_is_as_in_transformers() {
    let checkpoint = checkpoint("model");
    let text = checkpoint.tokenizer().expect("a tokenizer");
    let run = Golden::open("tests/goldens").run("f32");
    let (prompt, new) = run.tokens.split_at(run.prompt);
    assert_eq!(text.encode(&text.decode(prompt).expect("text")).expect("tokens"), prompt);
    assert_eq!(Some(text.decode(new).expect("text")), run.text);
    let mut stream = text.stream();
    let streamed: String = new.iter().map(|&token| stream(token).expect("text")).collect();
    assert_eq!(Some(streamed), run.text);
}

fn must_refuse<T>(result: generate::Result<T>, cure: &str) {
    match result {
        Ok(_) => panic!("taken, without: {cure}"),
        Err(error) => assert!(error.to_string().contains(cure), "{error}\nlacks: {cure}"),
    }
}

#[test]
fn bad_prompts_are_refused() {
    let tiny = checkpoint("tests/tiny/v2-lite");
    let golden = Golden::open("tests/tiny/v2-lite");
    let mut attention =
        generate::paged(&tiny.model, &setup(&golden, Where::Cpu, Dtype::F16)).expect("an attention");
    let options = Options { max_tokens: 4, sampling: GREEDY };
    for (prompt, cure) in [
        (vec![], "give it at least one character"),
        (vec![1; 128], "shorten it"),
        (vec![96], "use the tokenizer.json that came with it"),
    ] {
        let result =
            generate(&tiny.model, attention.as_mut(), &[vec![1, 2], prompt], &options, &mut |_, _| Ok(()));
        must_refuse(result, cure);
    }
    let full = Setup { tokens: 16, sequences: 1, ..cpu() };
    let mut attention = generate::paged(&tiny.model, &full).expect("an attention");
    let result = generate(&tiny.model, attention.as_mut(), &[vec![1; 100]], &options, &mut |_, _| Ok(()));
    must_refuse(result, "make the pool larger");
    let huge = Setup { page_size: 512, ..cpu() };
    must_refuse(generate::paged(&tiny.model, &huge), "1..=256");
}

/// A copy of a tiny model with one file changed.
fn changed(name: &str, file: &str, change: impl Fn(String) -> String) -> PathBuf {
    let to = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&to).expect("a folder");
    for entry in std::fs::read_dir(path("tests/tiny/v3-halves")).expect("a folder") {
        let from = entry.expect("an entry").path();
        std::fs::copy(&from, to.join(from.file_name().expect("a name"))).expect("a copy");
    }
    let text = std::fs::read_to_string(to.join(file)).expect("a file");
    std::fs::write(to.join(file), change(text)).expect("a file");
    to
}

#[test]
fn bad_checkpoints_are_refused() {
    must_refuse(Config::open(&path("no such folder")), "name the directory of a checkpoint");
    for (from, to, cure) in [
        (r#""deepseek_v3""#, r#""llama""#, "must be deepseek_v2"),
        (r#""kv_lora_rank": 512"#, r#""kv_lora_rank": 500"#, "must be 512/64"),
        (r#""silu""#, r#""gelu""#, "must be silu"),
        (r#""hidden_size""#, r#""width""#, "hidden_size"),
        (r#""vocab_size": 96"#, r#""vocab_size": 96, "quantization_config": {}"#, "fp8_cast_bf16.py"),
        (r#""rope_type": "default""#, r#""rope_type": "dynamic""#, "must be default or yarn"),
        (r#""n_group": 1"#, r#""n_group": 3"#, "groups must be of one size"),
    ] {
        let dir = changed("config", "config.json", |text| {
            assert!(text.contains(from), "{from}");
            text.replace(from, to)
        });
        must_refuse(Config::open(&dir), cure);
    }
    let wider =
        changed("wider", "config.json", |text| text.replace(r#""v_head_dim": 8"#, r#""v_head_dim": 16"#));
    must_refuse(Checkpoint::open(&wider), "its config.json asks for");
    let lost =
        changed("lost", "model.safetensors.index.json", |text| text.replace("model-00001", "model-00009"));
    must_refuse(Checkpoint::open(&lost), "download all files");
    let short = changed("short", "config.json", |text| text);
    std::fs::write(short.join("model-00001-of-00006.safetensors"), b"cut off").expect("a file");
    must_refuse(Checkpoint::open(&short), "download it again");
    let none = changed("none", "config.json", |text| text);
    must_refuse(Checkpoint::open(&none).and_then(|checkpoint| checkpoint.tokenizer()), "tokenizer.json");
}
