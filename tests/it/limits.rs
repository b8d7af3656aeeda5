//! Numbers that a host makes up: helpers on specs that nobody checked never overflow, and what would take all memory, or hours, is an
//! error that names the limit. This program is built with overflow checks.

use std::time::{Duration, Instant};

use mla_support::Outcome;
use wgpu_mla::cpu::Cpu;
use wgpu_mla::*;

const MAX: u32 = u32::MAX;
const SHAPES: [MlaShape; 3] = [
    MlaShape { num_heads: 0, kv_lora_rank: 0, qk_rope_head_dim: 0 },
    MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 },
    MlaShape { num_heads: MAX, kv_lora_rank: MAX, qk_rope_head_dim: MAX },
];

fn decodes() -> Vec<MlaDecode> {
    let mut all = Vec::new();
    for shape in SHAPES {
        for page_size in [0, 1, 256, MAX] {
            for num_pages in [0, 1, MAX] {
                let kv = KvSpec { layout: Dtype::F32.into(), page_size, num_pages };
                all.push(MlaDecode { shape, kv, query: Dtype::F32, out: Dtype::F32 });
            }
        }
    }
    all
}

fn layer(mla: &MlaDecode, dim: u32) -> MlaLayer {
    MlaLayer {
        shape: mla.shape,
        qk_nope_head_dim: dim,
        v_head_dim: dim,
        kv: mla.kv,
        dtype: Dtype::F32,
        query: Dtype::F32,
        weight: Dtype::F32,
        out: Dtype::F32,
        rope: RopeLayout::Interleaved,
        decode_threshold: 1,
        workspace_bytes: u64::MAX,
    }
}

/// Every public function that counts with a caller's numbers, on each combination of nothing, something and the most.
fn helpers_never_overflow() {
    let numbers = [0, 1, 255, MAX];
    for spec in decodes() {
        let _ = spec.check();
        let _ = (spec.shape.row_elems(), spec.kv.num_slots(), spec.cache_bytes());
        for n in numbers {
            let _ = (spec.kv.pages_for(n), spec.kv.num_slabs(n), spec.slab_bytes(n));
            let _ = (spec.query_bytes(n), spec.out_bytes(n), spec.lse_bytes(n));
            let _ = (spec.slab_pages(n.into()), spec.slab_pages(u64::MAX));
            let _ = (KvView::of_layer((), &spec, n), KvView::in_slabs(&[(); 3], &spec, n, n));
            let _ = (View::dense((), n, n), View::dense((), n, MAX));
            let _ = (softmax_scale(n, MAX, 1.0, 0.0), softmax_scale(n, n, 40.0, 1.0));
            let layer = layer(&spec, n);
            let _ = (layer.check(), layer.mla(), layer.workspace_row_bytes());
            let _ = (layer.expanded_bytes(n), layer.expanded_bytes(MAX), Expanded::dense(&layer, [(); 3]));
            let dims = HeadDims {
                num_heads: spec.shape.num_heads,
                kv_lora_rank: n,
                qk_nope_head_dim: n,
                v_head_dim: MAX,
            };
            let _ = (dims.rows(), dims.elements(), dims.check());
            let _ = (WeightView::w_uk(&dims, ()), WeightView::w_uv(&dims, ()));
            for format in [WeightFormat::Q8_0, Dtype::E4m3.into()] {
                let _ = (WeightView::attn_k_b(&dims, format, ()), WeightView::attn_v_b(&dims, format, ()));
                let _ = (format.bytes_of(u64::MAX), WeightScales::w_uv(&dims, ()));
            }
            let f32s = Dtype::F32;
            let _ = HeadProject::absorb(&dims, f32s, f32s, f32s).check();
            let _ = KvBProj::new(dims, f32s, &[]).is_err();
        }
        let _ = (KvView::dense((), &spec), MlaDecodeArgs::dense(&spec, (), (), (), (), 1.0));
        let _ = PagePool::new(spec.kv);
        for seq_len in [0, 1, i32::MAX] {
            let batch = Batch::new(std::slice::from_ref(&seq_len), &[0, 1]);
            let _ = Plan::new(&spec, &TILING, &batch, SplitPolicy::OneSplit);
            let pages = PageTable::Dense { block_table: &[0], max_pages: 1 };
            let (seq_lens, query_start_loc) = (std::slice::from_ref(&seq_len), &[0, 1]);
            let (slot_mapping, shared_prefixes) = (&[-1], &[]);
            let batch =
                LayerBatch { seq_lens, query_start_loc, slot_mapping, pages, shared_prefixes, expanded: &[] };
            let _ = LayerPlan::new(&layer(&spec, 0), &TILING, &batch, SplitPolicy::Auto);
        }
    }
    let prefill = Cpu::new().compile(PREFILL).expect("a prefill");
    for rows in numbers {
        for num_heads in numbers {
            let mut tiling = *prefill.facts();
            (tiling.rows, tiling.target_groups, tiling.num_heads) = (rows, MAX, num_heads);
            assert!(numbers.iter().all(|&n| tiling.key_parts(n, MAX) >= 1 && tiling.key_parts(n, 0) == 1));
            let sequence = PrefillSequence::causal(rows, num_heads, rows, num_heads);
            let _ = (sequence.split_keys(0, MAX).count(), sequence.split_keys(3, MAX).count());
            let _ = PrefillExtent::of(&[sequence]);
        }
    }
    for spec in decodes() {
        let capacity = Capacity {
            items: MAX,
            queries: MAX,
            pages: MAX,
            merges: MAX,
            merge_partials: MAX,
            partials: MAX,
        };
        let _ =
            (capacity.header(&spec.kv), capacity.grown_to(capacity), Capacity::default().header(&spec.kv));
    }
    let item = plan::WorkItem { kv_begin: 5, kv_end: 2, num_rows: MAX, ..bytemuck::Zeroable::zeroed() };
    assert_eq!(item.work(), 0);
    let mut wild = Plan::default();
    wild.items = vec![plan::WorkItem { kv_begin: 0, kv_end: MAX, ..item }; 3];
    assert_eq!(wild.work(), u64::MAX);
    let _ = csr_seq_lens(&[0, i32::MAX], &[i32::MIN], MAX);
    let _ = query_start_loc(&[MAX; 4]);
}

