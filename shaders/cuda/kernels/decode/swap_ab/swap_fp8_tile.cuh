// The tile of mla_decode_swap_fp8.cuh: its parameters and its layout of shared memory.
#pragma once

#include "decode/decode_tile.cuh"
#include "lib/wgmma.cuh"

using PlainCodes = Plain<512, 64, E4M3>;

template <int ROWS_, class Layout_ = PlainCodes>
struct SwapFp8Tile {
    using Layout = Layout_;
    static constexpr Dtype CACHE = E4M3;
    static constexpr bool IS_RECORD = Layout::IS_RECORD;
    static constexpr int LATENT = 512, DIM = Layout::DIM, ROWS = ROWS_, TOKENS = 64, PARTS = 1;
    static constexpr int WARPGROUPS = ROWS == 16 ? 4 : 2; // that multiply
    static constexpr int WARPS = 4 * WARPGROUPS, LOADERS = 4, THREADS = (WARPS + LOADERS) * LANES; // warps that multiply; warps that load
    static constexpr int REGISTERS = ROWS == 16 ? 112 : 240, LOADER_REGISTERS = 24; // of a thread
    static constexpr int GROUPS = DIM / 64; // of 64 codes: 8 of the latent, 1 of rope
    static constexpr int AT_ONCE = IS_RECORD && ROWS == 64 ? 2 : 4; // wgmma of a commit group, whose operands are registers
    static constexpr int ROW_TILES = ROWS / 8, COLUMN_TILES = LATENT / WARPGROUPS / 64; // wgmma tiles of a warpgroup's accumulators
    static constexpr int AHEAD = ROWS == 32 ? GROUPS : 1; // groups whose codes are loaded before the first is converted: as many as registers allow
    static constexpr bool IS_READ_ONCE = ROWS < 64; // most batches have one tile of query rows then, so a token is read once: evict_first
    static constexpr int QUERY_BYTES = DIM * 2, STAGED_ROWS = ROWS, QUERY_BATCH = ROWS == 16 ? 1 : 2;
    using CodesOrder = typename Either<IS_RECORD, RecordOrder<Layout::ELEMENTS>, BoxOrder<576>>::Type; // layout of a stage
    using QueryOrder = GroupOrder<ROWS>;
    static constexpr int STAGES = ROWS == 64 ? 3 : ROWS == 32 || IS_RECORD ? 4 : 5, STAGE_BYTES = TOKENS * Layout::ELEMENTS;
    // An owner issues the scores of its tile before it adds the values of the tile LEAD before it. So LEAD + 1 stages are used while the
    // others are loaded: one of three for 64 rows, else two.
    static constexpr int LEAD = ROWS == 16 ? STAGES - 3 : 1;
    static constexpr int STAGES_AT = 0;
    // Weights of each warpgroup's last TURNS tiles in f16: [WARPGROUPS * TURNS * ROWS / 64, TOKENS, 128 bytes], of which a tile has ROWS *
    // 2 a token. One would do for two warpgroups, of which each adds the other's tile before it gives the next weights, and records need
    // the room.
    static constexpr int TURNS = IS_RECORD && WARPGROUPS == 2 ? 1 : 2;
    static constexpr int WEIGHTS_AT = STAGES_AT + STAGES * STAGE_BYTES, WEIGHTS_BYTES = WARPGROUPS * TURNS * ROWS / 64 * TOKENS * 128;
    DEVICE static u32 weights_of(u32 tile) {
        const u32 at = tile % (TURNS * WARPGROUPS) * (ROWS * 2);
        return at / 128 * (TOKENS * 128) + at % 128;
    }
    static constexpr int QUERIES_AT = WEIGHTS_AT + WEIGHTS_BYTES;
    static constexpr int MAXIMA_AT = QUERIES_AT + ROWS * QUERY_BYTES; // [WARPS, ROWS] maxima; row sums at the end
    static constexpr int FACTORS_AT = MAXIMA_AT + WARPS * ROWS * 4; // [WARPGROUPS, ROWS] by which a warpgroup's last tile rescales what was summed before
    static constexpr int TOPS_AT = FACTORS_AT + WARPGROUPS * ROWS * 4; // [ROWS] running maxima; [2, ROWS] row sums at the end
    static constexpr int SCALES_AT = TOPS_AT + 2 * ROWS * 4; // [ROWS]; running maxima at the end
    static constexpr int SEEN_AT = SCALES_AT + ROWS * 4; // [ROWS]
    // mbarriers, of 8 bytes.
    static constexpr int FULL_AT = SEEN_AT + ROWS * 4; // [STAGES]
    static constexpr int EMPTY_AT = FULL_AT + STAGES * 8; // [STAGES]
    static constexpr int GIVEN_AT = EMPTY_AT + STAGES * 8; // [WARPGROUPS]
    static constexpr int MOVED_AT = GIVEN_AT + WARPGROUPS * 8; // [WARPGROUPS] whether a warpgroup's last tile moved some running maximum
    static constexpr int NON_FINITE_AT = MOVED_AT + WARPGROUPS * 4; // whether some element of the output is NaN or infinite
    static constexpr int ENTRIES_AT = NON_FINITE_AT + 8; // [STAGES, TOKENS] entries of lists
    // Scales of records in f16, by which values are multiplied: [WARPGROUPS, 2 tiles, SCALE_GROUPS, TOKENS], in the order of operands.
    static constexpr int SCALE_GROUPS = LATENT / WARPGROUPS / 128, TABLE_BYTES = SCALE_GROUPS * TOKENS * 2;
    static constexpr int TABLES_AT = (ENTRIES_AT + STAGES * TOKENS * 4 + 15) / 16 * 16;
    static constexpr int SHARED_BYTES = TABLES_AT + (IS_RECORD ? WARPGROUPS * 2 * TABLE_BYTES : 0);
    // The output is staged where codes, weights and queries were, [ROWS, OUTPUT_PITCH]: the pitch avoids bank conflicts between a warp's
    // rows.
    static constexpr int OUTPUT_PITCH = LATENT + 4;
    static_assert(ROWS * OUTPUT_PITCH * 4 <= MAXIMA_AT && SHARED_BYTES <= 232448, "fits");
};
