//! Whether decodes attend a prefix that they share through its expanded keys and values, or each through the cache in absorbed form. Pure.
//!
//! Costs are in the time that one query row of an absorbed tile takes for one token of the cache. Expanded, each head reads `P + V` elements of its own a token, however few the queries are; many queries cost
//! multiplications. A step over expanded prefixes has more dispatches, and a merge.
//! The numbers are of an H100, and of lavapipe for devices without tensor cores: benches/results/h100-cascade-2026-11-25.md.

use super::{ExpandedPrefix, MlaLayer};
use crate::Tiling;

/// Of the shape that the costs were measured with: elements of a token's key and value in one head, and multiplications of an absorbed row.
const EXPANDED_ELEMENTS: u64 = 128 + 128;
const ABSORBED_ELEMENTS: u64 = 2 * 512 + 64;
/// `Q K^T` and `P V` of a query token over an expanded key, in absorbed rows: less than half.
const EXPANDED_ROW: [u64; 2] = [2, 5];

/// A device's costs of attending an expanded prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixCost {
    /// Rows of arithmetic that an absorbed tile takes at most, however many it has.
    tile_rows: u64,
    /// And for reading the token: on tensor cores, where that is not hidden by arithmetic.
    read: u64,
    /// A token of one head.
    token: u64,
    /// Query tokens of a tile of the expanded attention, whose missing ones are multiplied too.
    tile_queries: u64,
    /// What a step has more: its dispatches, and for each query row what is written and merged.
    step: u64,
    step_row: u64,
}

impl PrefixCost {
    /// Expanded prefixes always pay. On the CPU, which multiplies no missing rows, they take less than half of the arithmetic.
    pub(super) const NONE: Self =
        Self { tile_rows: u64::MAX, read: 0, token: 0, tile_queries: 1, step: 0, step_row: 0 };
    /// Tensor cores through CUDA. `wgmma` multiplies 64 rows in the time of 36.
    #[cfg(feature = "cuda")]
    pub(super) const CUDA: Self =
        Self { tile_rows: 36, read: 16, token: 60, tile_queries: 1, step: 4_000_000, step_row: 400 };
    /// Cooperative matrices through Vulkan.
    #[cfg(feature = "wgpu")]
    pub(super) const MATRICES: Self =
        Self { tile_rows: u64::MAX, read: 16, token: 32, tile_queries: 1, step: 8_000_000, step_row: 1000 };

    /// With tiles of so many query tokens.
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    pub(super) const fn with_tiles(self, tile_queries: u32) -> Self {
        Self { tile_queries: if tile_queries == 0 { 1 } else { tile_queries as u64 }, ..self }
    }

    /// Whether decodes, of so many query tokens each, of sequences that begin with a prefix of `tokens` tokens are faster over the expanded
    /// prefix. `shares`: in absorbed form tiles may have query rows of several sequences.
    pub(super) fn pays(
        &self,
        spec: &MlaLayer,
        tiling: &Tiling,
        tokens: u32,
        query_tokens: impl Iterator<Item = u32>,
        shares: bool,
    ) -> bool {
        let (shape, tokens) = (&spec.shape, u64::from(tokens));
        let (heads, rows) = (u64::from(shape.num_heads), u64::from(tiling.rows_per_tile.max(1)));
        let (mut queries, mut tiles) = (0, 0);
        for query_tokens in query_tokens.map(u64::from) {
            queries += query_tokens;
            tiles += (query_tokens * heads).div_ceil(rows);
        }
        if shares {
            tiles = tiles.min((queries * heads).div_ceil(rows));
        }
        let elements = u64::from(2 * shape.kv_lora_rank + shape.qk_rope_head_dim);
        let mut absorbed =
            tokens * tiles * (rows.min(self.tile_rows) + self.read) * elements / ABSORBED_ELEMENTS;
        if spec.kv.dtype.is_fp8() {
            // Half the bytes: 0.6 of the time of bf16 through CUDA, 0.8 through Vulkan.
            absorbed = absorbed * 3 / 5;
        }
        let width = u64::from(spec.qk_nope_head_dim + spec.v_head_dim);
        let arithmetic = queries.next_multiple_of(self.tile_queries) * EXPANDED_ROW[0] / EXPANDED_ROW[1];
        let expanded = tokens * heads * self.token.max(arithmetic) * width / EXPANDED_ELEMENTS;
        absorbed > expanded + self.step + queries * heads * self.step_row
    }
}

/// Whether all of a prefix's sequences have the same pages for it, and those are in the pool.
pub(super) fn has_pages<'a>(
    spec: &MlaLayer,
    prefix: &ExpandedPrefix,
    row: impl Fn(u32) -> &'a [i32],
) -> bool {
    let pages = spec.kv.pages_for(prefix.tokens) as usize;
    let of = |sequence| row(sequence).get(..pages);
    let Some(first) = prefix.sequences.first().and_then(|&sequence| of(sequence)) else { return false };
    let in_pool = |&page: &i32| u32::try_from(page).is_ok_and(|page| page < spec.kv.num_pages);
    first.iter().all(in_pool) && prefix.sequences.iter().all(|&sequence| of(sequence) == Some(first))
}

#[cfg(all(test, feature = "cuda", feature = "wgpu"))]
mod tests {
    use super::*;
    use crate::{Dtype, KvSpec, LayerBatch, LayerPlan, MlaShape, PageTable, RopeLayout, SplitPolicy};

