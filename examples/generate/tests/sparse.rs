//! Tiny models whose attention is sparse, against what transformers computed with them (`scripts/train.sh sparse`): the tokens that each
//! layer attends, logits and greedy tokens, for every dtype of the index cache. Backends are those of `model.rs`.

mod common;

use common::{DTYPES, Golden, Run, backends, checkpoint, device, furthest, greedy};
use generate::attention::{Attention, Rows};
use generate::{Checkpoint, Options, Paged, Pages, Result, Sampling, Setup, Where};
use wgpu_mla::any::AnyBackend;
use wgpu_mla::cpu::Cpu;
use wgpu_mla::{Device, Dtype, SeqId};

const MODELS: [&str; 2] = ["v32", "glm-dsa"];

/// For logits of up to 6.
const TOLERANCE: f32 = 1e-4;

/// Small pages, so that lists name slots of several.
fn setup(backend: Where, index: Dtype) -> Setup {
    Setup {
        backend,
        kv: Dtype::F32.into(),
        index,
        page_size: 16,
        tokens: 256,
        step_tokens: 64,
        exact: true,
        ..Setup::default()
    }
}

fn paged(device: &AnyBackend, checkpoint: &Checkpoint, setup: &Setup) -> Paged<AnyBackend> {
    Paged::new(device, &checkpoint.model, setup).expect("an attention")
}

/// An attention of one sequence that keeps the lists of layers with an indexer.
struct Watched<'a> {
    checkpoint: &'a Checkpoint,
    device: AnyBackend,
    paged: Paged<AnyBackend>,
    /// For each such layer and token, in order: positions, ascending, then -1. Empty for tokens that attended all.
    lists: Vec<Vec<Vec<i32>>>,
}

impl<'a> Watched<'a> {
    fn new(device: &AnyBackend, checkpoint: &'a Checkpoint, setup: &Setup) -> Self {
        let paged = paged(device, checkpoint, setup);
        let lists = vec![Vec::new(); checkpoint.model.config.num_layers];
        Self { checkpoint, device: device.clone(), paged, lists }
    }

    /// The list that was made last, as positions.
    fn list(&self) -> Result<Vec<Vec<i32>>> {
        let pages = self.paged.pages();
        let (tokens, len) = (pages.positions.len(), pages.positions.last().map_or(0, |last| last + 1));
        let list = self.paged.list().expect("a list");
        let topk = list.token_stride as usize;
        if len as usize <= topk {
            return Ok(vec![Vec::new(); tokens]);
        }
        let bytes = self.device.download(list.buffer, (tokens * topk * 4) as u64)?;
        let slots: Vec<i32> =
            bytes.chunks_exact(4).map(|word| i32::from_le_bytes(word.try_into().expect("4 bytes"))).collect();
        let size = pages.spec().page_size as i32;
        let position = |slot: &i32| {
            let page = pages.of_first().iter().position(|&page| page == slot / size);
            if *slot < 0 { -1 } else { page.expect("a page of the sequence") as i32 * size + slot % size }
        };
        Ok(slots.chunks_exact(topk).map(|slots| slots.iter().map(position).collect()).collect())
    }
}

impl Attention for Watched<'_> {
    fn describe(&self) -> String {
        self.paged.describe()
    }

    fn pages(&self) -> &Pages {
        self.paged.pages()
    }

    fn pages_mut(&mut self) -> &mut Pages {
        self.paged.pages_mut()
    }

    fn cache_bytes(&self) -> u64 {
        self.paged.cache_bytes()
    }

    fn begin(&mut self, batch: &[(SeqId, u32)]) -> Result<()> {
        self.paged.begin(batch)
    }

    fn attend(&mut self, layer: usize, rows: &Rows) -> Result<Vec<f32>> {
        let out = self.paged.attend(layer, rows)?;
        if self.checkpoint.model.config.indexer_of(layer).is_some() {
            let list = self.list()?;
            self.lists[layer].extend(list);
        }
        Ok(out)
    }
}

