//! The n-th large allocation is refused, for each n until none is left to refuse: [`Error::OutOfMemory`], and the same call works
//! afterwards. An array is large where its length is a batch's or a pool's; what has the size of an op's description is not refused, and
//! code that took a refusal of a large one for impossible would abort this program.

use std::collections::BTreeSet;
use std::fmt::Debug;

use wgpu_mla::cpu::{Buffer, Cpu};
use wgpu_mla::*;

use crate::allocator::refusing;
use crate::every_op::{self, Uses, Visit};

/// Bytes from which an allocation of a small use of an op is refused.
const SOME: usize = 4096;
/// The same for batches of [`MANY`] entries.
const LARGE: usize = 16 << 10;
const MANY: usize = 1 << 15;

/// Refuses each large allocation of a call in turn; says how many there were.
fn each_refused<T: Debug>(what: &str, bytes: usize, mut call: impl FnMut() -> Result<T>) -> usize {
    for n in 0..200 {
        match refusing(bytes, n, &mut call) {
            (result, false) => {
                assert!(result.is_ok(), "{what}, after {n} refusals: {:?}", result.err());
                return n;
            }
            (Err(Error::OutOfMemory { .. } | Error::TableMemory { .. }), true) => {}
            (result, true) => panic!("{what}, allocation {n} refused: {:?}", result.map(drop)),
        }
    }
    panic!("{what}: no end of allocations")
}

/// Uses each op with a new step each time, then with one that is kept, which is whole after each refusal.
struct Refused(BTreeSet<(&'static str, bool)>);

impl Visit<Cpu> for Refused {
    fn visit<'a, O: Op>(
        &mut self,
        spec: O,
        options: &O::Options,
        input: O::Input<'a>,
        args: &O::Args<&Buffer>,
    ) where
        Cpu: Kernel<O>,
        O::Input<'a>: Clone,
    {
        // One thread, so that the refusal is of an allocation of this use.
        let cpu = Cpu::with_threads(1);
        let once = each_refused(O::NAME, SOME, || cpu.once_with(spec, options, input.clone(), args));
        let op = cpu.compile_with(spec, options).expect("compiles");
        let mut step = op.step(O::Capacity::default()).expect("a step");
        let kept = each_refused(O::NAME, SOME, || op.prepare(&mut step, input.clone()));
        let room = step.used();
        let bound = each_refused(O::NAME, SOME, || op.bind(args, room).map(drop));
        let binding = op.bind(args, room).expect("binds");
        let run = each_refused(O::NAME, SOME, || op.run(&step, &binding));
        self.0.insert((O::NAME, once + kept + bound + run > 0));
    }
}

fn every_op_of_the_cpu() {
    let cpu = Cpu::with_threads(1);
    let made = each_refused("what is made first", SOME, || Uses::new(&cpu).map(drop));
    assert!(made >= 10, "{made} refusals");
    let mut refused = Refused(BTreeSet::new());
    Uses::new(&cpu).expect("memory").each(&mut refused);
    let names: BTreeSet<_> = refused.0.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, every_op::names());
    // These two keep partial results or a workspace.
    for op in ["mla_decode", "mla_layer"] {
        assert!(refused.0.contains(&(op, true)), "nothing was refused of {op}: {:?}", refused.0);
    }
}

fn downloads_and_buffers() {
    let cpu = Cpu::with_threads(1);
    assert_eq!(each_refused("a buffer", LARGE, || cpu.buffer(1 << 20)), 1);
    let buffer = cpu.buffer(1 << 20).expect("memory");
    assert_eq!(each_refused("a download", LARGE, || cpu.download(&buffer, 1 << 20)), 1);
}

const SHAPE: MlaShape = MlaShape { num_heads: 2, kv_lora_rank: 256, qk_rope_head_dim: 32 };
const KV: KvSpec = KvSpec { layout: KvLayout::Plain(Dtype::F16), page_size: 16, num_pages: 1 << 17 };
const DECODE: MlaDecode = MlaDecode { shape: SHAPE, kv: KV, query: Dtype::F32, out: Dtype::F32 };

fn long_step<'a, O: Op>(op: O, input: O::Input<'a>)
where
    Cpu: Kernel<O>,
    O::Input<'a>: Clone,
{
    let op = Cpu::with_threads(1).compile(op).expect("compiles");
    let refused = each_refused(O::NAME, LARGE, || {
        let mut step = op.step(O::Capacity::default())?;
        op.prepare(&mut step, input.clone())
    });
    assert!(refused > 0, "nothing of {} was refused", O::NAME);
    let mut step = op.step(O::Capacity::default()).expect("a step");
    each_refused(O::NAME, LARGE, || op.prepare(&mut step, input.clone()));
}

