//! A continuous batch for many steps: sequences come, fork, roll back and go. The pool's counters are a plain model's, steps that are
//! prepared again and again give what new ones give, and on a run that was asked for by `MLA_LONG_STEPS` memory and time are flat.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use mla_support::Outcome;
use mla_support::paint::Rng;
use mla_support::suite::layer_rig::spec;
use wgpu_mla::cpu::Cpu;
use wgpu_mla::*;

use crate::every_op::layer_args;

const MAX_TOKENS: u32 = 32;
const MAX_SEQUENCES: usize = 6;
/// A sequence ends well before the 128 positions of the RoPE table of [`layer_args`].
const MAX_LEN: u32 = 100;

/// A page of the model, which counts itself.
struct Page(Rc<Cell<u32>>);

impl Page {
    fn new(used: &Rc<Cell<u32>>) -> Rc<Self> {
        used.set(used.get() + 1);
        Rc::new(Self(used.clone()))
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// A sequence of the pool, and the same in the model.
struct Sequence {
    id: SeqId,
    len: u32,
    pages: Vec<Rc<Page>>,
}

impl Sequence {
    /// Pages that an append takes, copies included.
    fn wanted(&self, tokens: u32, page_size: u32) -> u32 {
        let copies = tokens > 0 && !self.len.is_multiple_of(page_size) && self.last_is_shared();
        (self.len + tokens).div_ceil(page_size) - self.pages.len() as u32 + u32::from(copies)
    }

    fn last_is_shared(&self) -> bool {
        self.pages.last().is_some_and(|page| Rc::strong_count(page) > 1)
    }

    /// Says whether a page was copied.
    fn append(&mut self, tokens: u32, page_size: u32, used: &Rc<Cell<u32>>) -> bool {
        let copies = tokens > 0 && !self.len.is_multiple_of(page_size) && self.last_is_shared();
        if copies {
            self.pages.pop();
            self.pages.push(Page::new(used));
        }
        self.len += tokens;
        while (self.pages.len() as u32) < self.len.div_ceil(page_size) {
            self.pages.push(Page::new(used));
        }
        copies
    }
}

/// What a server has: a pool and sequences, and what runs a step.
struct Server<'a, B: Backend> {
    backend: &'a B,
    layer: Compiled<MlaLayer, B>,
    step: Step<MlaLayer, B>,
    binding: Binding<MlaLayer, B>,
    copy: Compiled<KvCopyPages, B>,
    copy_step: Step<KvCopyPages, B>,
    copy_binding: Binding<KvCopyPages, B>,
    out: B::Buffer,
    pool: PagePool,
    arrays: LayerArrays,
    sequences: Vec<Sequence>,
    used: Rc<Cell<u32>>,
    rng: Rng,
    copies: usize,
    refused: usize,
}

impl<'a, B: Backend> Server<'a, B> {
    fn new(backend: &'a B) -> Result<Self> {
        let spec = spec(Dtype::F32, Dtype::F16, RopeLayout::Interleaved, 24);
        let room = LayerCapacity { tokens: MAX_TOKENS, decode_tokens: MAX_TOKENS, ..Default::default() };
        let layer = backend.compile_with(spec, &LayerOptions { capacity: room, ..Default::default() })?;
        let mut rng = Rng(7);
        let mut buffers = Vec::new();
        for i in 0..10 {
            let buffer = backend.buffer(1 << 18)?;
            // All but the cache, which is the fourth, and the output.
            if i != 3 && i != 6 {
                let values: Vec<f32> = (0..1 << 16).map(|_| rng.randn() * 0.1).collect();
                backend.upload(&buffer, 0, &Dtype::F32.encode_all(&values))?;
            }
            buffers.push(buffer);
        }
        let buffers: [B::Buffer; 10] = buffers.try_into().unwrap_or_else(|_| unreachable!("there are ten"));
        let args = MlaLayerArgs { expanded: None, ..layer_args(&spec, &buffers) };
        let copy = backend.compile(KvCopyPages { shape: spec.shape, kv: spec.kv })?;
        Ok(Self {
            backend,
            step: layer.step(Default::default())?,
            binding: layer.bind(&args, room)?,
            layer,
            copy_step: copy.step(0)?,
            copy_binding: copy.bind(&args.kv, ())?,
            copy,
            out: buffers[6].clone(),
            pool: PagePool::in_slabs(spec.kv, spec.kv.num_pages)?,
            arrays: LayerArrays::default(),
            sequences: Vec::new(),
            used: Rc::default(),
            rng,
            copies: 0,
            refused: 0,
        })
    }

