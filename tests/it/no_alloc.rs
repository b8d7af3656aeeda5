//! A steady decode loop allocates nothing on the host: plans and tables reuse their memory, and recording an op allocates none.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

use wgpu_mla::cpu::{Buffer, Cpu};
use wgpu_mla::{
    Batch, Capacity, CorrectAttnOut, CorrectAttnOutArgs, DecodeOptions, Device, Dtype, ExpandBatch,
    ExpandedPrefix, GatherBatch, GatherRange, HeadProject, HeadProjectArgs, Kernel, KvAppend, KvAppendArgs,
    KvCalibrate, KvCalibrateArgs, KvCopyPages, KvGather, KvGatherArgs, KvSpec, KvView, LayerBatch,
    LayerCapacity, LayerOptions, LseBase, MergeState, MergeStateArgs, MergeStates, MergeStatesArgs,
    MlaDecode, MlaDecodeArgs, MlaExpand, MlaExpandArgs, MlaPrefill, MlaPrefillArgs, MlaShape, Op, OpOptions,
    PageTable, Plan, PrefillOptions, PrefillSequence, ReorgBatch, ReorgChunk, ReorgKvCache, ReorgKvCacheArgs,
    Rope, RopeAppend, RopeAppendArgs, RopeAppendBatch, RopeArgs, RopeLayout, SharedPrefix, Shares,
    SplitPolicy, Tiling, View, WeightOrder, WeightView, for_each_op, write_tables,
};

use crate::cpu::layer_args;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    /// The ops that ran.
    static RAN: RefCell<BTreeSet<&'static str>> = const { RefCell::new(BTreeSet::new()) };
}

/// Counts this thread's allocations.
struct Counting;

// SAFETY: every call is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const SEQUENCES: usize = 40;

fn a_hundred_steps_without_an_allocation() {
    let spec = MlaDecode {
        shape: MlaShape { num_heads: 20, kv_lora_rank: 512, qk_rope_head_dim: 64 },
        kv: KvSpec { layout: Dtype::Bf16.into(), page_size: 16, num_pages: 4000 },
        query: Dtype::Bf16,
        out: Dtype::F32,
    };
    let tiling = Tiling {
        rows_per_tile: 20,
        tokens_per_block: 32,
        target_items: 128,
        min_split_tokens: 64,
        single_sequence_items: 0,
        item_overhead_tokens: 16,
    };
    let starts: Vec<i32> = (0..=SEQUENCES as i32).collect();
    let shared = [SharedPrefix { sequences: vec![3, 5, 9], tokens: 96 }];
    let max_pages = 100;
    let block_table = vec![7; SEQUENCES * max_pages];
    let pages = PageTable::Dense { block_table: &block_table, max_pages: max_pages as u32 };
    let mut seq_lens = [0i32; SEQUENCES];
    let lens_at = |seq_lens: &mut [i32; SEQUENCES], step: i32| {
        seq_lens.iter_mut().zip(0..).for_each(|(len, i)| *len = 120 + 29 * i + step);
    };

    // Fewer workers than tiles: the automatic policy then cuts into pieces.
    let few = Tiling { target_items: 30, ..tiling };
    for (policy, tiling) in [
        (SplitPolicy::Auto, tiling),
        (SplitPolicy::Auto, few),
        (SplitPolicy::FixedTokens(64), tiling),
        (SplitPolicy::OneSplit, tiling),
    ] {
        let (mut plan, mut words) = (Plan::default(), Vec::new());
        let mut run = |step: i32| {
            lens_at(&mut seq_lens, step);
            let batch = Batch { shared_prefixes: &shared, ..Batch::new(&seq_lens, &starts) };
            plan.update(&spec, &tiling, &batch, policy).expect("a plan");
            let capacity = Capacity::of(&plan);
            write_tables(&mut words, &capacity, &plan, pages, &spec.kv).expect("tables");
        };
        // The largest step allocates; the automatic policy may cut a shorter one finer.
        (0..=100).for_each(&mut run);
        let before = ALLOCATIONS.get();
        (0..=100).for_each(&mut run);
        assert_eq!(ALLOCATIONS.get() - before, 0, "{policy:?}, {} items", tiling.target_items);
        // Equal shares are one a sequence then, and one for the prefix.
        assert!(tiling != few || plan.items.len() > SEQUENCES + 1, "{} items", plan.items.len());
    }
}

