//! Where the automatic policy cuts, against a slow model of it: list scheduling, longest item first.

use std::collections::BTreeMap;

use wgpu_mla::plan::{DIRECT, WorkItem};
use wgpu_mla::{Batch, Plan, SplitPolicy, Tiling};

use super::spec;

/// Tiles that attend the same tokens.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    pub tiles: u32,
    pub begin: u32,
    pub end: u32,
    /// Its rows have partial results of other runs too, so it may have no item.
    pub partial: bool,
}

/// Begins and ends of a run's equal shares.
fn shares(run: &Run, chunk: u32, block: u32) -> Vec<(u32, u32)> {
    let tokens = run.end - run.begin;
    let splits = if tokens == 0 { u32::from(!run.partial) } else { tokens.div_ceil(chunk * block) };
    let at = |k: u32| run.begin + (tokens.div_ceil(block) * k / splits * block).min(tokens);
    (0..splits).map(|k| (at(k), at(k + 1))).collect()
}

/// The smallest chunk of equal shares, in blocks, and the workers that share them.
fn equal_shares(runs: &[Run], tiling: &Tiling) -> (u32, u32) {
    let block = tiling.tokens_per_block;
    let blocks = |run: &Run| (run.end - run.begin).div_ceil(block);
    let items =
        |chunk: u32| -> u32 { runs.iter().map(|run| run.tiles * blocks(run).div_ceil(chunk).max(1)).sum() };
    let is_single =
        runs.iter().filter(|run| run.end > run.begin || !run.partial).map(|run| run.tiles).sum::<u32>() == 1;
    let single =
        if tiling.single_sequence_items > 0 { tiling.single_sequence_items } else { tiling.target_items };
    let most = if is_single { single.min(tiling.target_items) } else { tiling.target_items };
    let longest = runs.iter().map(blocks).max().unwrap_or(1).max(1);
    let least = tiling.min_split_tokens.div_ceil(block).clamp(1, longest);
    let chunk = (least..longest).find(|&chunk| items(chunk) <= most).unwrap_or(longest);
    let workers = if items(chunk) <= most { most } else { tiling.target_items };
    (chunk, workers.max(1))
}

/// When the last worker is done.
pub fn makespan(mut lengths: Vec<u32>, workers: u32, overhead: u32) -> u64 {
    lengths.sort_unstable();
    let mut done = vec![0u64; workers as usize];
    for length in lengths.into_iter().rev() {
        *done.iter_mut().min().unwrap() += u64::from(length + overhead);
    }
    done.into_iter().max().unwrap()
}

/// `parts` are begins and ends of each tile's splits, in order, not shortened to what its rows see. Returns whether the batch was cut
/// into equal shares.
pub fn check(runs: &[Run], tiling: &Tiling, parts: &BTreeMap<u32, Vec<(u32, u32)>>) -> bool {
    let (block, overhead) = (tiling.tokens_per_block, tiling.item_overhead_tokens);
    let (chunk, workers) = equal_shares(runs, tiling);
    let of_tile = |run: &Run| (0..run.tiles).map(|_| shares(run, chunk, block)).collect::<Vec<_>>();
    let mut equal: Vec<_> = runs.iter().flat_map(of_tile).filter(|parts| !parts.is_empty()).collect();
    let mut cut: Vec<_> = parts.values().cloned().collect();
    equal.sort();
    cut.sort();
    let lengths = |cut: &[Vec<(u32, u32)>]| -> Vec<u32> {
        cut.iter().flatten().map(|(begin, end)| end - begin).collect()
    };
    let [new, old] = [&cut, &equal].map(|cut| makespan(lengths(cut), workers, overhead));
    assert!(new <= old, "done at {new}, with equal shares at {old}: {cut:?}");
    let tiles = parts.len();
    let items = lengths(&cut).len();
    if cut == equal {
        assert!(items <= tiles.max(tiling.target_items as usize), "{items} items of {tiles} tiles");
        return true;
    }

    let tokens = || runs.iter().filter(|run| run.tiles > 0).map(|run| run.end - run.begin);
    assert!(tokens().max().unwrap() - tokens().min().unwrap() > block, "uniform, but {cut:?}");
    assert!(items <= tiles + (2 * tiles).max(tiling.target_items as usize), "{items} items of {tiles} tiles");
    let longest = lengths(&cut).into_iter().max().unwrap();
    for parts in cut.iter().filter(|parts| parts.len() > 1) {
        for (i, (begin, end)) in parts.iter().enumerate() {
            assert_eq!((begin - parts[0].0) % block, 0, "{parts:?}");
            assert!(i + 2 >= parts.len() || end - begin == longest, "{parts:?} of {longest} tokens");
            // The last two may be halves of a piece and a little more.
            assert!((end - begin + block) * 2 > tiling.min_split_tokens, "{parts:?}: all overhead");
        }
    }
    false
}

