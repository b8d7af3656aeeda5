//! One device from eight threads: each compiles, prepares, binds, records and submits every op, and gets what one thread gets alone; and
//! some run a step while others prepare theirs. `conformance::*::threads` has threads that share a layer or a step.

use std::collections::BTreeSet;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use mla_support::Outcome;
use mla_support::paint::Rng;
use wgpu_mla::cpu::Cpu;
use wgpu_mla::*;

use crate::every_op::{BYTES, Uses, Visit, names};

const THREADS: usize = 8;

/// Runs each op once, from its compilation to a run.
struct Once<'a, B> {
    backend: &'a B,
    seen: BTreeSet<&'static str>,
}

impl<B: Backend> Visit<B> for Once<'_, B> {
    fn visit<'a, O: Op>(
        &mut self,
        op: O,
        options: &O::Options,
        input: O::Input<'a>,
        args: &O::Args<&B::Buffer>,
    ) where
        B: Kernel<O>,
        O::Input<'a>: Clone,
    {
        self.seen.insert(O::NAME);
        self.backend
            .once_with(op, options, input, args)
            .unwrap_or_else(|error| panic!("{}: {error}", O::NAME));
    }
}

/// What all buffers hold after every op ran on them, one after another.
fn all_ops<B: Backend>(backend: &B) -> Result<Vec<Vec<u8>>> {
    let uses = Uses::new(backend)?;
    let mut rng = Rng(3);
    for buffer in &uses.buffers {
        let values: Vec<f32> = (0..BYTES / 4).map(|_| rng.randn() * 0.1).collect();
        backend.upload(buffer, 0, &Dtype::F32.encode_all(&values))?;
    }
    // Positions of tokens, which are read as integers.
    backend.upload(&uses.buffers[5], 0, &[0; 1024])?;
    let mut once = Once { backend, seen: BTreeSet::new() };
    uses.each(&mut once);
    assert_eq!(once.seen, names());
    uses.buffers.iter().map(|buffer| backend.download(buffer, BYTES)).collect()
}

fn every_op<B: Backend>(backend: &B) {
    let alone = all_ops(backend).expect("one thread");
    let start = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            let (alone, start) = (&alone, &start);
            scope.spawn(move || {
                start.wait();
                assert!(all_ops(backend).expect("one of eight") == *alone, "not what one thread gets alone");
            });
        }
    });
}

const SHAPE: MlaShape = MlaShape { num_heads: 6, kv_lora_rank: 256, qk_rope_head_dim: 32 };
const KV: KvSpec = KvSpec { layout: KvLayout::Plain(Dtype::F16), page_size: 16, num_pages: 8 };
const DECODE: MlaDecode = MlaDecode { shape: SHAPE, kv: KV, query: Dtype::F32, out: Dtype::F32 };
const PAGES: [i32; 8] = [7, 1, 2, 0, 5, 4, 6, 3];