/// What saturates is refused by what it is handed to.
fn saturated_sizes_are_refused() -> Outcome {
    let spec = decodes()[decodes().len() - 1];
    assert_eq!(
        (spec.cache_bytes(), spec.query_bytes(MAX), spec.shape.row_elems()),
        (u64::MAX, u64::MAX, MAX)
    );
    assert_eq!((spec.kv.pages_for(0), KvSpec { page_size: 0, ..spec.kv }.pages_for(1)), (0, MAX));
    assert!(matches!(Cpu::new().buffer(u64::MAX), Err(Error::OutOfMemory { .. })));
    #[cfg(feature = "wgpu")]
    assert!(matches!(mla_support::gpu()?.buffer(u64::MAX), Err(Error::Limit { need: u64::MAX, .. })));
    #[cfg(feature = "cuda")]
    if let Ok(cuda) = mla_support::cuda() {
        assert!(matches!(cuda.buffer(u64::MAX), Err(Error::OutOfMemory { .. })));
    }
    Ok(())
}

const TILING: Tiling = Tiling {
    rows_per_tile: 16,
    tokens_per_block: 16,
    target_items: 8,
    min_split_tokens: 64,
    single_sequence_items: 0,
    item_overhead_tokens: 0,
};

const PREFILL: MlaPrefill = MlaPrefill {
    num_heads: 1,
    qk_nope_head_dim: 8,
    qk_rope_head_dim: 0,
    v_head_dim: 8,
    dtype: Dtype::F32,
    out: Dtype::F32,
};

fn mla(num_heads: u32, num_pages: u32) -> MlaDecode {
    let kv = KvSpec { layout: Dtype::F32.into(), page_size: 256, num_pages };
    MlaDecode { shape: MlaShape { num_heads, ..SHAPES[1] }, kv, query: Dtype::F32, out: Dtype::F32 }
}

/// Runs a call that must not work for long, whatever it answers.
fn quickly<T>(what: &str, call: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let result = call();
    assert!(begin.elapsed() < Duration::from_secs(5), "{what} took {:?}", begin.elapsed());
    result
}

/// Checks that the error is one of a limit, and says what is needed.
fn limited<T: std::fmt::Debug>(what: &str, call: impl FnOnce() -> Result<T>) {
    match quickly(what, call) {
        Err(Error::Limit { need, limit, .. }) => assert!(need > limit, "{what}: {need} of {limit}"),
        other => panic!("{what}: {other:?}"),
    }
}