    /// The step of DeepSeek-V2-Lite's and of V3's heads over a shared prefix of 8192 tokens, by the number of sequences.
    fn pays(cost: &PrefixCost, heads: u32, rows_per_tile: u32, sequences: usize) -> bool {
        let spec = spec(heads, Dtype::F16);
        let tiling = tiling(rows_per_tile);
        cost.pays(&spec, &tiling, 8192, std::iter::repeat_n(1, sequences), true)
    }

    fn spec(num_heads: u32, cache: Dtype) -> MlaLayer {
        MlaLayer {
            shape: MlaShape { num_heads, kv_lora_rank: 512, qk_rope_head_dim: 64 },
            qk_nope_head_dim: 128,
            v_head_dim: 128,
            kv: KvSpec { dtype: cache, page_size: 64, num_pages: 8 },
            dtype: Dtype::F16,
            weight: Dtype::F16,
            rope: RopeLayout::Interleaved,
            decode_threshold: 1,
            workspace_bytes: 0,
        }
    }

    fn tiling(rows_per_tile: u32) -> Tiling {
        Tiling {
            rows_per_tile,
            tokens_per_block: 16,
            target_items: 132,
            min_split_tokens: 32,
            single_sequence_items: 0,
            item_overhead_tokens: 0,
        }
    }

    /// Of what was measured on an H100, each shape that gained is chosen, and none that lost.
    #[test]
    fn only_what_gains_is_chosen() {
        let (cuda, vulkan) = (&PrefixCost::CUDA, &PrefixCost::MATRICES);
        for cost in [cuda, vulkan] {
            assert!([8, 16, 24, 32].into_iter().all(|sequences| !pays(cost, 16, 16, sequences)));
            assert!([64, 128].into_iter().all(|sequences| pays(cost, 16, 16, sequences)));
            assert!([8, 16, 32].into_iter().all(|sequences| !pays(cost, 128, 64, sequences)));
            assert!(pays(cost, 128, 64, 256));
        }
        assert!(pays(cuda, 16, 16, 48));
        // Short prefixes do not pay for a step's dispatches.
        assert!(!cuda.pays(&spec(16, Dtype::F16), &tiling(16), 512, std::iter::repeat_n(1, 128), true));
    }

    #[test]
    fn without_tensor_cores_arithmetic_decides() {
        for heads in [1, 16, 128] {
            for rows in [1, 8, 16] {
                assert!(pays(&PrefixCost::NONE, heads, rows, 1), "{heads} heads, {rows} rows");
                // Tiles of 64 query tokens: lavapipe's 8 sequences took 2.4 times as long as absorbed.
                let tiles = PrefixCost::NONE.with_tiles(64);
                assert!(!pays(&tiles, heads, rows, 8) || rows > heads, "{heads} heads, {rows} rows");
                assert!(pays(&tiles, heads, rows, 64), "{heads} heads, {rows} rows");
            }
        }
    }

    #[test]
    fn pages_are_those_of_the_pool_and_the_same() {
        let prefix = ExpandedPrefix { sequences: vec![0, 1], tokens: 128, first_row: 0 };
        let has = |rows: [&[i32]; 2]| has_pages(&spec(16, Dtype::F16), &prefix, |seq| rows[seq as usize]);
        assert!(has([&[3, 1, 0], &[3, 1]]));
        assert!(!has([&[3, 1, 0], &[3, 2]]));
        assert!(!has([&[3], &[3]]));
        assert!(!has([&[3, -1], &[3, -1]]) && !has([&[3, 8], &[3, 8]]));
    }

    /// Two sequences of 130 tokens whose first two pages are a prefix: what each way to plan leaves to the absorbed decode.
    #[test]
    fn what_does_not_pay_is_planned_in_absorbed_form() {
        let spec = spec(16, Dtype::F16);
        let prefix = [ExpandedPrefix { sequences: vec![0, 1], tokens: 128, first_row: 0 }];
        let visible = |cost, policy, block_table: &[i32]| {
            let batch = LayerBatch {
                seq_lens: &[130, 130],
                query_start_loc: &[0, 1, 2],
                slot_mapping: &[-1, -1],
                pages: PageTable::Dense { block_table, max_pages: 3 },
                shared_prefixes: &[],
                expanded: &prefix,
            };
            let plan = LayerPlan::by_cost(&spec, &tiling(32), &batch, policy, 0, cost).expect("a plan");
            let visible: Vec<u32> = plan.decode.queries.iter().map(|query| query.visible).collect();
            assert_eq!(plan.over_prefixes.is_empty(), visible.contains(&130), "either expanded or absorbed");
            visible
        };
        let (same, cuda) = (&[3, 1, 0, 3, 1, 2], Some(&PrefixCost::CUDA));
        // A tile of 32 query rows holds those of both sequences: one run over the prefix, and each sequence's own.
        assert_eq!(visible(cuda, SplitPolicy::Auto, same), [130; 4]);
        assert_eq!(visible(cuda, SplitPolicy::OneSplit, same), [130; 2]);
        assert_eq!(visible(cuda, SplitPolicy::FixedTokens(16), same), [2; 2]);
        assert_eq!(visible(Some(&PrefixCost::NONE), SplitPolicy::Auto, same), [2; 2]);
        assert_eq!(visible(None, SplitPolicy::Auto, same), [2; 2]);
        // The prefix has no pages any more.
        assert_eq!(visible(cuda, SplitPolicy::Auto, &[-1, -1, 0, -1, -1, 2]), [2; 2]);
    }
}