/// Counts a thread as done, also where it fails: the others would wait for it for ever.
struct Ends<'a>(&'a AtomicUsize);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Half of the threads run one step in common, each with a binding and an output of its own; the others prepare steps of batches that
/// grow and shrink, and run some.
fn prepared_beside_runs<B: Backend>(backend: &B, runs: usize) {
    let mla = &backend.compile(DECODE).expect("compiles");
    let prepare = |step: &mut Step<MlaDecode, B>, len: i32, tokens: u32| -> Result<()> {
        let (seq_lens, starts) = ([len], [0, tokens as i32]);
        let batch = Batch::new(&seq_lens, &starts);
        let plan = Plan::new(&DECODE, &mla.tiling(), &batch, SplitPolicy::FixedTokens(16))?;
        mla.prepare(step, (&plan, PageTable::Dense { block_table: &PAGES, max_pages: 8 }))
    };
    let mut rng = Rng(11);
    let mut drawn = |bytes: u64, dtype: Dtype| {
        let values: Vec<f32> = (0..bytes / dtype.bytes() as u64).map(|_| rng.randn() * 0.3).collect();
        let buffer = backend.buffer(bytes)?;
        backend.upload(&buffer, 0, &dtype.encode_all(&values))?;
        Ok::<_, Error>(buffer)
    };
    let (q, cache) = (
        drawn(DECODE.query_bytes(4), DECODE.query).expect("memory"),
        drawn(DECODE.cache_bytes(), Dtype::F16).expect("memory"),
    );
    let bound = || -> Result<_> {
        let (out, lse) = (backend.buffer(DECODE.out_bytes(4))?, backend.buffer(DECODE.lse_bytes(4))?);
        let binding = mla.bind(&MlaDecodeArgs::dense(&DECODE, &q, &cache, &out, &lse, 0.1), 4)?;
        Ok((binding, out))
    };
    let read =
        |step: &Step<MlaDecode, B>, (binding, out): &(Binding<MlaDecode, B>, B::Buffer)| -> Result<Vec<u8>> {
            backend.upload(out, 0, &vec![0xFF; DECODE.out_bytes(2) as usize])?;
            mla.run(step, binding)?;
            backend.download(out, DECODE.out_bytes(2))
        };
    let mut shared = mla.step(Default::default()).expect("a step");
    prepare(&mut shared, 100, 2).expect("prepared");
    let alone = bound().and_then(|bound| read(&shared, &bound)).expect("runs alone");
    let (start, left) = (Barrier::new(THREADS), AtomicUsize::new(THREADS / 2));
    std::thread::scope(|scope| {
        let (shared, alone, start, left, bound, read, prepare) =
            (&shared, &alone, &start, &left, &bound, &read, &prepare);
        for thread in 0..THREADS as i32 {
            scope.spawn(move || {
                let own = bound().expect("binds");
                start.wait();
                if thread % 2 == 0 {
                    let _ends = Ends(left);
                    for _ in 0..runs {
                        assert!(read(shared, &own).expect("runs") == *alone, "not what it gives alone");
                    }
                    return;
                }
                let mut step = mla.step(Default::default()).expect("a step");
                let mut turn = thread;
                while left.load(Ordering::Relaxed) > 0 {
                    turn += 1;
                    prepare(&mut step, 1 + turn * 37 % 128, 1 + turn as u32 % 4 * u32::from(turn % 128 > 3))
                        .ok();
                    prepare(&mut step, 100, 2).expect("prepared");
                    if turn % 4 == 0 {
                        assert!(read(&step, &own).expect("runs") == *alone, "not what the same batch gives");
                    }
                }
            });
        }
    });
}

fn every_op_on_the_cpu() {
    every_op(&AnyBackend::from(Cpu::with_threads(2)));
}

#[cfg(feature = "wgpu")]
fn every_op_on_wgpu() -> Outcome {
    every_op(&AnyBackend::from(mla_support::gpu()?));
    Ok(())
}

#[cfg(feature = "cuda")]
fn every_op_on_cuda() -> Outcome {
    every_op(&AnyBackend::from(mla_support::cuda()?));
    Ok(())
}

fn prepared_beside_runs_on_the_cpu() {
    prepared_beside_runs(&AnyBackend::from(Cpu::with_threads(2)), 60);
}

#[cfg(feature = "wgpu")]
fn prepared_beside_runs_on_wgpu() -> Outcome {
    prepared_beside_runs(&AnyBackend::from(mla_support::gpu()?), 20);
    Ok(())
}

#[cfg(feature = "cuda")]
fn prepared_beside_runs_on_cuda() -> Outcome {
    prepared_beside_runs(&AnyBackend::from(mla_support::cuda()?), 60);
    Ok(())
}

crate::tests![
    every_op_on_the_cpu,
    #[cfg(feature = "wgpu")]
    every_op_on_wgpu,
    #[cfg(feature = "cuda")]
    every_op_on_cuda,
    prepared_beside_runs_on_the_cpu,
    #[cfg(feature = "wgpu")]
    prepared_beside_runs_on_wgpu,
    #[cfg(feature = "cuda")]
    prepared_beside_runs_on_cuda,
];