fn a_long_append() {
    let slots: Vec<i64> = (0..MANY as i64).collect();
    long_step(KvAppend { shape: SHAPE, kv: KV, input: Dtype::F32, guard: false }, &slots);
}

fn a_long_rope_append() {
    let slots: Vec<i64> = (0..MANY as i64).collect();
    let append = KvAppend { shape: SHAPE, kv: KV, input: Dtype::F32, guard: false };
    let op = RopeAppend {
        append,
        query: Dtype::F32,
        query_out: Dtype::F32,
        num_heads: 2,
        layout: RopeLayout::HalfSplit,
    };
    long_step(op, RopeAppendBatch::slots(&slots));
}

fn many_page_copies() {
    let copies: Vec<(u32, u32)> = (0..MANY as u32).map(|i| (i, i + MANY as u32)).collect();
    long_step(KvCopyPages { shape: SHAPE, kv: KV }, &copies);
}

fn a_gather_of_many_ranges() {
    let (entries, lens) = (vec![0; MANY], vec![16; MANY]);
    let pages = PageTable::Dense { block_table: &entries, max_pages: 1 };
    let ranges: Vec<_> = (0..MANY as u32)
        .map(|sequence| GatherRange { sequence, begin: 0, tokens: 16, out_row: sequence * 16 })
        .collect();
    let batch = GatherBatch { pages, seq_lens: &lens, ranges: &ranges };
    long_step(KvGather { shape: SHAPE, kv: KV, output: Dtype::F32 }, batch);
}

fn a_reorg_of_many_chunks() {
    let shares = Shares::even(2, 1).expect("shares");
    let chunks: Vec<_> =
        (0..MANY as u32).map(|i| ReorgChunk { begin: 0, tokens: 2, local_row: i, out_row: i * 2 }).collect();
    long_step(
        ReorgKvCache { dtype: Dtype::F32, row_elems: 4 },
        ReorgBatch { shares: &shares, chunks: &chunks },
    );
}

fn a_prefill_of_many_sequences() {
    let sequences: Vec<_> = (0..MANY as u32).map(|i| PrefillSequence::causal(i * 2, 2, i * 2, 2)).collect();
    let op = MlaPrefill {
        num_heads: 2,
        qk_nope_head_dim: 16,
        qk_rope_head_dim: 32,
        v_head_dim: 24,
        dtype: Dtype::F32,
        out: Dtype::F32,
    };
    long_step(op, &sequences);
}

fn a_decode_of_many_sequences() {
    let lens = vec![32; MANY];
    let starts: Vec<i32> = (0..=MANY as i32).collect();
    let entries: Vec<i32> = (0..2 * MANY as i32).collect();
    let mla = Cpu::with_threads(1).compile(DECODE).expect("compiles");
    for policy in [SplitPolicy::Auto, SplitPolicy::FixedTokens(16)] {
        let batch = Batch::new(&lens, &starts);
        let plan = || Plan::new(&DECODE, &mla.tiling(), &batch, policy);
        assert!(each_refused("a plan", LARGE, plan) > 4);
        let made = plan().expect("a plan");
        let mut kept = Plan::default();
        each_refused("a plan's update", LARGE, || kept.update(&DECODE, &mla.tiling(), &batch, policy));
        assert_eq!(kept, made);
        let pages = PageTable::Dense { block_table: &entries, max_pages: 2 };
        let mut step = mla.step(Default::default()).expect("a step");
        assert!(each_refused("a step", LARGE, || mla.prepare(&mut step, (&made, pages))) > 0);
    }
}

