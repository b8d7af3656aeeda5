//! Whole models by burn against the engine cpu: greedy tokens in f32, and what is refused.

use std::path::{Path, PathBuf};

use generate::attention::Attention;
use generate::parts::Dtype;
use generate::program::DeviceEngine;
use generate::{Checkpoint, Config, Options, Sampling, Setup, Where};
use generate_burn::{Burn, Engine};

/// burn makes its device once a process.
static BURN: std::sync::LazyLock<Burn> = std::sync::LazyLock::new(Burn::default);

fn of_examples(what: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/generate").join(what)
}

fn setup(weight: Option<Dtype>) -> Setup {
    let base = Setup { kv: Dtype::F32.into(), tokens: 128, positions: 128, sequences: 2, ..Setup::default() };
    Setup { device_weight: weight, step_tokens: 32, workspace_bytes: 1 << 20, ..base }
}

fn engine(checkpoint: &Checkpoint, setup: &Setup) -> Engine {
    let mut done = 0;
    let engine = BURN.open(checkpoint, setup, &mut |bytes| done = bytes).expect("an engine");
    assert!(done > 0 && done <= 2 * checkpoint.model.bytes(), "{done} of {}", checkpoint.model.bytes());
    engine
}

fn greedy(checkpoint: &Checkpoint, attention: &mut dyn Attention, prompts: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let options = Options { max_tokens: 32, sampling };
    let done = generate::generate(&checkpoint.model, attention, prompts, &options, &mut |_, _| Ok(()));
    done.expect("tokens").tokens
}

/// 32 of 32 tokens, of two sequences of different lengths in one batch.
fn tokens_of(dir: &str) {
    let mut checkpoint = Checkpoint::open(&of_examples(dir)).expect("a checkpoint");
    // Texts do not end here.
    checkpoint.model.config.eos.clear();
    let vocab = checkpoint.model.config.vocab_size as u32;
    let prompts =
        [19, 5].map(|count: u32| (0..count).map(|at| (at * 37 + count) % vocab).collect::<Vec<_>>());
    let cpu = Setup { backend: Where::Cpu, ..setup(None) };
    let mut cpu = generate::paged(&checkpoint.model, &cpu).expect("a CPU");
    let want = greedy(&checkpoint, cpu.as_mut(), &prompts);
    let mut engine = engine(&checkpoint, &setup(Some(Dtype::F32)));
    let got = greedy(&checkpoint, &mut engine, &prompts);
    assert!(want.iter().all(|tokens| tokens.len() == 32));
    assert_eq!(got, want, "{dir}");
}

/// Experts in groups, YaRN, a latent of queries, tied embeddings.
#[test]
fn the_repositorys_checkpoint() {
    tokens_of("model");
}

#[test]
fn deepseek_v2_lite() {
    tokens_of("tests/tiny/v2-lite");
}

#[test]
fn deepseek_v3() {
    tokens_of("tests/tiny/v3-dense");
}

#[test]
fn youtu() {
    tokens_of("tests/tiny/youtu");
}

#[test]
fn minicpm3() {
    tokens_of("tests/tiny/minicpm3");
}

#[test]
fn mistral4() {
    tokens_of("tests/tiny/mistral4");
}

#[test]
fn glm4_moe_lite() {
    tokens_of("tests/tiny/glm4-moe-lite");
}

#[test]
fn axk1() {
    tokens_of("tests/tiny/axk1");
}

#[test]
fn sarvam() {
    tokens_of("tests/tiny/sarvam");
}

/// f16 weights: logits close to those of f32, and times of all parts.
#[test]
fn f16_weights_and_times() {
    let checkpoint = Checkpoint::open(&of_examples("model")).expect("a checkpoint");
    let tokens: Vec<u32> = (0..24).map(|at| at * 41 % 1024).collect();
    let logits = |weight| {
        let mut engine = engine(&checkpoint, &setup(weight));
        let sequence = engine.pages_mut().add();
        engine.begin(&[(sequence, 24)]).expect("a step");
        engine.times.begin();
        let logits = engine.step(&tokens, &[23]).expect("logits").expect("a whole step");
        let report = engine.times.take().report(1);
        assert_eq!(report.lines().filter(|line| !line.contains(" 0 us,")).count(), 3, "{report}");
        assert!(engine.describe().contains("all of the model by burn"), "{}", engine.describe());
        logits
    };
    let (best, exact) = (logits(None), logits(Some(Dtype::F32)));
    let largest = exact.iter().fold(0f32, |most, x| most.max(x.abs()));
    let worst = best.iter().zip(&exact).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(worst <= 0.02 * largest, "{worst} of {largest}");
}

#[test]
fn what_is_not_served_is_refused_by_name() {
    let told =
        |config: &Config, setup: &Setup| BURN.serves(config, setup, true).map_err(|error| error.to_string());
    let plain = Config::open(&of_examples("model")).expect("a config");
    told(&plain, &setup(None)).expect("served");
    let sparse = Config::open(&of_examples("tests/tiny/v32")).expect("a config");
    let cases = [
        (&sparse, setup(None), "an indexer"),
        (&plain, Setup { guard: true, ..setup(None) }, "--guard"),
        (&plain, Setup { exact: true, ..setup(None) }, "--exact"),
        (&plain, Setup { backend: Where::Cpu, ..setup(None) }, "a backend other than wgpu"),
        (&plain, Setup { kv: generate::parts::KvLayout::Ds656, ..setup(None) }, "a cache of records"),
    ];
    for (config, setup, what) in cases {
        let why = told(config, &setup).expect_err(what);
        assert_eq!(why, format!("{what} is not served by the engine burn: use --engine cpu"));
    }
}
