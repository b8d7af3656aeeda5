//! Whether decodes attend a prefix that they share through its expanded keys and values, or each through the cache in absorbed form. Pure.
//!
//! The unit of cost is the time that an absorbed decode takes for one query row and one token of the cache. In expanded form each head
//! reads `P + V` elements of its own for each token, which dominates for few queries; for many, multiplications do. A step over expanded
//! prefixes also has more dispatches, and a merge.
//!
//! A device says what these cost it: [`PrefixCost`].

use super::MlaLayer;
use crate::ops::composes::PrefixCost;
use crate::plan::Tiling;

/// The costs were measured at this shape: `P + V`, the elements of a token's expanded key and value in one head, and `2 * L + R`, the
/// multiplications of one absorbed query row and one token.
const EXPANDED_ELEMENTS: f64 = 128.0 + 128.0;
const ABSORBED_ELEMENTS: f64 = 2.0 * 512.0 + 64.0;
/// The cost of one query row over one expanded token, `Q K^T` and `P V`, where a row in absorbed form costs 1.
const EXPANDED_ROW: f64 = 0.4;
/// The time to read an FP8 cache over that of a bf16 cache, for half the bytes: 0.6 was measured through CUDA, 0.8 through Vulkan.
const FP8_CACHE: f64 = 0.6;

/// Whether decodes of sequences that begin with a prefix of `tokens` tokens are faster over the expanded prefix. `decodes`: how many of
/// them have how many query tokens. `shares`: in absorbed form tiles may have query rows of several sequences.
pub(super) fn pays(
    cost: &PrefixCost,
    spec: &MlaLayer,
    tiling: &Tiling,
    tokens: u32,
    decodes: impl Iterator<Item = (u32, u32)>,
    shares: bool,
) -> bool {
    // In floating point, which no size overflows.
    let (shape, rows) = (&spec.shape, f64::from(tiling.rows_per_tile.max(1)));
    let (heads, tokens) = (f64::from(shape.num_heads), f64::from(tokens));
    let (mut queries, mut tiles) = (0.0, 0.0);
    for (sequences, query_tokens) in decodes.map(|(a, b)| (f64::from(a), f64::from(b))) {
        queries += sequences * query_tokens;
        tiles += sequences * (query_tokens * heads / rows).ceil();
    }
    if shares {
        tiles = tiles.min((queries * heads / rows).ceil());
    }
    let row = rows.min(cost.tile_rows.into()) + f64::from(cost.read);
    let elements = 2.0 * f64::from(shape.kv_lora_rank) + f64::from(shape.qk_rope_head_dim);
    let of_dtype = if spec.kv.dtype().is_fp8() { FP8_CACHE } else { 1.0 };
    let absorbed = tokens * tiles * row * elements / ABSORBED_ELEMENTS * of_dtype;

    let tile = f64::from(cost.tile_queries);
    let arithmetic = (queries / tile).ceil() * tile * EXPANDED_ROW;
    let width = f64::from(spec.qk_nope_head_dim) + f64::from(spec.v_head_dim);
    let expanded = tokens * heads * arithmetic.max(cost.token.into()) * width / EXPANDED_ELEMENTS;
    absorbed > expanded + f64::from(cost.step) + queries * heads * f64::from(cost.step_row)
}

#[cfg(all(test, feature = "cuda", feature = "wgpu"))]
pub(super) mod tests {
    use super::*;
    use crate::base::dtype::Dtype;
    use crate::cache::{KvSpec, MlaShape};
    use crate::cuda::layer::TENSOR_CORES;
    use crate::gpu::layer::MATRICES;
    use crate::ops::RopeLayout;

    /// The step of DeepSeek-V2-Lite's and of V3's heads over a shared prefix of 8192 tokens, by the number of sequences.
    fn pays(cost: &PrefixCost, heads: u32, rows_per_tile: u32, sequences: u32) -> bool {
        let spec = spec(heads, Dtype::F16);
        let tiling = tiling(rows_per_tile);
        super::pays(cost, &spec, &tiling, 8192, [(sequences, 1)].into_iter(), true)
    }

    pub fn spec(num_heads: u32, cache: Dtype) -> MlaLayer {
        MlaLayer {
            shape: MlaShape { num_heads, kv_lora_rank: 512, qk_rope_head_dim: 64 },
            qk_nope_head_dim: 128,
            v_head_dim: 128,
            kv: KvSpec { layout: cache.into(), page_size: 64, num_pages: 8 },
            dtype: Dtype::F16,
            query: Dtype::F16,
            weight: Dtype::F16,
            out: Dtype::F16,
            rope: RopeLayout::Interleaved,
            decode_threshold: 1,
            workspace_bytes: 0,
        }
    }

    pub fn tiling(rows_per_tile: u32) -> Tiling {
        Tiling {
            rows_per_tile,
            tokens_per_block: 16,
            target_items: 132,
            min_split_tokens: 32,
            single_sequence_items: 0,
            item_overhead_tokens: 0,
        }
    }

    /// Every shape that was faster expanded when measured on an H100 is chosen, and none that was slower.
    #[test]
    fn only_what_gains_is_chosen() {
        let (cuda, vulkan) = (&TENSOR_CORES, &MATRICES);
        for cost in [cuda, vulkan] {
            assert!([8, 16, 24, 32].into_iter().all(|sequences| !pays(cost, 16, 16, sequences)));
            assert!([48, 64, 128].into_iter().all(|sequences| pays(cost, 16, 16, sequences)));
            assert!([8, 16].into_iter().all(|sequences| !pays(cost, 128, 64, sequences)));
            assert!(pays(cost, 128, 64, 256));
        }
        assert!(pays(vulkan, 128, 64, 32) && !pays(cuda, 128, 64, 32));
        // Short prefixes do not pay for a step's dispatches.
        for (sequences, tokens) in [(128, 512), (64, 2048), (128, 2048), (256, 1024)] {
            let decodes = [(sequences, 1)].into_iter();
            assert!(!super::pays(vulkan, &spec(16, Dtype::F16), &tiling(16), tokens, decodes, true));
        }
        assert!(!super::pays(cuda, &spec(16, Dtype::F16), &tiling(16), 512, [(128, 1)].into_iter(), true));
    }

    #[test]
    fn no_size_overflows() {
        let most = u32::MAX;
        let mut spec = spec(most, Dtype::E4m3);
        spec.shape = MlaShape { kv_lora_rank: most, qk_rope_head_dim: most, ..spec.shape };
        (spec.qk_nope_head_dim, spec.v_head_dim) = (most, most);
        for cost in [TENSOR_CORES, MATRICES, PrefixCost::ARITHMETIC.with_tiles(most)] {
            for tokens in [0, 1, most] {
                super::pays(&cost, &spec, &tiling(0), tokens, [(most, most), (0, 0)].into_iter(), true);
            }
        }
    }

    #[test]
    fn without_tensor_cores_arithmetic_decides() {
        for heads in [1, 16, 128] {
            for rows in [1, 8, 16] {
                assert!(pays(&PrefixCost::ARITHMETIC, heads, rows, 1), "{heads} heads, {rows} rows");
                // Tiles of 64 query tokens: lavapipe's 8 sequences took 2.4 times as long as absorbed.
                let tiles = PrefixCost::ARITHMETIC.with_tiles(64);
                assert!(!pays(&tiles, heads, rows, 8) || rows > heads, "{heads} heads, {rows} rows");
                assert!(pays(&tiles, heads, rows, 64), "{heads} heads, {rows} rows");
            }
        }
    }
}