fn plans_that_are_too_large_are_refused() {
    let (most, spec) = (i32::MAX, mla(1, (1 << 23) - 1));
    let len = spec.kv.num_slots() as i32;
    let plan = |tiling, lens: &[i32], starts: &[i32], policy| {
        Plan::new(&spec, tiling, &Batch::new(lens, starts), policy)
    };
    let fine = Tiling { tokens_per_block: 1, target_items: MAX, min_split_tokens: 0, ..TILING };
    let zeros = Tiling { rows_per_tile: 0, tokens_per_block: 0, ..fine };
    limited("splits of one token", || plan(&TILING, &[len], &[0, 1], SplitPolicy::FixedTokens(1)));
    limited("a huge target", || plan(&fine, &[len], &[0, 1], SplitPolicy::Auto));
    limited("a tiling of zeros", || plan(&zeros, &[len], &[0, 1], SplitPolicy::Auto));
    limited("2^31 queries", || plan(&TILING, &[len], &[0, most], SplitPolicy::OneSplit));
    limited("2^31 queries of no token", || plan(&TILING, &[0], &[0, most], SplitPolicy::Auto));
    limited("2^28 queries", || plan(&fine, &[len], &[0, 1 << 28], SplitPolicy::Auto));
    let single = Tiling { target_items: 1, rows_per_tile: 1, ..TILING };
    limited("one worker", || plan(&single, &[len, 5], &[0, 1 << 26, 1 << 26], SplitPolicy::Auto));
    // All but a page is in the second slab.
    let slab_pages = spec.kv.num_pages.div_ceil(2);
    let pages: Vec<i32> = (0..100_000).map(|page| page + slab_pages as i32 - 1).collect();
    let pages = PageTable::Dense { block_table: &pages, max_pages: 100_000 };
    let slabs = Some(SlabTable { pages, slab_pages });
    let lens = [100_000 * 256];
    let batch = Batch { slabs, ..Batch::new(&lens, &[0, 1]) };
    limited("slabs", || Plan::new(&spec, &TILING, &batch, SplitPolicy::FixedTokens(1)));
    // A large one is made: 64 sequences of a million tokens, 262,144 items.
    let (lens, starts): (Vec<_>, Vec<_>) = (vec![1 << 20; 64], (0..=64).collect());
    let made = quickly("a large plan", || plan(&TILING, &lens, &starts, SplitPolicy::FixedTokens(256)));
    assert_eq!(made.expect("it has room").items.len(), 64 << 12);
}

fn layers_of_too_many_rounds_are_refused() {
    let spec = MlaLayer { workspace_bytes: 1 << 30, ..layer(&mla(1, 1 << 18), 8) };
    let pages: Vec<i32> = (0..1 << 18).collect();
    let (starts, slots) = ([0, 2], [-1, -1]);
    let plan = |len: i32, max_pages: u32, policy| {
        let pages = PageTable::Dense { block_table: &pages[..max_pages as usize], max_pages };
        let batch = LayerBatch {
            seq_lens: &[len],
            query_start_loc: &starts,
            slot_mapping: &slots,
            pages,
            shared_prefixes: &[],
            expanded: &[],
        };
        LayerPlan::new(&spec, &TILING, &batch, policy).map(drop)
    };
    limited("splits of one token", || plan(1 << 26, 1 << 18, SplitPolicy::FixedTokens(1)));
    let short = quickly("a short row", || plan(1 << 26, 2, SplitPolicy::FixedTokens(1)));
    assert!(matches!(short, Err(Error::SeqLen { seq: 0, max: 512, .. })), "{short:?}");
    assert_eq!(plan(1 << 16, 1 << 18, SplitPolicy::FixedTokens(64)), Ok(()));
}

fn arrays_that_are_too_large_are_refused() {
    arrays().unwrap();
}

fn arrays() -> Result<()> {
    let mut pool = PagePool::new(KvSpec { layout: Dtype::F32.into(), page_size: 256, num_pages: 1 << 22 })?;
    let long = pool.add();
    let tokens = quickly("four million pages", || pool.append(long, 1 << 30))?.tokens;
    assert_eq!((tokens.clone(), pool.num_free_pages()), (0..1 << 30, 0));
    assert_eq!(pool.pages(long)?[(1 << 22) - 1], (1 << 22) - 1);
    limited("slots", || pool.slot_mapping(&[(long, tokens)]));
    limited("many slots", || pool.slot_mapping(&vec![(long, 0..1 << 20); 65]));
    limited("a dense table", || pool.block_table(&[long; 257], 0).map(|table| table.entries.len()));
    limited("rows of pages", || pool.csr(&[long; 513]).map(|csr| csr.kv_indices.len()));
    let shares = Shares::even(2, 1)?;
    let starts = [0, i32::MAX];
    limited("bounds", || shares.local_bounds(0, &[i32::MAX], &starts));
    limited("a rank's slots", || shares.slot_mapping(0, &[i32::MAX], &starts, &[]));
    limited("cos_sin", || RopeFrequencies::plain(64, 1e4)?.cos_sin(1 << 31));
    Ok(())
}

fn inputs_that_are_too_large_are_refused() {
    inputs(&Cpu::new()).unwrap();
}

#[cfg(feature = "wgpu")]
fn inputs_that_are_too_large_for_wgpu_are_refused() -> Outcome {
    inputs(&mla_support::gpu()?).unwrap();
    Ok(())
}