/// With f32 transformers' classes are as they are, without a Hadamard transform: the same lists, all of them, and the same logits. With
/// fewer bits its indexers were made to round as index caches do.
#[test]
fn lists_logits_and_tokens_equal_those_of_transformers() {
    for backend in backends() {
        let device = device(backend);
        for name in MODELS {
            let dir = format!("tests/tiny/{name}");
            let (checkpoint, golden) = (checkpoint(&dir), Golden::open(&dir));
            // A device compiles kernels for each dtype.
            let few = |dtype| backend == Where::Cpu || matches!(dtype, Dtype::F32 | Dtype::E4m3);
            for (dtype_name, dtype) in DTYPES.into_iter().filter(|it| few(it.1)) {
                let run = golden.run(dtype_name);
                let mut watched = Watched::new(&device, &checkpoint, &setup(backend, dtype));
                let logits = run.follow(&checkpoint.model, &mut watched);
                let apart = furthest(&logits, &run.logits);
                println!("{name}: {}: at most {apart:.1e} apart", watched.describe());
                check_lists(
                    &watched,
                    &golden.lists(dtype_name),
                    &format!("{backend:?}, {name}, {dtype_name}"),
                );
                assert!(apart <= TOLERANCE, "{backend:?}, {name}, {dtype_name}: {apart}");
                let vocab = checkpoint.model.config.vocab_size;
                assert_eq!(
                    greedy(&logits, vocab, run.prompt),
                    run.tokens[run.prompt..],
                    "{name}, {dtype_name}"
                );
            }
        }
    }
}

fn check_lists(watched: &Watched<'_>, want: &[Vec<Vec<i32>>], what: &str) {
    let made = watched.lists.iter().filter(|lists| !lists.is_empty());
    let mut compared = 0;
    for (at, (got, want)) in made.zip(want).enumerate() {
        assert_eq!(got.len(), want.len(), "{what}");
        for (token, (got, want)) in got.iter().zip(want).enumerate().filter(|(_, (got, _))| !got.is_empty()) {
            assert_eq!(got, want, "{what}: list {at} of token {token}");
            compared += 1;
        }
    }
    // All tokens but those of a step whose sequence is short, and there is none.
    assert_eq!(compared, want.iter().map(Vec::len).sum::<usize>(), "{what}");
}

/// Prompts in pieces, several at a time, two of them forks of one prompt: the same tokens as one sequence has alone.
#[test]
fn batches_pieces_and_forks_have_the_tokens_of_transformers() {
    for backend in backends() {
        let device = device(backend);
        for name in MODELS {
            let dir = format!("tests/tiny/{name}");
            let (checkpoint, golden) = (checkpoint(&dir), Golden::open(&dir));
            let Run { tokens, prompt, .. } = golden.run("e4m3");
            let (prompt, want) = tokens.split_at(prompt);
            let prompts = [prompt.to_vec(), prompt[5..].to_vec(), prompt.to_vec(), prompt[..30].to_vec()];
            let setup = Setup { step_tokens: 7, sequences: 4, ..setup(backend, Dtype::E4m3) };
            let options = Options {
                max_tokens: want.len(),
                sampling: Sampling { temperature: 0.0, seed: 1, ..Sampling::default() },
            };
            let generated = |setup: &Setup, prompts: &[Vec<u32>]| {
                let mut attention = paged(&device, &checkpoint, setup);
                generate::generate(&checkpoint.model, &mut attention, prompts, &options, &mut |_, _| Ok(()))
                    .expect("texts")
                    .tokens
            };
            let got = generated(&setup, &prompts);
            assert_eq!((&got[0][..], &got[2][..]), (want, want), "{backend:?}, {name}");
            for other in [1, 3] {
                let alone = Setup { step_tokens: 64, sequences: 1, ..setup.clone() };
                let alone = generated(&alone, &prompts[other..=other]);
                assert_eq!(got[other], alone[0], "{backend:?}, {name}, prompt {other}");
            }
        }
    }
}

