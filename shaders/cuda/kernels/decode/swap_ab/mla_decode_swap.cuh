// Split-KV MLA decode in absorbed form by wgmma with swapped operands (swap AB): variants `wgmma_swap_ab_n16` and `_n32`, for compute
// capability 9.0 and 16 or 32 query rows. wgmma's M is 64, of which 16 or 32 query rows would leave most idle; as its N they fill it, and
// tokens or latent columns are M.
//
// Work items, tables and softmax as in mla_decode.cuh. Tile: ROWS query rows, looping over tiles of TOKENS = 64 tokens, two of them in
// shared memory. Warp specialisation: one warpgroup multiplies, 8 loader warps fetch 16 tokens of every second tile each. For each tile:
//   1. scores   S^T [tokens, query rows] = K Q^T, both operands from shared memory
//   2. softmax  with lazy rescaling (FlashAttention-4): weights relative to the running maxima are written while the warps vote on whether
//               one grew by more than LAZY; if so, maxima are exchanged, weights recomputed and the output rescaled
//   3. values   O^T [latent columns, query rows] += V^T P^T, weights double-buffered in shared memory. Each 16 tokens are released to their
//               loader as soon as they are multiplied
//
// Loads are 8-token TMA boxes, whose requests are contiguous, where pages allow them, else cp.async: the same bits. Tokens past the item's
// end are zeros and weigh 0. A row's bits do not depend on which rows share its block. An item with a logit that is NaN or infinite, masked
// or not, is done again in f32 (decode_f32.cuh). Measured on H200s: benches/results/h200-cuda7-2026-11-23.md, h200-cuda8-2026-11-23.md.
#pragma once

#define UNROLLED 1
#include "decode/decode_f32.cuh"
#include "decode/decode_queries.cuh"
#include "decode/unrolled_queries.cuh"
#include "swap_loader.cuh"
#include "swap_row_sums.cuh"
#include "lib/wgmma.cuh"

// The tile's parameters and shared-memory layout.
template <Dtype CACHE_, int ROWS_>
struct SwapTile {
    static constexpr Dtype CACHE = CACHE_;
    using Layout = Plain<512, 64, CACHE>;
    static constexpr int LATENT = 512, DIM = 576, ROWS = ROWS_, TOKENS = 64, PARTS = 1;
    static constexpr int PARTS_OF_TILE = TOKENS / 16;
    static constexpr int WARPS = 4, LOADERS = 2 * PARTS_OF_TILE, THREADS = (WARPS + LOADERS) * LANES; // warps that multiply; warps that load
    // Registers of a thread that multiplies; and the blocks of __launch_bounds__: two leave registers for a merge's blocks beside this one.
    static constexpr int REGISTERS = ROWS == 16 ? 128 : 216, BLOCKS = ROWS == 16 ? 2 : 1;
    static constexpr int STEPS = DIM / 16; // of k = 16, of a dot product
    static constexpr int ROW_TILES = ROWS / 8, COLUMN_TILES = LATENT / 64; // wgmma tiles of the accumulators
    static constexpr int QUERY_BYTES = DIM * 2, STAGED_ROWS = ROWS, QUERY_BATCH = ROWS / WARPS / (CACHE == BF16 ? 1 : 2);
    using Order = GroupOrder<8>; // layout of a TMA box
    using QueryOrder = GroupOrder<ROWS>;
    static constexpr int BOX_BYTES = 8 * DIM * 2, PLACE_BYTES = 2 * BOX_BYTES; // a loader's part of a tile: 16 tokens
    static constexpr int QUERIES_AT = 0, PLACES_AT = ROWS * QUERY_BYTES;
    static constexpr int WEIGHTS_AT = PLACES_AT + LOADERS * PLACE_BYTES, WEIGHTS_BYTES = TOKENS * 128, TURN_BYTES = ROWS * 2; // [TOKENS, 64], two buffers of ROWS in each
    static constexpr int MAXIMA_AT = WEIGHTS_AT + WEIGHTS_BYTES; // [WARPS, ROWS] maxima; row sums at the end
    static constexpr int SCALES_AT = MAXIMA_AT + WARPS * ROWS * 4; // [ROWS]
    static constexpr int SEEN_AT = SCALES_AT + ROWS * 4; // [ROWS]; row sums over all warps at the end
    static constexpr int TOPS_AT = SEEN_AT + ROWS * 4; // [ROWS] running maxima at the end
    static constexpr int FULL_AT = TOPS_AT + ROWS * 4; // [LOADERS] mbarriers, of 8 bytes
    static constexpr int EMPTY_AT = FULL_AT + LOADERS * 8; // [LOADERS] mbarriers
    static constexpr int STAGED_AT = EMPTY_AT + LOADERS * 8; // an mbarrier: the output is staged
    static constexpr int ENTRIES_AT = STAGED_AT + 8; // [2, TOKENS] entries of lists
    static constexpr int SHARED_BYTES = ENTRIES_AT + 2 * TOKENS * 4;
    // The output is staged where the cache was, [ROWS, OUTPUT_PITCH]: the pitch avoids bank conflicts between a warp's rows.
    static constexpr int OUTPUT_PITCH = LATENT + 4;
    static_assert(ROWS * OUTPUT_PITCH * 4 <= LOADERS * PLACE_BYTES, "fits");
};

