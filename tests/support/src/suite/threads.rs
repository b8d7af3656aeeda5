//! One compiled op, used by several threads at once: each gets what it gets alone, bit for bit.

use wgpu_mla::{
    Backend, Batch, Binding, Compiled, Dtype, Error, Kernel, KvSpec, MlaDecode, MlaDecodeArgs, MlaLayer,
    MlaShape, Op, PagePool, PageTable, Plan, SplitPolicy, Step,
};

use super::Session;
use super::mixed::{Arrays, Inputs, compiled, out};
use crate::paint::Rng;

const THREADS: usize = 8;
/// Runs of each thread.
const RUNS: usize = 12;

/// What a thread runs: its binding, where its output is, and what that holds after a run with no other thread.
struct One<O: Op, B: Kernel<O>> {
    binding: Binding<O, B>,
    out: B::Buffer,
    alone: Vec<u8>,
}

impl<O: Op, B: Kernel<O>> One<O, B> {
    fn new(
        op: &Compiled<O, B>,
        step: &Step<O, B>,
        binding: Binding<O, B>,
        out: B::Buffer,
    ) -> Result<Self, Error> {
        let mut one = Self { binding, out, alone: Vec::new() };
        one.alone = one.run(op, step)?;
        Ok(one)
    }

    fn run(&self, op: &Compiled<O, B>, step: &Step<O, B>) -> Result<Vec<u8>, Error> {
        let (device, bytes) = (op.device(), B::size(&self.out));
        device.upload(&self.out, 0, &vec![0; bytes as usize])?;
        op.run(step, &self.binding)?;
        device.download(&self.out, bytes)
    }
}

/// What a thread runs, and the step that it runs with.
type Run<'a, O, B> = (&'a Step<O, B>, &'a One<O, B>);

/// A thread each, all at once; says how many runs gave other bits.
fn together<O: Op, B: Kernel<O>>(op: &Compiled<O, B>, each: &[Run<'_, O, B>]) -> Result<(), String> {
    let start = std::sync::Barrier::new(each.len());
    let wrong = std::thread::scope(|scope| {
        let threads: Vec<_> = each
            .iter()
            .map(|&(step, one)| {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    let runs: Result<Vec<_>, Error> = (0..RUNS).map(|_| one.run(op, step)).collect();
                    Ok::<_, Error>(runs?.iter().filter(|&out| *out != one.alone).count())
                })
            })
            .collect();
        let wrong = threads.into_iter().map(|thread| thread.join().expect("no panic"));
        wrong.sum::<Result<usize, Error>>()
    });
    match wrong.map_err(|error| error.to_string())? {
        0 => Ok(()),
        wrong => Err(format!("{wrong} of {} runs differ from a run alone", each.len() * RUNS)),
    }
}

/// A layer has a workspace of its own, for which threads must take turns.
pub fn layers_of_threads<B: Backend>(session: &Session<'_, B>) {
    let result = || -> Result<(), Error> {
        let layer = &compiled(session.backend)?;
        let mut pool = PagePool::new(layer.op().kv)?;
        // Decodes, and a prompt in two chunks of the workspace.
        let arrays = Arrays::new(&mut pool, &[(19, 1), (30, 2), (33, 5)])?;
        let step = || {
            let mut step = layer.step(Default::default())?;
            layer.prepare(&mut step, (&arrays.batch(), SplitPolicy::FixedTokens(8)))?;
            Ok::<_, Error>(step)
        };
        let steps = (0..THREADS).map(|_| step()).collect::<Result<Vec<Step<MlaLayer, B>>, Error>>()?;
        let ones = steps.iter().zip(1..).map(|(step, seed)| {
            let (inputs, out) = (Inputs::new(layer, seed)?, out(layer)?);
            One::new(layer, step, inputs.bind(layer, &out)?, out)
        });
        let ones = ones.collect::<Result<Vec<_>, Error>>()?;
        let own: Vec<_> = steps.iter().zip(&ones).collect();
        session.note("a step each", together(layer, &own));
        let shared: Vec<_> = ones.iter().map(|one| (&steps[0], one)).collect();
        session.note("one step", together(layer, &shared));
        Ok(())
    }();
    session.note("layers", result.map_err(|error| error.to_string()));
    session.finish("layers of threads");
}

/// A decode's step has the partial results that its merge reads.
pub fn steps_of_threads<B: Backend>(session: &Session<'_, B>) {
    let result = || -> Result<(), Error> {
        let backend = session.backend;
        let shape = MlaShape { num_heads: 6, kv_lora_rank: 256, qk_rope_head_dim: 32 };
        let kv = KvSpec { layout: Dtype::F16.into(), page_size: 16, num_pages: 8 };
        let spec = MlaDecode { shape, kv, query: Dtype::F32, out: Dtype::F32 };
        let decode = &backend.compile(spec)?;
        let (seq_lens, starts) = ([100, 17], [0, 1, 2]);
        let plan = Plan::new(
            &spec,
            &decode.tiling(),
            &Batch::new(&seq_lens, &starts),
            SplitPolicy::FixedTokens(16),
        )?;
        let pages = PageTable::Csr { kv_indptr: &[0, 7, 9], kv_indices: &[7, 1, 2, 0, 5, 4, 6, 3, 1] };
        let mut step = decode.step(Default::default())?;
        decode.prepare(&mut step, (&plan, pages))?;
        let ones = (1..=THREADS as u64).map(|seed| {
            let mut rng = Rng(seed);
            let mut drawn = |dtype: Dtype, bytes: u64| {
                let count = bytes as usize / dtype.bytes();
                let values: Vec<f32> = (0..count).map(|_| rng.randn() * 0.3).collect();
                let buffer = backend.buffer(bytes)?;
                backend.upload(&buffer, 0, &dtype.encode_all(&values))?;
                Ok::<_, Error>(buffer)
            };
            let (q, cache) =
                (drawn(spec.query, spec.query_bytes(2))?, drawn(kv.dtype(), spec.cache_bytes())?);
            let (out, lse) = (backend.buffer(spec.out_bytes(2))?, backend.buffer(spec.lse_bytes(2))?);
            let args = MlaDecodeArgs::dense(&spec, &q, &cache, &out, &lse, 0.1);
            One::new(decode, &step, decode.bind(&args, 2)?, out)
        });
        let ones = ones.collect::<Result<Vec<_>, Error>>()?;
        let shared: Vec<_> = ones.iter().map(|one| (&step, one)).collect();
        session.note("one step of a decode", together(decode, &shared));
        Ok(())
    }();
    session.note("decodes", result.map_err(|error| error.to_string()));
    session.finish("steps of threads");
}