fn draws(seed: u64, count: usize, longest: f32) -> Vec<i32> {
    let mut state = seed;
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        1 + ((state >> 40) as f32 / (1u64 << 24) as f32 * longest) as i32
    };
    (0..count).map(|_| draw()).collect()
}

/// One query token a sequence.
fn plan(lens: &[i32], heads: u32, tiling: &Tiling) -> Plan {
    let starts: Vec<i32> = (0..=lens.len() as i32).collect();
    let mut spec = spec(heads, 64);
    spec.kv.num_pages = 1 << 20;
    Plan::new(&spec, tiling, &Batch::new(lens, &starts), SplitPolicy::Auto).expect("a plan")
}

fn lengths(plan: &Plan) -> Vec<u32> {
    plan.items.iter().map(|item| item.kv_end - item.kv_begin).collect()
}

fn runs(lens: &[i32], tiles: u32) -> Vec<Run> {
    lens.iter().map(|&len| Run { tiles, begin: 0, end: len as u32, partial: false }).collect()
}

fn parts(plan: &Plan) -> BTreeMap<u32, Vec<(u32, u32)>> {
    let mut parts: BTreeMap<u32, Vec<_>> = BTreeMap::new();
    for item in &plan.items {
        parts.entry(item.first_row).or_default().push((item.kv_begin, item.kv_end));
    }
    parts.values_mut().for_each(|parts| parts.sort_unstable());
    parts
}

/// One block of 16 rows on each of an H200's multiprocessors, and two.
fn h200(blocks: u32) -> Tiling {
    Tiling {
        rows_per_tile: 16,
        tokens_per_block: 16,
        target_items: 132 * blocks,
        min_split_tokens: 64,
        single_sequence_items: if blocks == 1 { 88 } else { 132 },
        item_overhead_tokens: 128 / blocks,
    }
}

/// Every field of every item is that of equal shares.
fn uniform_batches_are_cut_into_equal_shares() {
    for (len, batch) in [1, 15, 64, 100, 1000, 4096, 8191, 8192, 131_072]
        .into_iter()
        .flat_map(|len| [1, 2, 7, 64, 100, 300].map(|batch| (len, batch)))
    {
        for target_items in [4, 5, 8, 13, 64, 100, 132, 264, 512, 777, 1000] {
            for (heads, rows_per_tile) in [(16, 16), (128, 64), (6, 4)] {
                let tiling = Tiling { rows_per_tile, target_items, ..h200(1) };
                let plan = plan(&vec![len; batch], heads, &tiling);
                let runs = runs(&vec![len; batch], heads.div_ceil(rows_per_tile));
                let (chunk, _) = equal_shares(&runs, &tiling);
                let splits = shares(&runs[0], chunk, 16);
                let (mut items, mut partials) = (Vec::new(), 0);
                for seq in 0..batch as u32 {
                    for &(kv_begin, kv_end) in &splits {
                        for tile in (0..heads).step_by(rows_per_tile as usize) {
                            items.push(WorkItem {
                                first_row: seq * heads + tile,
                                num_rows: rows_per_tile.min(heads - tile),
                                page_begin: plan.page_begin[seq as usize],
                                kv_begin,
                                kv_end,
                                partial: if splits.len() == 1 { DIRECT } else { partials + tile },
                                pool: 0,
                                reserved: 0,
                            });
                        }
                        partials += if splits.len() == 1 { 0 } else { heads };
                    }
                }
                let length = |item: &WorkItem| item.kv_end - item.kv_begin;
                let (longest, shortest) =
                    (items.iter().map(length).max().unwrap(), items.iter().map(length).min().unwrap());
                if longest - shortest > 16 {
                    items.sort_by_key(|item| u32::MAX - length(item));
                }
                assert_eq!(
                    (&plan.items, plan.num_partials),
                    (&items, partials),
                    "{batch} x {len}, {tiling:?}"
                );
            }
        }
    }
}

