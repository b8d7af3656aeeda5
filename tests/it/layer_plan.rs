//! Property tests of the plan of a whole layer: it is executed on sets of keys, not on numbers.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use wgpu_mla::layer::Target;
use wgpu_mla::{
    Dtype, Error, GatherRange, KvSpec, LayerBatch, LayerPlan, Mask, MlaLayer, MlaShape, PageTable,
    PrefillSequence, RopeLayout, SharedPrefix, SplitPolicy, Tiling,
};

const TILING: Tiling = Tiling {
    rows_per_tile: 8,
    tokens_per_block: 16,
    target_items: 12,
    min_split_tokens: 16,
    single_sequence_items: 0,
    item_overhead_tokens: 0,
};

fn spec(page_size: u32, workspace_rows: u32, decode_threshold: u32) -> MlaLayer {
    let spec = MlaLayer {
        shape: MlaShape { num_heads: 2, kv_lora_rank: 256, qk_rope_head_dim: 32 },
        qk_nope_head_dim: 16,
        v_head_dim: 24,
        kv: KvSpec { layout: Dtype::F16.into(), page_size, num_pages: 4096 },
        dtype: Dtype::F32,
        query: Dtype::F32,
        weight: Dtype::F32,
        out: Dtype::F32,
        rope: RopeLayout::Interleaved,
        decode_threshold,
        workspace_bytes: 0,
    };
    // A few bytes more than whole rows.
    MlaLayer { workspace_bytes: u64::from(workspace_rows) * spec.workspace_row_bytes() + 7, ..spec }
}

/// `(seq_len, q_len)` as arrays; a sequence has a row of pages of its own.
struct Arrays {
    seq_lens: Vec<i32>,
    query_start_loc: Vec<i32>,
    slot_mapping: Vec<i64>,
    block_table: Vec<i32>,
}

const MAX_PAGES: usize = 128;

impl Arrays {
    fn new(sequences: &[(u32, u32)]) -> Self {
        let mut query_start_loc = vec![0];
        for (_, q_len) in sequences {
            query_start_loc.push(query_start_loc[query_start_loc.len() - 1] + *q_len as i32);
        }
        let tokens = query_start_loc[query_start_loc.len() - 1] as usize;
        Self {
            seq_lens: sequences.iter().map(|&(len, _)| len as i32).collect(),
            query_start_loc,
            slot_mapping: vec![-1; tokens],
            block_table: (0..(sequences.len() * MAX_PAGES) as i32).collect(),
        }
    }

    fn batch(&self) -> LayerBatch<'_> {
        LayerBatch {
            seq_lens: &self.seq_lens,
            query_start_loc: &self.query_start_loc,
            slot_mapping: &self.slot_mapping,
            pages: PageTable::Dense { block_table: &self.block_table, max_pages: MAX_PAGES as u32 },
            shared_prefixes: &[],
            expanded: &[],
        }
    }
}

/// A key: `(sequence, position)`.
type Keys = BTreeSet<(u32, u32)>;

/// The keys that each query token has attended, in each `Target`.
struct State {
    out: Vec<Keys>,
    other: Vec<Keys>,
    partial: Vec<Option<Keys>>,
}

impl State {
    fn place(&mut self, target: Target) -> &mut Vec<Keys> {
        if target == Target::Out { &mut self.out } else { &mut self.other }
    }
}

fn attended(rows: &[(u32, u32)], sequence: &PrefillSequence, i: u32) -> Keys {
    let visible = match sequence.mask {
        Mask::CausalFrom(first) => (first + i64::from(i)).clamp(0, sequence.kv_len.into()) as u32,
        _ => sequence.kv_len,
    };
    let begin = sequence.kv_begin as usize;
    rows[begin..begin + visible as usize].iter().copied().collect()
}

/// Runs the chunks of a plan on sets; panics where a key would be attended twice.
fn run(plan: &LayerPlan, room: u32) -> Vec<Keys> {
    let tokens = plan.positions.len();
    // An unexpected key is found by the comparison at the end.
    let wild: Keys = [(u32::MAX, 0)].into();
    let mut state =
        State { out: vec![wild.clone(); tokens], other: vec![wild; tokens], partial: vec![None; tokens] };
    for chunk in &plan.chunks {
        let mut rows = vec![(u32::MAX, 1); chunk.rows as usize];
        assert!(chunk.rows <= room, "a chunk of {} rows in {room}", chunk.rows);
        for range in &chunk.ranges {
            for i in 0..range.tokens {
                rows[(range.out_row + i) as usize] = (range.sequence, range.begin + i);
            }
        }
        for round in &chunk.rounds {
            for sequence in &round.first {
                for i in 0..sequence.q_len {
                    let token = (sequence.q_begin + i) as usize;
                    state.place(round.state)[token] = attended(&rows, sequence, i);
                }
            }
            state.partial.fill(None);
            for sequence in &round.more {
                for i in 0..sequence.q_len {
                    let partial = &mut state.partial[(sequence.q_begin + i) as usize];
                    assert!(partial.is_none(), "two attentions write one partial result");
                    *partial = Some(attended(&rows, sequence, i));
                }
            }
            if !round.more.is_empty() {
                for token in 0..tokens {
                    let before = state.place(round.state)[token].clone();
                    let Some(partial) = state.partial[token].clone() else { continue };
                    assert!(before.is_disjoint(&partial), "a key is attended twice");
                    state.place(other(round.state))[token] = before.union(&partial).copied().collect();
                }
            }
        }
    }
    state.out
}

