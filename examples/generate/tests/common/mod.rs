//! Goldens of transformers, and runs that are compared with them.
#![allow(dead_code)] // Each test binary uses a part.

pub mod changed;
pub mod gguf;
pub mod given;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use generate::attention::Attention;
use generate::{Checkpoint, Model, Score, Setup, Where};
use given::StoredRows;
use safetensors::SafeTensors;
use wgpu_mla::Dtype;
use wgpu_mla::any::AnyBackend;
use wgpu_mla::cpu::Cpu;
use wgpu_mla::gpu::Gpu;

pub const DTYPES: [(&str, Dtype); 4] =
    [("f32", Dtype::F32), ("f16", Dtype::F16), ("bf16", Dtype::Bf16), ("e4m3", Dtype::E4m3)];

pub fn path(inside: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(inside)
}

pub fn checkpoint(dir: &str) -> Checkpoint {
    Checkpoint::open(&path(dir)).expect("a checkpoint")
}

/// The CPU, wgpu where it has an adapter, and CUDA where it is built in and has a card.
pub fn backends() -> Vec<Where> {
    let mut all = vec![Where::Cpu];
    let mut add = |backend, here: Result<(), String>, required: &str| match here {
        Ok(()) => all.push(backend),
        Err(error) => {
            assert!(std::env::var(required).as_deref() != Ok("1"), "{error}");
            eprintln!("NOT TESTED: {backend:?}: {error}");
        }
    };
    add(Where::Wgpu, Gpu::new().map(|_| ()).map_err(|error| error.to_string()), "MLA_REQUIRE_GPU");
    #[cfg(feature = "cuda")]
    {
        let here = wgpu_mla::cuda::Cuda::new(0).map(|_| ()).map_err(|error| error.to_string());
        add(Where::Cuda, here, "MLA_REQUIRE_CUDA");
    }
    all
}

/// One device for several attentions, which then compile a kernel once.
pub fn device(backend: Where) -> AnyBackend {
    match backend {
        Where::Cpu => Cpu::new().into(),
        #[cfg(feature = "cuda")]
        Where::Cuda => wgpu_mla::cuda::Cuda::new(0).expect("a card").into(),
        _ => Gpu::new().expect("an adapter").into(),
    }
}

/// Small pages, so that sequences have several; pieces that end within one.
pub fn setup(golden: &Golden, backend: Where, kv: Dtype) -> Setup {
    Setup {
        backend,
        kv: kv.into(),
        page_size: 16,
        step_tokens: 100,
        exact: true,
        k_scales: golden.k_scales.clone(),
        ..Setup::default()
    }
}

/// A file of goldens: one run for each dtype of the cache.
pub struct Golden {
    bytes: Vec<u8>,
    prompt: usize,
    pub k_scales: Vec<f32>,
}

/// Tokens, prompt first, and the logits that follow each.
pub struct Run {
    pub tokens: Vec<u32>,
    pub logits: Vec<f32>,
    /// Tokens of the prompt.
    pub prompt: usize,
    pub text: Option<String>,
}

impl Golden {
    pub fn open(dir: &str) -> Self {
        let bytes = std::fs::read(path(dir).join("goldens.safetensors")).expect("goldens");
        let about = about(&bytes);
        let prompt = about["prompt_tokens"].parse().expect("a count");
        let k_scales = serde_json::from_str(&about["k_scales"]).expect("scales");
        Self { bytes, prompt, k_scales }
    }

    pub fn run(&self, dtype: &str) -> Run {
        let (tokens, logits) = (self.tokens(dtype), self.words(&format!("logits.{dtype}")));
        let logits = logits.into_iter().map(f32::from_bits).collect();
        let text = about(&self.bytes).remove(&format!("text.{dtype}"));
        Run { tokens, logits, prompt: self.prompt, text }
    }

    /// A run's tokens, prompt first.
    pub fn tokens(&self, dtype: &str) -> Vec<u32> {
        self.words(&format!("tokens.{dtype}"))
    }

    fn words(&self, name: &str) -> Vec<u32> {
        let file = SafeTensors::deserialize(&self.bytes).expect("safetensors");
        let data = file.tensor(name).expect("a tensor").data();
        data.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("4 bytes"))).collect()
    }
}

