//! Tests of plans whose longer sequences attend lists.
#![allow(clippy::single_range_in_vec_init, reason = "lists of one run are what is compared")]

use super::lists::{Listing, Scores};
use super::{LayerBatch, LayerPlan, MlaLayer};
use crate::base::dtype::Dtype;
use crate::cache::{KvSpec, MlaShape};
use crate::ops::RopeLayout;
use crate::plan::tables::PageTable;
use crate::plan::{SplitPolicy, Tiling};

/// Sequences of 4 and 12 tokens, each decoded and prefilled; lists have 8.
#[test]
fn longer_sequences_attend_lists() {
    let kv = KvSpec { layout: Dtype::F32.into(), page_size: 4, num_pages: 12 };
    let layer = MlaLayer {
        shape: MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 },
        qk_nope_head_dim: 16,
        v_head_dim: 24,
        kv,
        dtype: Dtype::F32,
        query: Dtype::F32,
        weight: Dtype::F32,
        out: Dtype::F32,
        rope: RopeLayout::Interleaved,
        decode_threshold: 1,
        workspace_bytes: 1 << 16,
    };
    let tiling = Tiling {
        rows_per_tile: 16,
        tokens_per_block: 4,
        target_items: 1,
        min_split_tokens: 4,
        single_sequence_items: 0,
        item_overhead_tokens: 0,
    };
    let block_table: Vec<i32> = (0..12).collect();
    let batch = LayerBatch {
        seq_lens: &[4, 12, 12, 4],
        query_start_loc: &[0, 1, 2, 5, 7],
        slot_mapping: &[-1; 7],
        pages: PageTable::Dense { block_table: &block_table, max_pages: 3 },
        shared_prefixes: &[],
        expanded: &[],
    };
    let plan = |scores| {
        let listing = Listing { topk: 8, tiling, scores };
        LayerPlan::by_cost(&layer, &tiling, &batch, SplitPolicy::OneSplit, 0, (None, Some(&listing)))
    };
    let all = plan(Some(Scores { rows: 3, max_seq_len: 12 })).expect("a plan");
    assert_eq!((&all.decoded[..], &all.absorbed[..]), (&[0..1][..], &[0..5][..]));
    assert_eq!((&all.lists.tokens[..], &all.lists.rounds[..]), (&[1..5][..], &[1..4, 4..5][..]));
    let tokens: Vec<_> = all.lists.decode.queries.iter().map(|query| (query.token, query.visible)).collect();
    assert_eq!(tokens, [(1, 8), (2, 8), (3, 8), (4, 8)]);
    let prompts: Vec<_> = all.chunks[0].ranges.iter().map(|range| (range.sequence, range.tokens)).collect();
    assert_eq!(prompts, [(3, 4)]);
    assert_eq!((all.used().decode_tokens, all.used().listed_tokens), (5, 5));

    let shared = plan(None).expect("a plan");
    assert_eq!((&shared.lists.tokens[..], &shared.lists.rounds[..]), (&[1..5][..], &[][..]));
    let short = plan(Some(Scores { rows: 3, max_seq_len: 11 })).unwrap_err();
    assert!(short.to_string().contains("LayerIndexer::max_seq_len is 11, 12 are needed"), "{short}");
}
