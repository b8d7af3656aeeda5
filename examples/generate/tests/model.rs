//! The checkpoint in the repo, and tiny models of other kinds, against what transformers computed with them (`scripts/train`).
//!
//! On the CPU and on a wgpu adapter. With `MLA_REQUIRE_GPU=1` no adapter is a failure, else it is said and that part is left out.

mod common;

use common::{DTYPES, Golden, backends, checkpoint, held_out, setup};
use generate::Where;
use wgpu_mla::Dtype;

/// Logits of an exact cache, of absolute value up to 20.
const TOLERANCE: f32 = 2e-3;
/// With e4m3 a last bit before the cache may be a code in it, which is an eighth.
const E4M3_TOLERANCE: f32 = 2e-3;

fn bound(dtype: Dtype) -> f32 {
    if dtype == Dtype::E4m3 { E4M3_TOLERANCE } else { TOLERANCE }
}

fn logits_equal(dir: &str, goldens: &str, backend: Where) {
    let checkpoint = checkpoint(dir);
    let golden = Golden::open(goldens);
    for (name, dtype) in DTYPES {
        let run = golden.run(name);
        let mut attention =
            generate::paged(&checkpoint.model, &setup(&golden, backend, dtype)).expect("an attention");
        let got = run.follow(&checkpoint.model, attention.as_mut());
        let furthest = common::furthest(&got, &run.logits);
        println!("{dir}, {}, {name}: at most {furthest:.1e} apart", attention.describe());
        assert!(furthest <= bound(dtype), "{dir} on {backend:?}, {name}: {furthest}");
        // Then a greedy text is the same, token by token.
        if dtype != Dtype::E4m3 && dtype != Dtype::Bf16 {
            assert_eq!(
                common::greedy(&got, checkpoint.model.config.vocab_size, run.prompt),
                run.tokens[run.prompt..]
            );
        }
    }
}

#[test]
fn logits_equal_those_of_transformers() {
    for backend in backends() {
        logits_equal("model", "tests/goldens", backend);
    }
}

#[test]
fn logits_of_tiny_models_equal_those_of_transformers() {
    for model in ["v2-lite", "v2-groups", "v3-halves", "v3-dense"] {
        let dir = format!("tests/tiny/{model}");
        logits_equal(&dir, &dir, Where::Cpu);
    }
}

/// A table of all dtypes of the cache, beside what transformers had for the same windows.
#[test]
fn perplexity_and_accuracy_on_held_out_text() {
    let checkpoint = checkpoint("model");
    let tokens = held_out(&checkpoint);
    let reference = common::reference_scores();
    const WINDOWS: usize = 2;
    println!(
        "| cache | perplexity | transformers | next token right | transformers |\n|---|---|---|---|---|"
    );
    let mut exact = None;
    for (name, dtype) in DTYPES {
        let golden = Golden::open("tests/goldens");
        let mut attention =
            generate::paged(&checkpoint.model, &setup(&golden, Where::Cpu, dtype)).expect("an attention");
        let window = reference.window;
        let score =
            generate::evaluate(&checkpoint.model, attention.as_mut(), &tokens, window, WINDOWS, &mut |_| ())
                .expect("a score");
        let theirs = reference.first(name, WINDOWS);
        let [perplexity, their_perplexity] = [&score, &theirs].map(|score| score.perplexity());
        let [accuracy, their_accuracy] = [&score, &theirs].map(|score| 100.0 * score.accuracy());
        println!(
            "| {name} | {perplexity:.4} | {their_perplexity:.4} | {accuracy:.2} % | {their_accuracy:.2} % |"
        );
        assert!((perplexity / their_perplexity - 1.0).abs() < 1e-3, "{name}: {perplexity}");
        assert!((accuracy - their_accuracy).abs() < 0.2, "{name}: {accuracy}");
        let exact = exact.get_or_insert((perplexity, accuracy));
        assert!((perplexity / exact.0 - 1.0).abs() < 5e-3, "{name}: {perplexity}");
        assert!((accuracy - exact.1).abs() < 0.5, "{name}: {accuracy}");
    }
}