// A lane's accumulators of a wgmma tile, [64 rows in a warpgroup, 8 query rows each]: two rows x two query rows.
template <class T>
using Sums = float[T::ROW_TILES][4];

// The accumulators O^T of a block; a warp has 16 of each 64 latent columns.
template <class T>
struct TurnedOutput {
    Sums<T> sums[T::COLUMN_TILES] = {};

    // Multiplies by a factor for each query row.
    DEVICE void rescale(const float (&factor)[T::ROW_TILES][2]) {
#pragma unroll
        for (int c = 0; c < T::COLUMN_TILES; c++)
#pragma unroll
            for (int j = 0; j < T::ROW_TILES; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) sums[c][j][e] *= factor[j][e % 2];
    }

    // Issues the wgmma of 16 tokens, asynchronously.
    DEVICE void add(u32 place, u32 weights) {
        const u64 values = matrix_at(place, 0, T::BOX_BYTES), b = matrix_at(weights);
#pragma unroll
        for (int c = 0; c < T::COLUMN_TILES; c++) multiply_turned<T::CACHE == BF16>(sums[c], values + T::Order::groups(c) / 16, b);
        wgmma_commit();
    }

    DEVICE void pin_all() {
#pragma unroll
        for (int c = 0; c < T::COLUMN_TILES; c++) pin(sums[c]);
    }
};

// Softmax weights to shared memory, two query rows a word, and a lane's sums of them by row.
template <class T>
DEVICE void weigh_turned(const Sums<T>& logits, const float (&top)[T::ROW_TILES][2], float (&sum)[T::ROW_TILES][2], u32 to) {
#pragma unroll
    for (int j = 0; j < T::ROW_TILES; j++) {
        const float base[2] = {base_of(top[j][0]), base_of(top[j][1])};
        sum[j][0] = sum[j][1] = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float low = exp2_fast(logits[j][2 * h] - base[0]), high = exp2_fast(logits[j][2 * h + 1] - base[1]);
            sum[j][0] += low;
            sum[j][1] += high;
            store_4((to ^ j << 4) + h * (8 * 128), T::CACHE == BF16 ? pack_bf16(low, high) : pack_f16(low, high));
        }
    }
}

// The epilogue, by all warps of the block, loaders too: writes the output once all of it is staged in shared memory.
template <class T>
DEVICE void write_rows(const Args& args, const WorkItem& item, const u8* shared, u32 warp) {
    mbarrier_wait(shared_address(shared + T::STAGED_AT), 0);
    // The other warps do the item again in f32.
    if (!is_finite(*reinterpret_cast<const float*>(shared + T::SCALES_AT))) return;
    const float* staged = reinterpret_cast<const float*>(shared + T::PLACES_AT);
    const float* tops = reinterpret_cast<const float*>(shared + T::TOPS_AT);
    const float* totals = reinterpret_cast<const float*>(shared + T::SEEN_AT);
    const u32 lane = threadIdx.x % LANES;
    for (u32 row = warp; row < item.num_rows; row += T::WARPS + T::LOADERS) {
        const u32 index = item.first_row + row, token = bound_token(args, args.queries[index / args.num_heads].token), head = index % args.num_heads;
        float* partial = args.partials + (static_cast<u64>(item.partial) + row) * (T::LATENT + 4);
        if (lane == 0) {
            if (item.partial == DIRECT) {
                const bool any = HAS_WEIGHT(totals[row]);
                store_lse(args, token, head, lse_of_row(tops[row], totals[row]), any);
            } else {
                store_weight(partial, T::LATENT, tops[row], totals[row]);
            }
        }
#pragma unroll
        for (u32 column = lane * 4; column < T::LATENT; column += LANES * 4) {
            const float4 out = *reinterpret_cast<const float4*>(staged + row * T::OUTPUT_PITCH + column);
            if (item.partial == DIRECT) {
                store_out(args, token, head, column, out.x, out.y);
                store_out(args, token, head, column + 2, out.z, out.w);
            } else {
                *reinterpret_cast<float4*>(partial + column) = out;
            }
        }
    }
}

