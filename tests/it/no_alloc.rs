//! A steady decode loop allocates nothing on the host: plans and tables reuse their memory, and recording an op allocates none.

use std::cell::RefCell;
use std::collections::BTreeSet;

use wgpu_mla::cpu::{Buffer, Cpu};
use wgpu_mla::{
    Batch, Capacity, Device, Dtype, Kernel, KvSpec, MlaDecode, MlaShape, Op, PageTable, Plan, SharedPrefix,
    SplitPolicy, Tiling, write_tables,
};

use crate::allocator::ALLOCATIONS;
use crate::every_op::{self, Uses, Visit};

thread_local! {
    /// The ops that ran.
    static RAN: RefCell<BTreeSet<&'static str>> = const { RefCell::new(BTreeSet::new()) };
}

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

/// Records and runs each prepared op again and again.
struct Runs;

impl Visit<Cpu> for Runs {
    fn visit<'a, O: Op>(&mut self, op: O, options: &O::Options, input: O::Input<'a>, args: &O::Args<&Buffer>)
    where
        Cpu: Kernel<O>,
        O::Input<'a>: Clone,
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
}

/// Every op, and layers with and without an expanded prefix.
fn every_op_runs_without_an_allocation() {
    RAN.take();
    Uses::new(&Cpu::with_threads(1)).expect("memory").each(&mut Runs);
    assert_eq!(RAN.take(), every_op::names());
}

crate::tests![a_hundred_steps_without_an_allocation, every_op_runs_without_an_allocation];
