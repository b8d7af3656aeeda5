//! A steady decode loop allocates nothing on the host: plans and tables are made in memory that is there already.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use wgpu_mla::{
    Batch, Capacity, Dtype, KvSpec, MlaShape, MlaSpec, PageTable, Plan, Policy, SharedPrefix, Tiling,
    write_tables,
};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// Counts what this thread asks for.
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
    let spec = MlaSpec {
        shape: MlaShape { num_heads: 20, kv_lora_rank: 512, qk_rope_head_dim: 64 },
        kv: KvSpec { dtype: Dtype::Bf16, page_size: 16, num_pages: 4000 },
        query: Dtype::Bf16,
        out: Dtype::F32,
    };
    let tiling = Tiling {
        rows_per_tile: 20,
        tokens_per_block: 32,
        target_items: 128,
        min_split_tokens: 64,
        lone_items: 0,
        item_overhead_tokens: 16,
    };
    let starts: Vec<i32> = (0..=SEQUENCES as i32).collect();
    let shared = [SharedPrefix { sequences: vec![3, 5, 9], tokens: 96 }];
    let max_pages = 100;
    let block_table = vec![7; SEQUENCES * max_pages];
    let pages = PageTable::Dense { block_table: &block_table, max_pages };
    let mut seq_lens = [0i32; SEQUENCES];
    let lens_at = |seq_lens: &mut [i32; SEQUENCES], step: i32| {
        seq_lens.iter_mut().zip(0..).for_each(|(len, i)| *len = 120 + 29 * i + step);
    };

    // Fewer workers than tiles: the automatic policy then cuts into pieces.
    let few = Tiling { target_items: 30, ..tiling };
    for (policy, tiling) in [
        (Policy::Auto, tiling),
        (Policy::Auto, few),
        (Policy::FixedTokens(64), tiling),
        (Policy::OneSplit, tiling),
    ] {
        let (mut plan, mut words) = (Plan::default(), Vec::new());
        let mut run = |step: i32| {
            lens_at(&mut seq_lens, step);
            let batch = Batch { shared_prefixes: &shared, ..Batch::new(&seq_lens, &starts) };
            plan.update(&spec, &tiling, &batch, policy).expect("a plan");
            let capacity = Capacity::of(&plan);
            write_tables(&mut words, &capacity, &plan, pages, &spec.kv).expect("tables");
        };
        // The largest step makes the memory; the automatic policy may cut a shorter one finer.
        (0..=100).for_each(&mut run);
        let before = ALLOCATIONS.get();
        (0..=100).for_each(&mut run);
        assert_eq!(ALLOCATIONS.get() - before, 0, "{policy:?}, {} items", tiling.target_items);
        // Equal shares are one a sequence then, and one for the prefix.
        assert!(tiling != few || plan.items.len() > SEQUENCES + 1, "{} items", plan.items.len());
    }
}

crate::tests![a_hundred_steps_without_an_allocation,];
