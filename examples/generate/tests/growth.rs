//! A cache that grows slab by slab: what its sequences need is in memory, and their tokens are those of a cache in one buffer.

mod common;

use common::{Golden, backends, checkpoint, device, furthest};
use generate::attention::Attention;
use generate::{Checkpoint, Options, Paged, Sampling, Setup, Where, generate};
use wgpu_mla::any::AnyBackend;
use wgpu_mla::gpu::{Gpu, wanted};
use wgpu_mla::{Backend, Device, Dtype, wgpu};

/// Slabs of an eighth of it: of one page, where there are 7 and one more.
fn in_slabs(tokens: u32) -> Setup {
    Setup {
        kv: Dtype::F32.into(),
        index: Dtype::F32,
        page_size: 16,
        tokens,
        step_tokens: 24,
        slab_bytes: 1,
        workspace_bytes: 1 << 18,
        exact: true,
        ..Setup::default()
    }
}

fn paged<D: Backend>(device: &D, checkpoint: &Checkpoint, setup: &Setup) -> Paged<D> {
    Paged::new(device, &checkpoint.model, setup).expect("an attention")
}

/// A prompt in pieces, then token by token: a page is taken when one is needed, and not before.
#[test]
fn memory_is_what_a_sequence_needs() {
    for backend in backends() {
        let device = device(backend);
        let checkpoint = checkpoint("tests/tiny/v2-lite");
        let mut attention = paged(&device, &checkpoint, &Setup { step_tokens: 200, ..in_slabs(112) });
        let page = attention.cache_bytes();
        assert_eq!(page, 16 * (256 + 32) * 4 * 2, "a page of both layers");
        let sequence = attention.pages_mut().add();
        let mut tokens = 0;
        for piece in [20, 12, 1, 15, 1, 1, 14, 40] {
            attention.begin(&[(sequence, piece)]).expect("pages");
            tokens += piece;
            let pages = u64::from(tokens.div_ceil(16));
            assert_eq!(attention.cache_bytes(), page * pages, "{backend:?}, {tokens} tokens");
            assert_eq!(attention.pages().used(), (pages as u32, pages as u32, pages as u32));
        }
        // What was taken is used again.
        attention.pages_mut().free(sequence).expect("a sequence");
        assert_eq!((attention.pages().used(), attention.cache_bytes()), ((0, 7, 7), page * 7));
        let [a, b] = [(); 2].map(|()| attention.pages_mut().add());
        attention.begin(&[(a, 50), (b, 40)]).expect("pages");
        assert_eq!(attention.cache_bytes(), page * 7);
        // There is one more, and no memory is taken for a batch that would not fit.
        let error = attention.begin(&[(a, 60), (b, 60)]).expect_err("too large").to_string();
        assert!(error.starts_with("out of pages: 7 wanted, 0 free of 8"), "{error}");
        assert_eq!(attention.cache_bytes(), page * 7);
        attention.begin(&[(a, 15), (b, 8)]).expect("the last page");
        assert_eq!(attention.cache_bytes(), page * 8);
    }
}

/// Logits of transformers, with keys in slabs of one page each. A sparse layer's lists name slots of several.
#[test]
fn logits_are_those_of_transformers() {
    for backend in backends() {
        let device = device(backend);
        // A device compiles many kernels for an indexer.
        let models: &[&str] = if backend == Where::Cpu { &["v2-lite", "v32"] } else { &["v2-lite"] };
        for name in models {
            let dir = format!("tests/tiny/{name}");
            let (checkpoint, run) = (checkpoint(&dir), Golden::open(&dir).run("f32"));
            let mut attention = paged(&device, &checkpoint, &Setup { step_tokens: 100, ..in_slabs(112) });
            let first = attention.cache_bytes();
            let apart = furthest(&run.follow(&checkpoint.model, &mut attention), &run.logits);
            assert!(apart < 1e-4, "{backend:?}, {name}: {apart}");
            assert!(attention.cache_bytes() > first, "several slabs");
        }
    }
}

fn tokens(checkpoint: &Checkpoint, attention: &mut dyn Attention, prompts: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let options = Options { max_tokens: 12, sampling };
    generate(&checkpoint.model, attention, prompts, &options, &mut |_, _| Ok(())).expect("tokens").tokens
}

/// Prompts that share pages, and forks, whose pages are copied from slab to slab.
fn batch_is_that_of_one_buffer<D: Backend>(small: &D, large: &AnyBackend, setup: &Setup) {
    let tiny = checkpoint("tests/tiny/v2-lite");
    let prompt = |by: u32, len: u32| (0..len).map(|i| (i * i * by + 5) % 96).collect::<Vec<u32>>();
    let mut prompts: Vec<Vec<u32>> = (3..10).map(|by| prompt(by, 85 + 3 * by)).collect();
    prompts.extend([prompts[0].clone(), [&prompts[1][..50], &[1; 9]].concat(), prompts[0].clone()]);
    let setup = Setup { tokens: 1100, sequences: 10, step_tokens: 60, ..setup.clone() };
    let mut one = paged(large, &tiny, &Setup { slab_bytes: u64::MAX, ..setup.clone() });
    let want = tokens(&tiny, &mut one, &prompts);
    let mut several = paged(small, &tiny, &setup);
    let (all, first) = (one.cache_bytes(), several.cache_bytes());
    assert!(first < all / 2, "{first} of {all}");
    assert_eq!(tokens(&tiny, &mut several, &prompts), want);
    assert!(several.cache_bytes() > 2 * first, "it grew");
    assert_eq!(several.pages().used().0, 0, "all pages are free again");
}

#[test]
fn a_batch_is_that_of_a_cache_in_one_buffer() {
    for backend in backends() {
        let device = device(backend);
        batch_is_that_of_one_buffer(&device, &device, &in_slabs(0));
    }
}

/// No buffer of the device is as large as the cache, whatever may be taken at a time.
#[test]
fn a_device_of_small_buffers_holds_a_large_cache() {
    let gpu = match Gpu::new() {
        Ok(gpu) => gpu,
        Err(error) => {
            assert!(std::env::var("MLA_REQUIRE_GPU").as_deref() != Ok("1"), "{error}");
            eprintln!("NOT TESTED: wgpu: {error}");
            return;
        }
    };
    const MOST: u64 = 1 << 20;
    let adapter = gpu.adapter().expect("of a device that is made here").clone();
    let mut wanted = wanted(&adapter, wgpu::ExperimentalFeatures::disabled());
    wanted.limits.max_buffer_size = MOST;
    wanted.limits.max_storage_buffer_binding_size = MOST;
    let small = pollster::block_on(Gpu::from_adapter(adapter, &wanted)).expect("a device");
    assert_eq!(small.largest_binding(), MOST);
    let setup = Setup { slab_bytes: Setup::default().slab_bytes, ..in_slabs(0) };
    batch_is_that_of_one_buffer(&small, &AnyBackend::from(gpu), &setup);
}