    /// Sequences come, fork, roll back and go.
    fn change(&mut self) -> Result<()> {
        while self.sequences.len() < MAX_SEQUENCES && self.rng.below(3) > 0 {
            let (len, pages, id);
            if self.sequences.is_empty() || self.rng.below(2) == 0 {
                (len, pages, id) = (0, Vec::new(), self.pool.add());
            } else {
                let parent = &self.sequences[self.rng.below(self.sequences.len())];
                len = if self.rng.below(2) == 0 {
                    parent.len
                } else {
                    self.rng.below(parent.len as usize + 1) as u32
                };
                id = self.pool.fork_prefix(parent.id, len)?;
                pages = parent.pages[..len.div_ceil(self.pool.spec().page_size) as usize].to_vec();
            }
            self.sequences.push(Sequence { id, len, pages });
        }
        if self.rng.below(8) == 0 {
            let at = self.rng.below(self.sequences.len().max(1));
            if let Some(sequence) = self.sequences.get_mut(at) {
                sequence.len = self.rng.below(sequence.len as usize + 1) as u32;
                self.pool.truncate(sequence.id, sequence.len)?;
                sequence.pages.truncate(sequence.len.div_ceil(self.pool.spec().page_size) as usize);
            }
        }
        let ends = self.rng.below(60);
        while let Some(at) = self.sequences.iter().position(|sequence| sequence.len >= MAX_LEN) {
            self.free(at)?;
        }
        if ends < self.sequences.len() { self.free(ends) } else { Ok(()) }
    }

    fn free(&mut self, at: usize) -> Result<()> {
        self.pool.free(self.sequences.swap_remove(at).id)
    }

    /// A step: prompts in chunks, one or two tokens of the others. Nothing where there are no sequences.
    fn step(&mut self, check: bool) -> Result<()> {
        self.change()?;
        let page_size = self.pool.spec().page_size;
        let copies = loop {
            let mut requests: Vec<(usize, u32)> = (0..self.sequences.len()).map(|at| (at, 1)).collect();
            for (at, tokens) in &mut requests {
                let prompts = self.sequences[*at].len == 0 && *at < 2;
                *tokens = if prompts { 3 + self.rng.below(9) } else { 1 + self.rng.below(2) } as u32;
            }
            // Decodes come first.
            requests.sort_by_key(|&(_, tokens)| tokens > 2);
            if requests.is_empty() {
                return Ok(());
            }
            let named: Vec<_> =
                requests.iter().map(|&(at, tokens)| (self.sequences[at].id, tokens)).collect();
            match self.pool.layer_step_into(&named, &mut self.arrays) {
                Ok(copies) => {
                    let mut copied = 0;
                    for &(at, tokens) in &requests {
                        copied += usize::from(self.sequences[at].append(tokens, page_size, &self.used));
                    }
                    assert_eq!(copies.len(), copied);
                    break copies;
                }
                Err(Error::OutOfPages { wanted, free, .. }) => {
                    let most: u32 = requests
                        .iter()
                        .map(|&(at, tokens)| self.sequences[at].wanted(tokens, page_size))
                        .sum();
                    assert!(
                        u64::from(free) < wanted && wanted <= u64::from(most),
                        "{wanted} of {free}, at most {most}"
                    );
                    self.refused += 1;
                    let longest = (0..self.sequences.len()).max_by_key(|&at| self.sequences[at].len);
                    self.free(longest.expect("there are some"))?;
                }
                Err(error) => return Err(error),
            }
        };
        self.copies += copies.len();
        self.counters();
        if !copies.is_empty() {
            self.copy.prepare(&mut self.copy_step, &copies)?;
            self.copy.run(&self.copy_step, &self.copy_binding)?;
        }
        self.layer.prepare(&mut self.step, (&self.arrays.batch(), SplitPolicy::FixedTokens(16)))?;
        self.layer.run(&self.step, &self.binding)?;
        let bytes = self.arrays.num_tokens() as u64 * 3 * 24 * 4;
        let out = self.backend.download(&self.out, bytes)?;
        if check {
            assert!(Dtype::F32.decode_all(&out).iter().all(|x| x.is_finite() && x.abs() < 100.0));
            let mut new = self.layer.step(Default::default())?;
            self.layer.prepare(&mut new, (&self.arrays.batch(), SplitPolicy::FixedTokens(16)))?;
            self.backend.upload(&self.out, 0, &vec![0xFF; bytes as usize])?;
            self.layer.run(&new, &self.binding)?;
            assert!(self.backend.download(&self.out, bytes)? == out, "a new step gives other bits");
        }
        Ok(())
    }