template <class T>
DEVICE void init_barriers(u32 base, u32 full, u32 empty) {
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < T::LOADERS; i++) {
            mbarrier_init(full + i * 8, 1);
            mbarrier_init(empty + i * 8, T::WARPS);
        }
        mbarrier_init(base + T::STAGED_AT, T::WARPS * LANES);
        fence_proxy_async();
    }
}

// Tells the other warps the maxima of a warp's logits.
template <class T>
DEVICE void share_maxima_turned(const Sums<T>& logits, float* maxima, u32 warp, u32 lane, u32 first_row) {
#pragma unroll
    for (int j = 0; j < T::ROW_TILES; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float largest = fmaxf(logits[j][e], logits[j][e + 2]);
#pragma unroll
            for (int lanes = 4; lanes < LANES; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
            if (lane < 4) maxima[warp * T::ROWS + first_row + j * 8 + e] = largest;
        }
}

// Moves the running maxima that those of a tile exceed by more than LAZY, and sets the factors of what was summed before.
template <class T>
DEVICE void move_tops_turned(const float* maxima, u32 first_row, float (&top)[T::ROW_TILES][2], float (&sum)[T::ROW_TILES][2], float (&factor)[T::ROW_TILES][2]) {
#pragma unroll
    for (int j = 0; j < T::ROW_TILES; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float largest = EMPTY;
#pragma unroll
            for (int w = 0; w < T::WARPS; w++) largest = fmaxf(largest, maxima[w * T::ROWS + first_row + j * 8 + e]);
            factor[j][e] = 1.0f;
            if (largest > top[j][e] + LAZY) {
                factor[j][e] = exp2_fast(top[j][e] - largest);
                top[j][e] = largest;
            }
            sum[j][e] *= factor[j][e];
        }
}

// Scales and masks logits. Sets whether some maximum grows by more than LAZY, and whether some logit is NaN or infinite.
template <class T>
DEVICE void mask_turned(const Args& args, Sums<T>& logits, const float (&top)[T::ROW_TILES][2], const float* scales, const u32* seen, u32 entries, u32 tile_begin, u32 first_token, u32 first_row, bool masks, bool& grows, bool& has_non_finite) {
#pragma unroll
    for (int j = 0; j < T::ROW_TILES; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const u32 row = first_row + j * 8 + e % 2;
            float& logit = logits[j][e];
            logit *= scales[row];
            has_non_finite |= !is_finite(logit);
            if (masks && tile_begin + first_token + e / 2 * 8 >= seen[row]) logit = EMPTY;
            grows |= logit > top[j][e % 2] + LAZY;
        }
    if (args.is_listed) mask_entries_turned<T>(args, logits, entries + first_token * 4, EMPTY);
}

// Sets what rows see. Returns the position before which all of them see keys.
template <class T>
DEVICE u32 see_rows_turned(const Args& args, const WorkItem& item, u32* seen, u32 warp, u32 lane) {
    u32 seen_by_all = ~0u;
    if (lane < T::ROWS) {
        const u32 index = item.first_row + min(lane, item.num_rows - 1);
        seen_by_all = min(args.queries[index / args.num_heads].visible, item.kv_end);
        if (warp == 0) seen[lane] = seen_by_all;
    }
    return __reduce_min_sync(~0u, seen_by_all);
}

// Stages the columns of a row in shared memory, times its factor.
template <class T>
DEVICE void stage_row(float* staged_row, const TurnedOutput<T>& output, int j, int e, u32 first_token, float share) {
#pragma unroll
    for (int c = 0; c < T::COLUMN_TILES; c++)
#pragma unroll
        for (int h = 0; h < 2; h++) staged_row[c * 64 + first_token + h * 8] = output.sums[c][j][2 * h + e] * share;
}

// Issues the wgmma of a tile's values, asynchronously.
template <class T>
DEVICE void add_values_turned(TurnedOutput<T>& output, u32 places, u32 weights, u32 turn, u32 first) {
    output.pin_all();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < T::PARTS_OF_TILE; i++) output.add(places + (first + i) * T::PLACE_BYTES, weights + turn + i * (16 * 128));
    output.pin_all();
}

