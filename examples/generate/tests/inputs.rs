//! A batch gives what its sequences give by themselves, and a bad prompt is an error that names the cure.

mod common;

use common::changed::{changed, must_refuse};
use common::{Golden, backends, checkpoint, setup};
use generate::{Checkpoint, Options, Sampling, Setup, Where, generate};
use wgpu_mla::Dtype;

const GREEDY: Sampling =
    Sampling { temperature: 0.0, seed: 1, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 };

fn cpu() -> Setup {
    Setup { backend: Where::Cpu, kv: Dtype::F32.into(), page_size: 16, sequences: 4, ..Setup::default() }
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

    let warm = Sampling { temperature: 1.5, seed: 7, ..Sampling::default() };
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

/// The RoPE table is as long as the run: all positions of this config would be 256 MiB, more than many devices bind.
#[test]
fn a_model_of_a_million_positions_runs() {
    let long = changed("million", "v3-halves", "config.json", |text| {
        text.replace(r#""max_position_embeddings": 128"#, r#""max_position_embeddings": 1048576"#)
    });
    let (tiny, long) = (checkpoint("tests/tiny/v3-halves"), Checkpoint::open(&long).expect("a checkpoint"));
    assert_eq!(long.model.config.max_position_embeddings, 1 << 20);
    let prompt = [vec![5, 6, 7, 8]];
    for backend in backends() {
        let setup = Setup { backend, ..cpu() };
        assert_eq!(run(&long, &setup, &prompt, GREEDY), run(&tiny, &setup, &prompt, GREEDY));
    }
    let short = Setup { positions: 6, ..cpu() };
    let mut attention = generate::paged(&long.model, &short).expect("an attention");
    let options = Options { max_tokens: 12, sampling: GREEDY };
    let result = generate(&long.model, attention.as_mut(), &prompt, &options, &mut |_, _| Ok(()));
    must_refuse(result, "raise Setup::positions");
    // 2.7 TB of cache, which is asked for before the table.
    let huge = Setup { tokens: 1 << 30, ..cpu() };
    for backend in backends().into_iter().filter(|&backend| backend != Where::Cpu) {
        assert!(generate::paged(&long.model, &Setup { backend, ..huge.clone() }).is_err());
    }
}