impl Golden {
    /// The positions that tokens attend in each layer that has an indexer: ascending, then -1.
    pub fn lists(&self, dtype: &str) -> Vec<Vec<Vec<i32>>> {
        let file = SafeTensors::deserialize(&self.bytes).expect("safetensors");
        let lists = file.tensor(&format!("lists.{dtype}")).expect("lists");
        let (tokens, topk) = (lists.shape()[1], lists.shape()[2]);
        let word = |word: &[u8]| i32::from_le_bytes(word.try_into().expect("4 bytes"));
        let words: Vec<i32> = lists.data().chunks_exact(4).map(word).collect();
        let of_layer = |layer: &[i32]| layer.chunks_exact(topk).map(Into::into).collect();
        words.chunks_exact(tokens * topk).map(of_layer).collect()
    }

    /// What a sequence of all the run's tokens had in a cache of a coarse dtype.
    pub fn rows(&self, name: &str, dtype: Dtype, model: &Model) -> StoredRows {
        let file = SafeTensors::deserialize(&self.bytes).expect("safetensors");
        let rows = file.tensor(&format!("rows.{name}")).expect("rows");
        assert!(self.k_scales.iter().all(|scale| *scale == self.k_scales[0]), "one scale for all layers");
        StoredRows::new(rows.data(), dtype, self.k_scales[0], rows.shape()[1], model)
    }
}

fn about(bytes: &[u8]) -> HashMap<String, String> {
    let (_, about) = SafeTensors::read_metadata(bytes).expect("safetensors");
    about.metadata().clone().expect("metadata")
}

impl Run {
    /// The logits along the same tokens: the prompt in one step, then token by token.
    pub fn follow(&self, model: &Model, attention: &mut dyn Attention) -> Vec<f32> {
        let sequence = attention.pages_mut().add();
        let (prompt, rest) = self.tokens.split_at(self.prompt);
        let mut step = |tokens: &[u32]| {
            attention.begin(&[(sequence, tokens.len() as u32)]).expect("pages");
            let wanted: Vec<u32> = (0..tokens.len() as u32).collect();
            model.step(tokens, &wanted, attention).expect("a step")
        };
        let mut logits = step(prompt);
        for token in rest {
            logits.extend(step(&[*token]));
        }
        logits
    }
}

pub fn furthest(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    got.iter()
        .zip(want)
        .map(|(a, b)| if a.is_finite() { (a - b).abs() } else { f32::INFINITY })
        .fold(0.0, f32::max)
}

/// The likeliest token after the prompt, and after each token that follows but the last.
pub fn greedy(logits: &[f32], vocab: usize, prompt: usize) -> Vec<u32> {
    let rows: Vec<&[f32]> = logits.chunks_exact(vocab).collect();
    let best =
        |row: &&[f32]| (0..vocab).reduce(|a, b| if row[b] > row[a] { b } else { a }).expect("a token") as u32;
    rows[prompt - 1..rows.len() - 1].iter().map(best).collect()
}

pub fn held_out(checkpoint: &Checkpoint) -> Vec<u32> {
    let text = std::fs::read_to_string(path("data/held_out.txt")).expect("the text");
    checkpoint.tokenizer().expect("a tokenizer").encode(&text).expect("tokens")
}

/// What transformers had for each window of the held-out text.
pub struct Reference {
    pub window: usize,
    all: serde_json::Value,
}

pub fn reference_scores() -> Reference {
    let text = std::fs::read_to_string(path("tests/goldens/held_out.json")).expect("the scores");
    let all: serde_json::Value = serde_json::from_str(&text).expect("json");
    Reference { window: all["window"].as_u64().expect("a count") as usize, all }
}

impl Reference {
    pub fn first(&self, dtype: &str, windows: usize) -> Score {
        let of = |what: &str| self.all[dtype][what].as_array().expect("a list").iter().take(windows);
        let loss = of("loss").map(|x| x.as_f64().expect("a number")).collect();
        let right = of("right").map(|x| x.as_u64().expect("a count") as usize).collect();
        Score { loss, right, window: self.window }
    }
}