#[cfg(feature = "cuda")]
fn inputs_that_are_too_large_for_cuda_are_refused() -> Outcome {
    inputs(&mla_support::cuda()?).unwrap();
    Ok(())
}

/// Steps of each op whose input can ask for much in few words.
fn inputs<B: Backend>(backend: &B) -> Result<()> {
    let prefill = backend.compile(PREFILL)?;
    let mut step = prefill.step(0)?;
    let all = [PrefillSequence::full(0, 1 << 30, 0, 1)];
    // Tiles of 128 rows are few enough.
    let tiled = quickly("a prefill of 2^30 queries", || prefill.prepare(&mut step, &all));
    assert!(matches!(tiled, Ok(()) | Err(Error::Limit { .. })), "{tiled:?}");

    let gather =
        backend.compile(KvGather { shape: SHAPES[1], kv: mla(1, 1 << 20).kv, output: Dtype::F32 })?;
    let mut step = gather.step(0)?;
    let pages: Vec<i32> = vec![0; 1 << 20];
    let pages = PageTable::Dense { block_table: &pages, max_pages: 1 << 20 };
    let ranges: Vec<_> =
        (0..100).map(|i| GatherRange { sequence: 0, begin: 0, tokens: 1 << 25, out_row: i << 25 }).collect();
    let batch = GatherBatch { pages, seq_lens: &[1 << 28], ranges: &ranges };
    let gathered = quickly("a gather of 2^32 rows", || gather.prepare(&mut step, batch));
    assert!(matches!(gathered, Ok(()) | Err(Error::Limit { .. })), "{gathered:?}");

    let shares = Shares::even(2, 1)?;
    let reorg = backend.compile(ReorgKvCache { dtype: Dtype::F32, row_elems: 4 })?;
    let mut step = reorg.step(ReorgCapacity::default())?;
    let chunks = [ReorgChunk { begin: 0, tokens: 1 << 31, local_row: 0, out_row: 0 }];
    let batch = ReorgBatch { shares: &shares, chunks: &chunks };
    let copied = quickly("a copy of 2^31 rows", || reorg.prepare(&mut step, batch));
    assert!(matches!(copied, Ok(()) | Err(Error::Limit { .. })), "{copied:?}");

    let decode = backend.compile(mla(1, 4))?;
    let most = Capacity { items: MAX, queries: MAX, pages: MAX, ..Capacity::default() };
    let step = quickly("a step of 2^32 items", || decode.step(most).map(drop));
    let Err(Error::Limit { need, limit, .. }) = step else { panic!("{step:?}") };
    // CUDA names the items of its grid, the others the words of the tables.
    assert!(need > limit, "{need} of {limit}");
    if limit == u64::from(MAX) - 1 {
        assert_eq!(need, 16 + 8 * (1 << 32) + 2 * (1 << 32) + (1 << 32));
    }
    Ok(())
}

/// A caller of `write_tables` may hand over a plan that it has changed.
fn places_of_a_changed_plan_are_checked() {
    let spec = mla(1, 4);
    let pages = PageTable::Dense { block_table: &[3, 2, 1, 0], max_pages: 2 };
    let good = Plan::new(&spec, &TILING, &Batch::new(&[500, 300], &[0, 1, 2]), SplitPolicy::OneSplit)
        .expect("a plan");
    let write = |plan: &Plan| write_tables(&mut Vec::new(), &Capacity::of(plan), plan, pages, &spec.kv);
    assert!(write(&good).is_ok());
    let changes: [fn(&mut Plan); 6] = [
        |plan| plan.page_begin[1] = 1,
        |plan| plan.page_begin[1] = MAX,
        |plan| plan.page_begin.clear(),
        |plan| plan.seq_lens[0] = MAX,
        |plan| plan.seq_lens.push(0),
        |plan| plan.shared.push((0, 9, 1)),
    ];
    for change in changes {
        let mut plan = good.clone();
        change(&mut plan);
        assert!(matches!(write(&plan), Err(Error::Shape { what: "plan of items", .. })), "{plan:?}");
    }
}

crate::tests![
    helpers_never_overflow,
    saturated_sizes_are_refused,
    plans_that_are_too_large_are_refused,
    layers_of_too_many_rounds_are_refused,
    arrays_that_are_too_large_are_refused,
    inputs_that_are_too_large_are_refused,
    #[cfg(feature = "wgpu")]
    inputs_that_are_too_large_for_wgpu_are_refused,
    #[cfg(feature = "cuda")]
    inputs_that_are_too_large_for_cuda_are_refused,
    places_of_a_changed_plan_are_checked,
];