fn a_plan_over_slabs() {
    let lens = vec![32; MANY];
    let starts: Vec<i32> = (0..=MANY as i32).collect();
    let entries: Vec<i32> = (0..MANY as i32).flat_map(|sequence| [0, 1 + sequence]).collect();
    let pages = PageTable::Dense { block_table: &entries, max_pages: 2 };
    let slabs = Some(SlabTable { pages, slab_pages: KV.num_pages / 4 });
    let shared = [SharedPrefix { sequences: (0..MANY as u32).collect(), tokens: 16 }];
    let batch = Batch { slabs, shared_prefixes: &shared, ..Batch::new(&lens, &starts) };
    let mla = Cpu::with_threads(1).compile(DECODE).expect("compiles");
    let plan = || Plan::new(&DECODE, &mla.tiling(), &batch, SplitPolicy::OneSplit);
    assert!(each_refused("a plan over slabs", LARGE, plan) > 4);
    let (made, mut kept) = (plan().expect("a plan"), Plan::default());
    each_refused("its update", LARGE, || kept.update(&DECODE, &mla.tiling(), &batch, SplitPolicy::OneSplit));
    assert_eq!(kept, made);
    let mut step = mla.step(Default::default()).expect("a step");
    assert!(each_refused("a step over slabs", LARGE, || mla.prepare(&mut step, (&made, pages))) > 0);
}

fn arrays_of_a_caller() {
    let q_lens = vec![1; MANY];
    assert_eq!(each_refused("query_start_loc", LARGE, || query_start_loc(&q_lens)), 1);
    let ends: Vec<i32> = (0..=MANY as i32).collect();
    let last = vec![16; MANY];
    assert_eq!(each_refused("seq_lens", LARGE, || csr_seq_lens(&ends, &last, 16)), 1);
}

const LAYER: MlaLayer = MlaLayer {
    shape: SHAPE,
    qk_nope_head_dim: 16,
    v_head_dim: 16,
    kv: KV,
    dtype: Dtype::F32,
    query: Dtype::F32,
    weight: Dtype::F32,
    out: Dtype::F32,
    rope: RopeLayout::HalfSplit,
    decode_threshold: 1,
    workspace_bytes: 100 << 20,
};

/// Every eighth sequence is a prompt, in two chunks; the others are decoded.
fn plans_of_a_layer() {
    let lens: Vec<i32> = vec![32; MANY];
    let starts: Vec<i32> = (0..=MANY as i32).map(|sequence| sequence + sequence / 8).collect();
    let slots = vec![-1i64; starts[MANY] as usize];
    let entries: Vec<i32> = (0..MANY as i32).flat_map(|sequence| [0, 1 + sequence]).collect();
    let prefix = |range: std::ops::Range<u32>| (range.collect::<Vec<_>>(), 16);
    let shared = |(sequences, tokens)| SharedPrefix { sequences, tokens };
    let expanded = |(sequences, tokens)| ExpandedPrefix { sequences, tokens, first_row: 0 };
    let batch = |shared_prefixes, expanded, count: usize| LayerBatch {
        seq_lens: &lens[..count],
        query_start_loc: &starts[..=count],
        slot_mapping: &slots[..starts[count] as usize],
        pages: PageTable::Dense { block_table: &entries[..2 * count], max_pages: 2 },
        shared_prefixes,
        expanded,
    };
    let tiling = Cpu::with_threads(1).compile(DECODE).expect("compiles").tiling();
    let planned = |what, batch: &LayerBatch<'_>, slab_pages, least| {
        let plan =
            || LayerPlan::in_slabs(&LAYER, &tiling, batch, SplitPolicy::OneSplit, slab_pages).map(drop);
        let refused = each_refused(what, LARGE, plan);
        assert!(refused > least, "{what}: {refused} refusals");
    };
    let (groups, prefixes) = ([shared(prefix(0..4))], [expanded(prefix(0..MANY as u32))]);
    planned("a layer's plan", &batch(&groups, &[], MANY), 0, 20);
    planned("a layer's plan over slabs", &batch(&[], &[], MANY), KV.num_pages / 4, 20);
    planned("a layer's plan over a prefix", &batch(&[], &prefixes, MANY), 0, 20);
}