/// The time of all workers if none is idle.
fn ideal(lens: &[i32], tiles: u32, tiling: &Tiling) -> f64 {
    let tokens: i64 = lens.iter().map(|&len| i64::from(len)).sum();
    (tokens * i64::from(tiles)) as f64 / f64::from(tiling.target_items)
}

/// The predicted time of ragged batches over the ideal, next to that of equal shares.
fn ragged_batches_wait_for_no_longest_item() {
    for (blocks, heads) in [(1, 16), (2, 16), (4, 16), (1, 32)] {
        let (tiling, tiles) = (h200(blocks), heads / 16);
        for (seed, count) in [1_770_005_310, 1, 12_345_678_901, 987_654_321_987]
            .map(|seed| (seed, 64))
            .into_iter()
            .chain([(1, 300)])
        {
            let lens = draws(seed, count, 16_384.0);
            let plan = plan(&lens, heads, &tiling);
            check(&runs(&lens, tiles), &tiling, &parts(&plan));
            let time = makespan(lengths(&plan), tiling.target_items, tiling.item_overhead_tokens);
            let ratio = time as f64 / ideal(&lens, tiles, &tiling);
            assert!(ratio < 1.11, "{count} of seed {seed}, {blocks} x {tiles}: {ratio}");
        }
    }
}

/// A few long sequences among many short ones, of which there are enough to fill the device.
fn long_sequences_are_cut_though_there_are_many() {
    let lens = [vec![200; 300], vec![100_000; 2]].concat();
    let tiling = h200(1);
    let plan = plan(&lens, 16, &tiling);
    assert!(!check(&runs(&lens, 1), &tiling, &parts(&plan)));
    assert!(*lengths(&plan).iter().max().unwrap() < 2500);
}

/// A single sequence leaves multiprocessors free for its merge: that was measured to be faster on an H200.
fn a_single_sequence_leaves_a_part_of_the_device_free() {
    let items_of = |lens: &[i32], tiling: &Tiling| {
        let lengths = lengths(&plan(lens, 16, tiling));
        (lengths.len(), *lengths.iter().max().unwrap())
    };
    let tiling = h200(2);
    assert_eq!(items_of(&[131_072], &tiling), (131, 1008));
    assert_eq!(items_of(&[8192; 64], &tiling), (256, 2048));
    assert_eq!(items_of(&[4096], &tiling), (64, 64));
    let all = Tiling { single_sequence_items: 0, ..tiling };
    assert_eq!(items_of(&[131_072], &all), (256, 512));
    assert_eq!(items_of(&[131_072], &h200(1)), (88, 1504));
    assert_eq!(items_of(&[32_768], &h200(1)), (86, 384));
    assert_eq!(items_of(&[8192; 64], &h200(1)), (128, 4096));
    let lens = draws(1, 64, 16_384.0);
    assert_eq!(items_of(&lens, &tiling), items_of(&lens, &all));
}

crate::tests![
    uniform_batches_are_cut_into_equal_shares,
    ragged_batches_wait_for_no_longest_item,
    long_sequences_are_cut_though_there_are_many,
    a_single_sequence_leaves_a_part_of_the_device_free,
];
