// The tile of mla_decode_wgmma.cuh: its parameters and its layout of shared memory.
#pragma once

#include "decode/decode_tile.cuh"
#include "lib/wgmma.cuh"

template <Dtype CACHE_>
struct GroupTile {
    static constexpr Dtype CACHE = CACHE_;
    using Layout = Plain<512, 64, CACHE>;
    static constexpr int LATENT = 512, DIM = 576, ROWS = 64, TOKENS = 64, STAGES = 2, PARTS = 1;
    static constexpr int WARPS = 8, LOADERS = 4, THREADS = (WARPS + LOADERS) * LANES; // warps that multiply; warps that load
    static constexpr int GROUPS = DIM / 64; // of 64 columns: 8 of the latent, 1 of rope
    static constexpr int EMPTIES = 5; // parts of a stage that are released one by one: quarters of the latent, of two groups each, and rope
    static constexpr int KEPT = 4; // steps of k = 16 of a dot product whose queries stay in registers: those of the first group
    static constexpr int FIRST_GROUPS = 5; // whose scores are issued before the other warpgroup's weights are waited for
    static constexpr int TOKEN_TILES = TOKENS / 8, QUARTER_TILES = LATENT / 4 / 8; // wgmma tiles of a warpgroup's scores, of a quarter of the output
    static constexpr int ROW_BYTES = DIM * 2, QUERY_BYTES = DIM * 2, STAGED_ROWS = ROWS, QUERY_BATCH = 2, STAGE_BYTES = TOKENS * ROW_BYTES;
    using Order = GroupOrder<TOKENS>; // layout of a stage
    using QueryOrder = GroupOrder<ROWS>;
    static constexpr int QUERIES_AT = 0, STAGES_AT = ROWS * QUERY_BYTES;
    // Weights of a warpgroup's tile, [WARPS / 2, 4, LANES, 4 words]. The first warpgroup's lie where the queries of KEPT were.
    static constexpr int WEIGHTS_AT = STAGES_AT + STAGES * STAGE_BYTES, WEIGHTS_BYTES = WARPS / 2 * 4 * LANES * 16;
    static constexpr int TOPS_AT = WEIGHTS_AT + WEIGHTS_BYTES; // [2, ROWS] running maxima of a warpgroup's last tile; row sums at the end
    static constexpr int SCALES_AT = TOPS_AT + 2 * ROWS * 4; // [ROWS]; running maxima at the end
    // mbarriers, of 8 bytes.
    static constexpr int FULL_AT = SCALES_AT + ROWS * 4; // [STAGES, GROUPS]
    static constexpr int EMPTY_AT = FULL_AT + STAGES * GROUPS * 8; // [STAGES, EMPTIES]
    static constexpr int GIVEN_AT = EMPTY_AT + STAGES * EMPTIES * 8; // [WARPS]
    static constexpr int NON_FINITE_AT = GIVEN_AT + WARPS * 8; // whether some element of the output is NaN or infinite
    static constexpr int ENTRIES_AT = NON_FINITE_AT + 8; // [STAGES, TOKENS] entries of lists
    static constexpr int SHARED_BYTES = ENTRIES_AT + STAGES * TOKENS * 4;
    // The output is staged where the cache was, [ROWS, OUTPUT_PITCH]: the pitch avoids bank conflicts between a warp's rows.
    static constexpr int OUTPUT_PITCH = LATENT + 8;
    static_assert(ROWS * OUTPUT_PITCH * 4 <= STAGES * STAGE_BYTES && WEIGHTS_BYTES <= ROWS * 128, "fits");

    // The order in which groups of columns are loaded and multiplied: rope, which is released first, then each warpgroup's first quarter,
    // then its second.
    DEVICE static constexpr int group_at(int i) { return i == 0 ? GROUPS - 1 : ((i - 1) / 2 % 2 * 2 + (i - 1) / 4) * 2 + (i - 1) % 2; }
};
