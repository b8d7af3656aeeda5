// The tile of mla_decode_wgmma_fp8.cuh: its parameters and its layout of shared memory.
#pragma once

#include "decode/decode_tile.cuh"
#include "lib/wgmma.cuh"

// The layout that wgmma descriptors with 64-byte swizzling describe: [groups of 64 codes, ROWS, 64 bytes]. A TMA box of ROWS rows has it.
template <int ROWS>
struct CodeOrder {
    static constexpr int GROUP_BYTES = ROWS * 64;
    DEVICE static u32 at(u32 row, u32 chunk) { return chunk / 4 * GROUP_BYTES + Swizzle<64>::at(row, chunk % 4); }
};

struct Fp8Tile {
    static constexpr Dtype CACHE = E4M3;
    static constexpr int LATENT = 512, DIM = 576, ROWS = 64, TOKENS = 64, PARTS = 1;
    static constexpr int WARPS = 8, LOADERS = 4, THREADS = (WARPS + LOADERS) * LANES; // warps that multiply; warps that load and convert
    static constexpr int REGISTERS = 232, LOADER_REGISTERS = 40; // of a thread
    static constexpr int GROUPS = DIM / 64; // of 64 columns: 8 of the latent, 1 of rope
    // wgmma of a score, of k = 32 each. The tensor cores keep about 14 bits of a sum of FP8 products, which loses most where later products are
    // added to it. So each begins at 0, and f32 additions sum them: 273 us where three groups at a time take 261, but are off by up to 1.9 of the
    // allowed (benches/results/h100-decode-128-heads-2026-11-25.md).
    static constexpr int STEPS = DIM / 32;
    static constexpr int QUARTERS = 4; // of the latent, of two groups each: two are of the output's half that a warpgroup has
    static constexpr int TOKEN_TILES = TOKENS / 8, QUARTER_TILES = LATENT / QUARTERS / 8; // wgmma tiles of a warpgroup's scores, of a quarter of the output
    using CodesOrder = CodeOrder<TOKENS>; // layout of a stage of codes
    using QueryOrder = CodeOrder<ROWS>; // of the queries
    using Order = GroupOrder<TOKENS>; // of values in f16
    static constexpr int QUERIES_AT = 0;
    static constexpr int STAGES = 3, STAGE_BYTES = TOKENS * DIM; // of codes
    static constexpr int STAGES_AT = ROWS * DIM;
    static constexpr int VALUES_AT = STAGES_AT + STAGES * STAGE_BYTES, VALUES_BYTES = TOKENS * LATENT * 2; // of one tile
    static constexpr int WEIGHTS_AT = VALUES_AT + VALUES_BYTES, WEIGHTS_BYTES = WARPS / 2 * 4 * LANES * 16; // [2, WARPS / 2, 4, LANES, 4 words]
    static constexpr int TOPS_AT = WEIGHTS_AT + 2 * WEIGHTS_BYTES; // [2, ROWS] running maxima of a warpgroup's last tile; row sums at the end
    static constexpr int SCALES_AT = TOPS_AT + 2 * ROWS * 4; // [ROWS]; running maxima at the end
    // mbarriers, of 8 bytes.
    static constexpr int FULL_AT = SCALES_AT + ROWS * 4; // [STAGES]
    static constexpr int EMPTY_AT = FULL_AT + STAGES * 8; // [STAGES]
    static constexpr int FILLED_AT = EMPTY_AT + STAGES * 8; // [QUARTERS]
    static constexpr int FREED_AT = FILLED_AT + QUARTERS * 8; // [QUARTERS]
    static constexpr int GIVEN_AT = FREED_AT + QUARTERS * 8; // [WARPS]
    static constexpr int NON_FINITE_AT = GIVEN_AT + WARPS * 8; // whether some element of the output is NaN or infinite
    static constexpr int SHARED_BYTES = NON_FINITE_AT + 8;
    // The output is staged where codes and values were, [ROWS, OUTPUT_PITCH]: the pitch avoids bank conflicts between a warp's rows.
    static constexpr int OUTPUT_PITCH = LATENT + 8;
    static_assert(ROWS * OUTPUT_PITCH * 4 <= STAGES * STAGE_BYTES + VALUES_BYTES && SHARED_BYTES <= 232448, "fits");
};