fn other(target: Target) -> Target {
    if target == Target::Out { Target::Other } else { Target::Out }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, rng_seed: RngSeed::Fixed(3), ..ProptestConfig::default() })]

    fn every_token_attends_every_key_that_it_sees_once(
        sequences in proptest::collection::vec((0u32..120, 0u32..40), 0..7),
        page_size in prop::sample::select(vec![1u32, 3, 16]),
        extra_rows in 0u32..90,
        threshold in 0u32..4,
        fixed in prop::option::of(1u32..50),
    ) {
        let sequences: Vec<_> = sequences.into_iter().map(|(len, q_len)| (len, q_len.min(len))).collect();
        let policy = fixed.map_or(SplitPolicy::Auto, SplitPolicy::FixedTokens);
        let rows = extra_rows + page_size.max(fixed.unwrap_or(0));
        let spec = spec(page_size, rows, threshold);
        let arrays = Arrays::new(&sequences);
        let plan = LayerPlan::new(&spec, &TILING, &arrays.batch(), policy).expect("a plan");
        let got = run(&plan, rows);

        let mut token = 0;
        for (sequence, &(len, q_len)) in (0..).zip(&sequences) {
            for i in 0..q_len {
                let position = len - q_len + i;
                prop_assert_eq!(plan.positions[token], position as i32);
                let decoded = plan.decoded.iter().any(|run| run.contains(&(token as u32)));
                prop_assert_eq!(decoded, q_len <= threshold);
                if decoded {
                    let queries: Vec<_> =
                        plan.decode.queries.iter().filter(|query| query.token == token as u32).collect();
                    prop_assert_eq!(queries.len(), 1);
                    prop_assert_eq!(queries[0].visible, position + 1);
                } else {
                    let want: Keys = (0..=position).map(|key| (sequence, key)).collect();
                    prop_assert_eq!(&got[token], &want, "token {} of sequence {}", i, sequence);
                }
                token += 1;
            }
        }
        prop_assert_eq!(plan.decode.num_queries, plan.decoded.last().map_or(0, |run| run.end));
    }

    /// What is attended at once, and the order in which it is merged, is the same whatever the workspace holds.
    fn splits_of_a_fixed_length_do_not_depend_on_the_workspace(
        sequences in proptest::collection::vec((20u32..150, 5u32..20), 1..5),
        split in 1u32..40,
        rooms in (0u32..200, 0u32..200),
    ) {
        let arrays = Arrays::new(&sequences);
        let attended = |room: u32| {
            let spec = spec(16, room + split, 1);
            let plan = LayerPlan::new(&spec, &TILING, &arrays.batch(), SplitPolicy::FixedTokens(split)).expect("a plan");
            let mut lists = vec![Vec::new(); sequences.len()];
            for chunk in &plan.chunks {
                for round in &chunk.rounds {
                    for part in round.first.iter().chain(&round.more).filter(|part| part.kv_len > 0) {
                        let inside = |range: &&GatherRange| {
                            (range.out_row..range.out_row + range.tokens).contains(&part.kv_begin)
                        };
                        let range = chunk.ranges.iter().find(inside).expect("rows that were gathered");
                        let begin = range.begin + part.kv_begin - range.out_row;
                        lists[range.sequence as usize].push((begin, part.kv_len));
                    }
                }
            }
            lists
        };
        prop_assert_eq!(attended(rooms.0), attended(rooms.1));
    }
}

fn wrong_batches_are_errors() {
    let arrays = Arrays::new(&[(40, 20), (30, 1)]);
    let plan = |spec: &MlaLayer, batch: &LayerBatch<'_>, policy| LayerPlan::new(spec, &TILING, batch, policy);
    let good = spec(16, 16, 1);
    assert!(plan(&good, &arrays.batch(), SplitPolicy::Auto).is_ok());

    let small = plan(&spec(16, 15, 1), &arrays.batch(), SplitPolicy::Auto);
    assert!(matches!(small, Err(Error::Shape { what: "workspace_bytes", .. })), "{small:?}");
    let split = plan(&good, &arrays.batch(), SplitPolicy::FixedTokens(17));
    assert!(matches!(split, Err(Error::Shape { what: "workspace_bytes", .. })), "{split:?}");
    let slots = plan(&good, &LayerBatch { slot_mapping: &[-1; 20], ..arrays.batch() }, SplitPolicy::Auto);
    assert!(matches!(slots, Err(Error::Length { what: "slot_mapping", got: 20, want: 21, .. })), "{slots:?}");
    let table = PageTable::Dense { block_table: &arrays.block_table, max_pages: 3 };
    let table = plan(&good, &LayerBatch { pages: table, ..arrays.batch() }, SplitPolicy::Auto);
    assert!(matches!(table, Err(Error::Length { what: "block_table", .. })), "{table:?}");
    let device = plan(&good, &LayerBatch { pages: PageTable::Device, ..arrays.batch() }, SplitPolicy::Auto);
    assert!(matches!(device, Err(Error::LayoutMismatch { .. })), "{device:?}");
    let short = plan(&good, &LayerBatch { seq_lens: &[19, 30], ..arrays.batch() }, SplitPolicy::Auto);
    let text = "sequence 0 has 20 query tokens and seq_lens[0] = 19: seq_lens counts the tokens in the cache, this step's included; correct it or query_start_loc";
    assert_eq!(short.map(drop).map_err(|error| error.to_string()), Err(text.to_owned()));
    let group = [SharedPrefix { sequences: vec![0, 2], tokens: 16 }];
    let group = plan(&good, &LayerBatch { shared_prefixes: &group, ..arrays.batch() }, SplitPolicy::Auto);
    assert!(matches!(group, Err(Error::Shape { what: "SharedPrefix sequence", got: 2, .. })), "{group:?}");
}

crate::tests![
    every_token_attends_every_key_that_it_sees_once,
    splits_of_a_fixed_length_do_not_depend_on_the_workspace,
    wrong_batches_are_errors,
];