fn tables_of_a_pool() {
    let mut pool = PagePool::new(KV).expect("a pool");
    let seqs: Vec<_> = (0..MANY).map(|_| pool.add()).collect();
    let requests: Vec<_> = seqs.iter().map(|&seq| (seq, 17)).collect();
    let before = pool.clone();
    let mut batch = AppendBatch::default();
    let refused = each_refused("a batch", LARGE, || {
        let appended = pool.append_batch_into(&requests, &mut batch);
        if appended.is_err() {
            assert!(pool == before, "a batch is all or nothing");
            assert!(batch.tokens.is_empty() && batch.copies.is_empty());
        }
        appended
    });
    assert!(refused > 0);
    assert!(each_refused("a block table", LARGE, || pool.block_table(&seqs, -1)) > 0);
    assert!(each_refused("rows of pages", LARGE, || pool.csr(&seqs)) > 0);
    assert!(each_refused("lengths", LARGE, || pool.seq_lens(&seqs)) > 0);
    assert!(each_refused("slots", LARGE, || pool.slot_mapping(&batch.tokens)) > 0);
    assert!(each_refused("shared prefixes", LARGE, || pool.shared_prefixes(&seqs)) > 2);
    let long = pool.add();
    pool.append(long, 40).expect("pages");
    let forks: Vec<_> = (0..MANY).map(|_| pool.fork(long).expect("a sequence")).collect();
    assert!(each_refused("a shared prefix", LARGE, || pool.shared_prefixes(&forks)) > 3);
    assert_eq!(pool.shared_prefixes(&forks).expect("memory").len(), 1);
}

/// A step that cannot have its arrays changes no sequence: pages that it took, and copies that nobody runs, would be lost.
fn a_step_of_a_pool_is_all_or_nothing() {
    let mut pool = PagePool::new(KV).expect("a pool");
    let long = pool.add();
    pool.append(long, 1 << 16 | 3).expect("pages");
    let requests = [(long, 1 << 16), (pool.fork(long).expect("it is there"), 5)];
    let before = pool.clone();
    let mut arrays = LayerArrays::default();
    let refused = each_refused("a step", LARGE, || {
        let step = pool.layer_step_into(&requests, &mut arrays);
        assert!(step.is_ok() || (pool == before && arrays.num_tokens() == 0));
        step
    });
    assert!(refused > 1);

    let mut pool = PagePool::new(KvSpec { page_size: 256, num_pages: 1 << 20, ..KV }).expect("a pool");
    let long = pool.add();
    let step = pool.layer_step(&[(long, (1 << 26) + 1)]).map(drop);
    assert!(matches!(step, Err(Error::Limit { need, .. }) if need == (1 << 26) + 1), "{step:?}");
    assert_eq!((pool.len(long), pool.num_used_pages()), (Ok(0), 0));
}

fn a_long_sequence_of_a_pool() {
    let mut pool = PagePool::new(KV).expect("a pool");
    let long = pool.add();
    let before = pool.clone();
    let refused = each_refused("an append", LARGE, || {
        let appended = pool.append(long, 1 << 20);
        assert!(appended.is_ok() || pool == before, "an append is all or nothing");
        appended
    });
    assert!(refused > 0);
    let before = pool.clone();
    let refused = each_refused("a fork", LARGE, || {
        let forked = pool.fork(long);
        assert!(forked.is_ok() || pool == before);
        forked
    });
    assert!(refused > 0);
    // Nothing that gives memory back may need some.
    let (freed, refused) = refusing(LARGE, 0, || pool.free(long));
    assert!(freed.is_ok() && !refused);
}

fn shares_of_a_batch() {
    let shares = Shares::even(2, 1).expect("shares");
    let (lens, starts) = ([MANY as i32], [0, MANY as i32]);
    let slots = vec![3; MANY / 2];
    let many = (vec![1; MANY], Vec::from_iter(0..=MANY as i32));
    assert!(each_refused("lengths", LARGE, || shares.local_seq_lens(0, &many.0)) > 0);
    assert!(each_refused("appends", LARGE, || shares.local_appends(0, &many.0, &many.1)) > 0);
    assert!(each_refused("bounds", LARGE, || shares.local_bounds(0, &lens, &starts)) > 0);
    assert!(each_refused("a rank's slots", LARGE, || shares.slot_mapping(0, &lens, &starts, &slots)) > 0);
}

fn a_table_of_angles() {
    let rope = RopeFrequencies::plain(64, 1e4).expect("frequencies");
    assert!(each_refused("cos_sin", LARGE, || rope.cos_sin(1 << 12)) > 0);
}

crate::tests![
    every_op_of_the_cpu,
    downloads_and_buffers,
    a_long_append,
    a_long_rope_append,
    many_page_copies,
    a_gather_of_many_ranges,
    a_reorg_of_many_chunks,
    a_prefill_of_many_sequences,
    a_decode_of_many_sequences,
    a_plan_over_slabs,
    arrays_of_a_caller,
    plans_of_a_layer,
    tables_of_a_pool,
    a_step_of_a_pool_is_all_or_nothing,
    a_long_sequence_of_a_pool,
    shares_of_a_batch,
    a_table_of_angles,
];