    fn counters(&self) {
        let (pool, used) = (&self.pool, self.used.get());
        assert_eq!((pool.num_used_pages(), pool.num_free_pages()), (used, pool.spec().num_pages - used));
        assert_eq!(pool.num_sequences(), self.sequences.len());
        for sequence in &self.sequences {
            assert_eq!(pool.len(sequence.id), Ok(sequence.len));
            let pages = pool.pages(sequence.id).expect("it is there");
            assert_eq!(pages.len(), sequence.pages.len());
            for (&page, own) in pages.iter().zip(&sequence.pages) {
                assert_eq!(pool.owners(page), Rc::strong_count(own));
            }
        }
    }
}

/// Bytes of this process that are in memory, where the system tells: also what was freed and kept, which grows in lumps of a megabyte at
/// any time.
fn resident() -> Option<u64> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(pages.split(' ').nth(1)?.parse::<u64>().ok()? * 4096)
}

/// Bytes that are allocated, by drivers too, where glibc tells.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn allocated() -> Option<u64> {
    /// `struct mallinfo2` of malloc.h.
    #[repr(C)]
    struct Mallinfo2 {
        arena: usize,
        ordblks: usize,
        smblks: usize,
        hblks: usize,
        hblkhd: usize,
        usmblks: usize,
        fsmblks: usize,
        uordblks: usize,
        fordblks: usize,
        keepcost: usize,
    }
    unsafe extern "C" {
        fn mallinfo2() -> Mallinfo2;
    }
    // SAFETY: it takes nothing, and reads malloc's counters under their locks.
    let info = unsafe { mallinfo2() };
    // In heaps, and in maps of their own.
    Some((info.uordblks + info.hblkhd) as u64)
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn allocated() -> Option<u64> {
    None
}

/// KiB that memory grew by; 0 where the system does not tell.
fn grown(begin: Option<u64>, end: Option<u64>) -> u64 {
    end.zip(begin).map_or(0, |(end, begin)| end.saturating_sub(begin) >> 10)
}

fn median(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted[sorted.len() / 2]
}

/// `usual` steps, or as many as were asked for: that run is measured, so nothing else may run beside it.
fn run<B: Backend>(name: &str, backend: &B, usual: usize) {
    let asked = std::env::var("MLA_LONG_STEPS").ok().map(|steps| steps.parse().expect("a number of steps"));
    let steps = asked.unwrap_or(usual).max(20);
    let mut server = Server::new(backend).expect("a server");
    let (warm, mut times, mut begin) = (steps / 10, Vec::new(), [None; 2]);
    for number in 0..steps {
        if number == warm {
            begin = [allocated(), resident()];
        }
        let check = number % 50 == 7;
        let now = Instant::now();
        server.step(check).unwrap_or_else(|error| panic!("step {number}: {error}"));
        if !check {
            times.push(now.elapsed());
        }
    }
    assert!(
        server.copies > 0 && (steps < 1000 || server.refused > 0),
        "{} copies, {} refused",
        server.copies,
        server.refused
    );
    let tenth = times.len() / 10;
    let (first, last) = (median(&times[tenth..2 * tenth]), median(&times[times.len() - tenth..]));
    let [allocated, resident] = [grown(begin[0], allocated()), grown(begin[1], resident())];
    if asked.is_some() {
        println!(
            "{name}: {steps} steps, {} copies of pages, {} batches that found no pages; after step {warm} allocated memory grew by \
             {allocated} KiB, resident memory by {resident} KiB; a step took {first:?} at first, {last:?} at last",
            server.copies, server.refused
        );
        assert!(allocated < 4096, "allocated memory grew by {allocated} KiB");
        assert!(resident < 32 << 10, "resident memory grew by {resident} KiB");
        assert!(last < first * 3 / 2, "a step took {first:?} at first, {last:?} at last");
    }
    while !server.sequences.is_empty() {
        server.free(0).expect("it is there");
    }
    server.counters();
    assert_eq!(server.pool.num_used_pages(), 0);
    crate::harness::count(&format!("long {name}"), steps, 0);
}

fn cpu() {
    run("cpu", &AnyBackend::from(Cpu::new()), 400);
}

#[cfg(feature = "wgpu")]
fn wgpu() -> Outcome {
    run("wgpu", &AnyBackend::from(mla_support::gpu()?), 100);
    Ok(())
}

#[cfg(feature = "cuda")]
fn cuda() -> Outcome {
    run("cuda", &AnyBackend::from(mla_support::cuda()?), 400);
    Ok(())
}

/// A call whose data are many, all of the same kind.
fn quickly<T>(what: &str, call: impl FnOnce() -> Result<T>) -> T {
    let begin = Instant::now();
    let result = call();
    assert!(begin.elapsed() < Duration::from_secs(5), "{what} took {:?}", begin.elapsed());
    result.unwrap_or_else(|error| panic!("{what}: {error}"))
}