// Exchanges maxima among the warps, rescales what was summed before, and weighs again.
template <class T>
DEVICE void exchange_maxima(const Sums<T>& logits, TurnedOutput<T>& output, float* maxima, u32 warp, u32 lane, u32 first_row, u32 to, float (&top)[T::ROW_TILES][2], float (&sum)[T::ROW_TILES][2], float (&fresh)[T::ROW_TILES][2]) {
    float factor[T::ROW_TILES][2];
    share_maxima_turned<T>(logits, maxima, warp, lane, first_row);
    bar_sync<T::WARPS>(1);
    move_tops_turned<T>(maxima, first_row, top, sum, factor);
    output.rescale(factor);
    weigh_turned<T>(logits, top, fresh, to);
    fence_proxy_async();
    bar_sync<T::WARPS>(1);
}

template <class T>
DEVICE void decode_swapped(const Args& args, const TensorMap& map) {
    extern __shared__ __align__(1024) u8 shared[];
    WorkItem item = args.items[blockIdx.x];
    griddep_launch();
    const u32 num_items = args.header->num_items;
    if (blockIdx.x >= num_items) return griddep_wait();
    const u32 base = shared_address(shared), places = base + T::PLACES_AT, full = base + T::FULL_AT, empty = base + T::EMPTY_AT;
    float* maxima = reinterpret_cast<float*>(shared + T::MAXIMA_AT);
    float* scales = reinterpret_cast<float*>(shared + T::SCALES_AT);
    u32* seen = reinterpret_cast<u32*>(shared + T::SEEN_AT);
    // The warp's number is uniform in the warp; the shuffle tells the compiler so.
    const u32 lane = threadIdx.x % LANES, warp = __shfl_sync(~0u, threadIdx.x / LANES, 0);

    init_barriers<T>(base, full, empty);
    __syncthreads();
    griddep_wait();
    find_list(args, item);
    if (warp >= T::WARPS) {
        setmaxnreg_dec<40>();
        const u32 loader = warp - T::WARPS;
        PartLoader<T>{args, map, item, places + loader * T::PLACE_BYTES, base + T::ENTRIES_AT + loader * (16 * 4), full + loader * 8, empty + loader * 8}.run(loader / T::PARTS_OF_TILE, loader % T::PARTS_OF_TILE * 16);
        return write_rows<T>(args, item, shared, warp);
    }
    setmaxnreg_inc<T::REGISTERS>();

    const u32 staged = base + T::QUERIES_AT;
    UnrolledQueryRows<T> rows;
    for (u32 row = warp; row < T::ROWS; row += rows.BATCH * T::WARPS) {
        rows.ask(args, item, row);
        rows.store(args, row, staged, scales);
    }
    const u32 seen_by_all = see_rows_turned<T>(args, item, seen, warp, lane);
    fence_proxy_async();
    bar_sync<T::WARPS>(1);

    // The wgmma accumulator layout: a lane has tokens lane / 4 and lane / 4 + 8 of its warp's 16, and two consecutive query rows of every
    // eight.
    const u32 first_row = lane % 4 * 2, first_token = warp * 16 + lane / 4;
    float top[T::ROW_TILES][2], sum[T::ROW_TILES][2];
#pragma unroll
    for (int j = 0; j < T::ROW_TILES; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            top[j][e] = EMPTY;
            sum[j][e] = 0.0f;
        }
    TurnedOutput<T> output;
    const u64 queries = matrix_at(staged);
    const u32 weights = base + T::WEIGHTS_AT, own_weights = weights + first_token * 128 + (lane / 4 << 4) + lane % 4 * 4;
    auto done_with = [&](u32 barrier) {
        __syncwarp();
        if (lane == 0) arrive(barrier);
    };

    Sums<T> logits;
    // 1. Issues the wgmma of a tile's scores, asynchronously.
    auto score = [&](u32 tile) {
        const u32 first = tile % 2 * T::PARTS_OF_TILE;
#pragma unroll
        for (int i = 0; i < T::PARTS_OF_TILE; i++) mbarrier_wait(full + (first + i) * 8, tile / 2 % 2);
        const u64 keys = matrix_at(places + first * T::PLACE_BYTES, 0, T::BOX_BYTES);
        begin_multiplications(logits);
#pragma unroll
        for (int step = 0; step < T::STEPS; step++)
            multiply_columns<T::CACHE == BF16>(logits, keys + (T::Order::groups(step / 4) + step % 4 * 32) / 16, queries + (T::QueryOrder::groups(step / 4) + step % 4 * 32) / 16, step > 0);
        end_of_multiplications(logits);
    };
    const u32 num_tiles = (item.kv_end - item.kv_begin + T::TOKENS - 1) / T::TOKENS;
    if (num_tiles > 0) {
        score(0);
        wgmma_wait<0>();
        pin(logits);
    }
    for (u32 tile = 0; tile < num_tiles; tile++) {
        const u32 tile_begin = item.kv_begin + tile * T::TOKENS;
        // 2. softmax
        const bool masks = tile_begin + T::TOKENS > seen_by_all;
        bool grows = false, has_non_finite = false;
        mask_turned<T>(args, logits, top, scales, seen, base + T::ENTRIES_AT + tile % 2 * (T::TOKENS * 4), tile_begin, first_token, first_row, masks, grows, has_non_finite);
        float fresh[T::ROW_TILES][2];
        const u32 turn = tile % 2 * T::TURN_BYTES, to = own_weights ^ turn;
        weigh_turned<T>(logits, top, fresh, to);
        fence_proxy_async();
        if (any_of_warps<T::WARPS>(1, grows || has_non_finite)) {
            // Recorded in a row's scale, which takes no register: all warps have read their scales of this tile, and see the change after
            // the next barrier.
            if (has_non_finite) atomicOr(reinterpret_cast<u32*>(scales), NAN_BITS);
            exchange_maxima<T>(logits, output, maxima, warp, lane, first_row, to, top, sum, fresh);
        }
#pragma unroll
        for (int j = 0; j < T::ROW_TILES; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) sum[j][e] += fresh[j][e];

        // 3. values, then the next tile's scores
        const u32 first = tile % 2 * T::PARTS_OF_TILE;
        add_values_turned<T>(output, places, weights, turn, first);
        unrolled<T::PARTS_OF_TILE - 1>([&](auto i) {
            wgmma_wait<T::PARTS_OF_TILE - 1 - i.value>();
            done_with(empty + (first + i.value) * 8);
        });
        if (tile + 1 < num_tiles) {
            score(tile + 1);
            wgmma_wait<1>();
            done_with(empty + (first + T::PARTS_OF_TILE - 1) * 8);
        }
        wgmma_wait<0>();
        output.pin_all();
        pin(logits);
    }

    // Row sums across warps, then the epilogue by rows.
    share_sums_turned<T>(sum, maxima, warp, lane, first_row);
    bar_sync<T::WARPS>(1);
    if (!is_finite(scales[0])) {
        arrive(base + T::STAGED_AT);
        return decode_rows<T>(args, warp);
    }
    float* staged_out = reinterpret_cast<float*>(shared + T::PLACES_AT);
    float* tops = reinterpret_cast<float*>(shared + T::TOPS_AT);
    float* totals = reinterpret_cast<float*>(shared + T::SEEN_AT);
#pragma unroll
    for (int j = 0; j < T::ROW_TILES; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const u32 row = first_row + j * 8 + e;
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < T::WARPS; w++) total += maxima[w * T::ROWS + row];
            const bool any = HAS_WEIGHT(total);
            const float share = any && item.partial == DIRECT ? factor_of_row(total + sink_weight(args, (item.first_row + row) % args.num_heads, top[j][e])) : 1.0f;
            if (warp == 0 && lane < 4) {
                tops[row] = top[j][e];
                totals[row] = total;
            }
            stage_row<T>(staged_out + row * T::OUTPUT_PITCH, output, j, e, first_token, share);
        }
    // Every thread arrives: compute-sanitizer does not see the order of a bar.sync that is executed at two places of the code.
    arrive(base + T::STAGED_AT);
    write_rows<T>(args, item, shared, warp);
}

#define DECODE_SWAPPED(name, ...) \
    extern "C" __global__ void __launch_bounds__(SwapTile<__VA_ARGS__>::THREADS, SwapTile<__VA_ARGS__>::BLOCKS) name(const __grid_constant__ Args args, const __grid_constant__ TensorMap map) { \
        decode_swapped<SwapTile<__VA_ARGS__>>(args, map); \
    } \
    NUMBERS_OF(name, SwapTile<__VA_ARGS__>)