/// Records and runs a prepared op again and again.
fn runs_without_an_allocation<O: Op>(
    op: O,
    options: &O::Options,
    input: O::Input<'_>,
    args: &O::Args<&Buffer>,
) where
    Cpu: Kernel<O>,
{
    RAN.with_borrow_mut(|ran| ran.insert(O::NAME));
    // One thread, so that every allocation is counted.
    let op = Cpu::with_threads(1).compile_with(op, options).expect("compiles");
    let mut step = op.step(O::Capacity::default()).expect("a step");
    op.prepare(&mut step, input).expect("prepared");
    let binding = op.bind(args, step.used()).expect("binds");
    let run = || {
        op.record_on(&mut (), &step, &binding).expect("recorded");
        op.run(&step, &binding).expect("runs");
    };
    run();
    let before = ALLOCATIONS.get();
    (0..5).for_each(|_| run());
    assert_eq!(ALLOCATIONS.get() - before, 0, "{}", O::NAME);
}

fn every_op_runs_without_an_allocation() {
    RAN.take();
    let cpu = Cpu::with_threads(1);
    let buffers: [Buffer; 10] = std::array::from_fn(|_| cpu.buffer(1 << 20).expect("memory"));
    let [a, b, c, d, e, f, g, ..] = &buffers;
    let one = OpOptions::default();
    let (dtype, num_heads) = (Dtype::F32, 2);
    let layout = RopeLayout::HalfSplit;

    let shape = MlaShape { num_heads, kv_lora_rank: 256, qk_rope_head_dim: 32 };
    let kv = KvSpec { layout: Dtype::F16.into(), page_size: 16, num_pages: 40 };
    let spec = MlaDecode { shape, kv, query: dtype, out: dtype };
    let decode = cpu.compile(spec).expect("compiles");
    // Split, so that partial results are merged.
    let batch = Batch::new(&[200, 77], &[0, 1, 3]);
    let plan = Plan::new(&spec, &decode.tiling(), &batch, SplitPolicy::FixedTokens(32)).expect("a plan");
    let block_table: Vec<i32> = (0..26).collect();
    let pages = PageTable::Dense { block_table: &block_table, max_pages: 13 };
    let layer = MlaDecodeArgs::dense(&spec, a, b, c, d, 0.1);
    runs_without_an_allocation(spec, &DecodeOptions::default(), (&plan, pages), &layer);

    let append = KvAppend { shape, kv, input: dtype };
    let cache = KvView::dense(c, &spec);
    let (kv_c, k_pe) = (View::dense(a, 1, 256), View::dense(b, 1, 32));
    let rows = KvAppendArgs { kv_c, k_pe, kv: cache.clone(), k_scale: 1.0 };
    runs_without_an_allocation(append, &one, &[3, -1, 70], &rows);
    let calibrate = KvCalibrateArgs { kv_c, k_pe, k_scale: 1.0, stats: c };
    runs_without_an_allocation(KvCalibrate { shape, input: dtype }, &one, 0..9, &calibrate);
    runs_without_an_allocation(KvCopyPages { shape, kv }, &one, &[(0, 3), (1, 2)], &cache);
    let gather = KvGather { shape, kv, output: dtype };
    let ranges = &[GatherRange { sequence: 1, begin: 5, tokens: 60, out_row: 2 }];
    let gathered = KvGatherArgs { kv: cache, k_scale: 1.0, out: View::dense(a, 1, 288) };
    let batch = GatherBatch { pages, seq_lens: &[200, 77], ranges };
    runs_without_an_allocation(gather, &one, batch, &gathered);
    let shares = Shares::even(3, 2).expect("shares");
    let chunks = &[ReorgChunk { begin: 5, tokens: 60, local_row: 1, out_row: 2 }];
    let reorg = ReorgKvCacheArgs {
        gathered: View::dense(a, 1, 288),
        rank_stride: 25 * 288,
        out: View::dense(b, 1, 288),
    };
    let batch = ReorgBatch { shares: &shares, chunks };
    runs_without_an_allocation(ReorgKvCache { dtype, row_elems: 288 }, &one, batch, &reorg);

    let rope = Rope { dtype, num_heads, rope_dim: 32, layout };
    let (x, y) = (View::dense(d, 2, 32), View::dense(e, 2, 32));
    let rotated = RopeArgs { x, y, positions: f, cos_sin: g, max_position: 4, scale: 1.0 };
    runs_without_an_allocation(rope, &one, 1..9, &rotated);
    let both = RopeAppend { append, query: dtype, num_heads, layout };
    let args = RopeAppendArgs {
        q_pe: x,
        q_pe_out: y,
        layer: rows,
        positions: f,
        cos_sin: g,
        max_position: 4,
        q_pe_scale: 1.0,
    };
    runs_without_an_allocation(both, &one, RopeAppendBatch::slots(&[3, -1, 70]), &args);

    let order = WeightOrder::Kn;
    let project = HeadProject { input: dtype, weight: dtype, output: dtype, num_heads, k: 64, n: 48, order };
    let weight = WeightView { buffer: b, offset: 0, head_stride: 64 * 48, row_stride: 48 };
    let projected = HeadProjectArgs {
        x: View::dense(a, 2, 64),
        weight,
        y: View::dense(c, 2, 48),
        scale: 1.0,
        saturates: false,
    };
    runs_without_an_allocation(project, &one, 0..70, &projected);

    let (qk_nope_head_dim, qk_rope_head_dim, v_head_dim) = (16, 32, 24);
    let prefill = MlaPrefill { num_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, dtype, out: dtype };
    let attended = MlaPrefillArgs {
        q_nope: View::dense(a, 2, 16),
        q_pe: View::dense(b, 2, 32),
        k_nope: View::dense(c, 2, 16),
        k_pe: View { head_stride: 0, ..View::dense(d, 1, 32) },
        v: View::dense(e, 2, 24),
        out: View::dense(f, 2, 24),
        lse: View::dense(g, 2, 1),
        softmax_scale: 0.1,
        v_scale: 1.0,
    };
    let sequences = &[PrefillSequence::causal(0, 70, 0, 90), PrefillSequence::full(70, 3, 90, 200)];
    runs_without_an_allocation(prefill, &PrefillOptions::default(), sequences, &attended);

    let (states, lse) = (|buffer| View::dense(buffer, 2, 24), |buffer| View::dense(buffer, 2, 1));
    let merged = MergeStateArgs {
        prefix_output: states(a),
        prefix_lse: lse(b),
        suffix_output: states(c),
        suffix_lse: lse(d),
        output: states(e),
        output_lse: Some(lse(f)),
        num_tokens: 50,
        num_heads,
        output_scale: 1.0,
    };
    runs_without_an_allocation(MergeState { dtype, head_size: 24 }, &one, (), &merged);
    let sets = MergeStatesArgs {
        states: states(a),
        set_stride: 50 * 48,
        lse: lse(b),
        lse_set_stride: 50 * 2,
        output: states(c),
        output_lse: Some(lse(d)),
        lse_base: LseBase::E,
        num_heads,
        output_scale: 1.0,
    };
    runs_without_an_allocation(MergeStates { dtype, head_size: 24 }, &one, (0..50, 3), &sets);
    let corrected = CorrectAttnOutArgs {
        out: states(a),
        lses: lse(b),
        lse_rank_stride: 50 * 2,
        output: states(c),
        output_lse: Some(lse(d)),
        lse_base: LseBase::Two,
        world: 3,
        rank: 1,
        num_heads,
    };
    runs_without_an_allocation(CorrectAttnOut { dtype, head_size: 24 }, &one, 0..50, &corrected);
    macro_rules! names {
        ($($op:ty),*) => { BTreeSet::from([$(<$op>::NAME),*]) };
    }
    assert_eq!(RAN.take(), for_each_op!(names));
}