/// What a loop over all pairs would take hours for. `limits` has what is refused.
fn no_call_takes_long_for_many_entries() {
    const MANY: u32 = 1 << 17;
    let shape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };
    let kv = KvSpec { layout: Dtype::F16.into(), page_size: 16, num_pages: 1 << 22 };
    let decode = MlaDecode { shape, kv, query: Dtype::F32, out: Dtype::F32 };
    let cpu = Cpu::with_threads(1);
    let mut pool = PagePool::new(kv).expect("a pool");
    let first = pool.add();
    pool.append(first, 40).expect("pages");
    // Forks of one another, of a few lengths, that share pages.
    let mut seqs = vec![first];
    quickly("forks", || {
        for i in 1..MANY {
            let parent = seqs[i as usize / 2];
            seqs.push(pool.fork_prefix(parent, (i % 5 * 8).min(pool.len(parent)?))?);
        }
        Ok(())
    });
    let requests: Vec<_> = seqs.iter().map(|&seq| (seq, 1)).collect();
    let (arrays, copies) = quickly("a step of a pool", || pool.layer_step(&requests));
    quickly("prefixes", || pool.shared_prefixes(&seqs));
    quickly("rows of pages", || pool.csr(&seqs));
    let batch = arrays.batch();
    let cut =
        Batch { shared_prefixes: batch.shared_prefixes, ..Batch::new(batch.seq_lens, batch.query_start_loc) };
    let mla = cpu.compile(decode).expect("compiles");
    let plan = quickly("a plan", || Plan::new(&decode, &mla.tiling(), &cut, SplitPolicy::Auto));
    let mut step = mla.step(Default::default()).expect("a step");
    quickly("a step of a decode", || mla.prepare(&mut step, (&plan, batch.pages)));
    let layer = MlaLayer { shape, kv, ..spec(Dtype::F32, Dtype::F16, RopeLayout::Interleaved, 1 << 20) };
    let sequences: Vec<u32> = (0..MANY).collect();
    let pairs: Vec<_> =
        sequences.chunks(2).map(|pair| SharedPrefix { sequences: pair.to_vec(), tokens: 8 }).collect();
    let in_slabs = Batch {
        shared_prefixes: &pairs,
        slabs: Some(SlabTable { pages: batch.pages, slab_pages: 1 << 20 }),
        ..cut
    };
    quickly("a plan over slabs", || Plan::new(&decode, &mla.tiling(), &in_slabs, SplitPolicy::Auto));
    quickly("a layer's plan", || LayerPlan::new(&layer, &mla.tiling(), &batch, SplitPolicy::Auto));

    let copy = cpu.compile(KvCopyPages { shape, kv }).expect("compiles");
    let mut step = copy.step(0).expect("a step");
    let pairs: Vec<_> = (0..1 << 20).map(|i| (i, i + (1 << 20))).collect();
    quickly("copies of a step", || copy.prepare(&mut step, &copies));
    quickly("copies of a million pages", || copy.prepare(&mut step, &pairs));
    let append = cpu.compile(KvAppend { shape, kv, input: Dtype::F32, guard: false }).expect("compiles");
    let mut step = append.step(0).expect("a step");
    let slots: Vec<i64> = (0..1 << 20).rev().collect();
    quickly("an append of a million tokens", || append.prepare(&mut step, &slots));
    let gather = cpu.compile(KvGather { shape, kv, output: Dtype::F32 }).expect("compiles");
    let mut step = gather.step(0).expect("a step");
    let ranges: Vec<_> = (0..MANY)
        .map(|sequence| GatherRange { sequence, begin: 0, tokens: 1, out_row: MANY - 1 - sequence })
        .collect();
    let rows = GatherBatch { pages: batch.pages, seq_lens: batch.seq_lens, ranges: &ranges };
    quickly("a gather of many ranges", || gather.prepare(&mut step, rows));
    let weights: Vec<u32> = (1..=64).map(|i| i * 1000 + 1).collect();
    let shares = Shares::weighted(&weights, 1);
    assert!(matches!(shares, Ok(_) | Err(Error::Limit { .. } | Error::Shape { .. })), "{:?}", shares.err());
    quickly("all sequences go", || seqs.iter().try_for_each(|&seq| pool.free(seq)));
    assert_eq!((pool.num_used_pages(), pool.num_sequences()), (0, 0));
}

crate::tests![
    cpu,
    #[cfg(feature = "wgpu")]
    wgpu,
    #[cfg(feature = "cuda")]
    cuda,
    no_call_takes_long_for_many_entries,
];