/// Where no sequence can be longer than what the model attends, it attends all, and needs no index cache.
#[test]
fn short_sequences_need_no_indexer() {
    let checkpoint = checkpoint("tests/tiny/v32");
    let golden = Golden::open("tests/tiny/v32").run("f32");
    let short = Setup { positions: 12, ..setup(Where::Cpu, Dtype::E4m3) };
    assert!(
        !short.is_sparse(&checkpoint.model) && setup(Where::Cpu, Dtype::F32).is_sparse(&checkpoint.model)
    );
    let mut watched = Watched::new(&Cpu::new().into(), &checkpoint, &short);
    assert!(watched.paged.list().is_none() && !watched.describe().contains("index keys"));
    let sequence = watched.pages_mut().add();
    let prompt = &golden.tokens[..12];
    watched.paged.begin(&[(sequence, 12)]).expect("pages");
    let wanted: Vec<u32> = (0..12).collect();
    let logits = checkpoint.model.step(prompt, &wanted, &mut watched.paged).expect("a step");
    assert!(furthest(&logits, &golden.logits[..logits.len()]) <= TOLERANCE);
}

/// The dtypes that a run has unless it is told others. A value near the middle of two f16 may be stored as either: 2.2e-3 on a CPU.
#[test]
fn the_default_dtypes_have_the_tokens_of_transformers() {
    for backend in backends() {
        let device = device(backend);
        for name in MODELS {
            let dir = format!("tests/tiny/{name}");
            let (checkpoint, golden) = (checkpoint(&dir), Golden::open(&dir));
            let (run, default) = (golden.run("default"), Setup::default());
            let setup = Setup { kv: default.kv, index: default.index, ..setup(backend, Dtype::F32) };
            let mut watched = Watched::new(&device, &checkpoint, &setup);
            let logits = run.follow(&checkpoint.model, &mut watched);
            let apart = furthest(&logits, &run.logits);
            println!("{name}: {}: at most {apart:.1e} apart", watched.describe());
            check_lists(&watched, &golden.lists("default"), &format!("{backend:?}, {name}"));
            assert!(apart <= 1e-2, "{backend:?}, {name}: {apart}");
            let vocab = checkpoint.model.config.vocab_size;
            assert_eq!(greedy(&logits, vocab, run.prompt), run.tokens[run.prompt..], "{name}");
        }
    }
}

/// Coarse rows change which tokens are attended, and so logits by any amount, but not those of the first tokens, which attend all that
/// they see.
#[test]
fn caches_of_every_dtype_run() {
    // Logits are up to 6, and the cache rounds.
    const BOUNDS: [f32; 4] = [TOLERANCE, 5e-2, 0.5, 4.0];
    let cpu = Cpu::new().into();
    for name in MODELS {
        let dir = format!("tests/tiny/{name}");
        let (checkpoint, run) = (checkpoint(&dir), Golden::open(&dir).run("f32"));
        let topk = checkpoint.model.config.indexer.as_ref().expect("an indexer").topk as usize;
        let first = topk * checkpoint.model.config.vocab_size;
        for ((kv_name, kv), bound) in DTYPES.into_iter().zip(BOUNDS) {
            for (index_name, index) in DTYPES {
                let setup = Setup { kv: kv.into(), ..setup(Where::Cpu, index) };
                let mut attention = paged(&cpu, &checkpoint, &setup);
                let logits = run.follow(&checkpoint.model, &mut attention);
                let apart = furthest(&logits[..first], &run.logits[..first]);
                println!("{name}, {kv_name} cache, {index_name} index cache: at most {apart:.1e} apart");
                assert!(apart <= bound, "{name}, {kv_name}, {index_name}: {apart}");
                assert!(logits.iter().all(|logit| logit.is_finite()), "{name}, {kv_name}, {index_name}");
            }
        }
    }
}