/// Decodes, one run of them over a prefix that is kept expanded, and a prompt in chunks that are merged.
fn a_layer_runs_without_an_allocation() {
    let spec = mla_support::suite::layer::spec(Dtype::F32, Dtype::F16, RopeLayout::Interleaved, 24);
    let buffers = std::array::from_fn(|_| Cpu::with_threads(1).buffer(1 << 20).expect("memory"));
    let args = layer_args(&spec, &buffers);
    let expanded = [ExpandedPrefix { sequences: vec![0, 1], tokens: 16, first_row: 3 }];
    let batch = LayerBatch {
        seq_lens: &[20, 30, 50],
        query_start_loc: &[0, 1, 3, 13],
        slot_mapping: &[-1; 13],
        pages: PageTable::Dense {
            // The first two share two pages.
            block_table: &std::array::from_fn::<i32, 21, _>(|i| {
                if (7..9).contains(&i) { i as i32 - 7 } else { i as i32 }
            }),
            max_pages: 7,
        },
        shared_prefixes: &[],
        expanded: &expanded,
    };
    let capacity = LayerCapacity { tokens: 16, decode_tokens: 16, prefix_rows: 32, positions: 0 };
    let options = LayerOptions { capacity, ..LayerOptions::default() };
    runs_without_an_allocation(spec, &options, (&batch, SplitPolicy::Auto), &args);
    let plain = LayerBatch { expanded: &[], ..batch };
    runs_without_an_allocation(spec, &options, (&plain, SplitPolicy::FixedTokens(8)), &args);

    let expand = MlaExpandArgs {
        kv: args.kv,
        k_scale: 1.0,
        kv_b_proj: args.kv_b_proj,
        expanded: args.expanded.expect("it has them"),
    };
    let prefix = ExpandBatch { pages: &[3, 1, 2], tokens: 20, first_row: 5 };
    runs_without_an_allocation(MlaExpand(spec), &OpOptions::default(), prefix, &expand);
}

crate::tests![
    a_hundred_steps_without_an_allocation,
    every_op_runs_without_an_allocation,
    a_layer_runs_without_an_allocation,
];
