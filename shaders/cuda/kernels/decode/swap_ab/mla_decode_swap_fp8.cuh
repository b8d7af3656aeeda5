// Split-KV MLA decode in absorbed form by wgmma with swapped operands (swap AB), for FP8 (e4m3) caches: variants `wgmma_swap_ab_n16`,
// `_n32` and `_n64`, for compute capability 9.0.
//
// Like in mla_decode_swap.cuh, wgmma's M is tokens for the scores and latent columns for the values, its N is query rows. So the cache is
// the operand A, which wgmma takes from registers: codes come there by ldmatrix, for the values transposed, and become f16. No f16 of the
// cache is in shared memory.
//
// Warp specialisation: two or four warpgroups multiply, another loads. Those that multiply own tiles of 64 tokens in turns, and each has a
// share of the output's columns:
//   1. scores   the owner of a tile: S^T [tokens, query rows] = K Q^T
//   2. softmax  the owner, with lazy rescaling (FlashAttention-4): weights relative to the running maxima are written while its warps vote
//               on whether one grew by more than LAZY; if so, maxima move, and weights are computed again
//   3. values   all, of every tile in order: O^T [latent columns, query rows] += V^T P^T
//
// mbarriers: a stage of codes is `full` or `empty`; weights are `given`. A stage is empty once its codes are in registers. Tokens past the
// item's end are zeros and masked. TMA and cp.async give the same bits, and a row's bits do not depend on which rows share its block. An
// output that has NaN or infinity, from a masked key too, is done again in f32 (decode_f32.cuh). Measured:
// benches/results/h100-decode-e4m3-2026-11-26.md; records: h200-records-2026-11-27.md.
#pragma once

#define UNROLLED 1
#include "decode/decode_queries.cuh"
#include "decode/unrolled_queries.cuh"
#include "decode/staged_output.cuh"
#include "swap_fp8_loader.cuh"
#include "swap_fp8_operands.cuh"
#include "swap_fp8_records.cuh"
#include "swap_fp8_softmax.cuh"

// A multiplying warp.
template <class T>
struct Fp8Multiplier {
    const Args& args;
    const WorkItem& item;
    const u32 base, warp, group; // `group` is its warpgroup
    const typename Either<T::IS_RECORD, RecordReader<T>, CodesReader<T>>::Type reader;
    const RecordScales<T> scales;
    const SharedRows<T> rows;
    // The wgmma accumulator layout: a lane has rows (tokens, or latent columns) lane / 4 and lane / 4 + 8 of its warp's 16, and two
    // consecutive query rows of every eight.
    Sums<T> logits, output[T::COLUMN_TILES] = {};
    float sum[T::ROW_TILES][2] = {};
    u32 operands[2][T::AT_ONCE][4]; // AT_ONCE wgmma read one while the other is converted

    DEVICE Fp8Multiplier(const Args& args, const WorkItem& item, u8* shared, u32 warp)
        : args(args), item(item), base(shared_address(shared)), warp(warp), group(warp / 4), reader(base + T::STAGES_AT, warp / 4, warp % 4), scales{base}, rows{shared} {}

    DEVICE void run() {
        const u32 seen_by_all = rows.begin(args, item, warp);
        fence_proxy_async();
        bar_sync<T::WARPS>(1);
        const u32 num_tiles = (item.kv_end - item.kv_begin + T::TOKENS - 1) / T::TOKENS;
        u32 added = 0; // tiles whose values have been added
#pragma unroll 1
        for (u32 tile = group; tile < num_tiles; tile += T::WARPGROUPS) {
            const u32 next = tile > T::LEAD ? tile - T::LEAD : 0; // to be added once the scores are issued
            if constexpr (T::LEAD + 1 < T::WARPGROUPS) add_others(added, next);
            score(tile);
            if (next < tile) {
                // It is converted while the last scores are multiplied.
                add_other<T::IS_RECORD ? 1 : T::GROUPS % 2>(next, [&] { wait_for_scores(); });
                if constexpr (T::LEAD > 1) add_others(next + 1, tile);
            } else {
                wait_for_scores();
            }
            weigh(tile, seen_by_all);
            add_values<0>(tile, [&] { wait_for_weights(tile); });
            wait_for_values();
            added = tile + 1;
        }
        add_others(added, num_tiles);
    }

    // Issues the wgmma of a tile's scores, asynchronously.
    DEVICE void score(u32 tile) {
        if constexpr (T::IS_RECORD) {
            score_records(tile);
        } else {
            score_codes(tile);
        }
    }

    DEVICE void score_codes(u32 tile) {
        const u32 stage = tile % T::STAGES;
        const u64 queries = matrix_at(base + T::QUERIES_AT);
        wait_for_codes(tile);
        Codes codes[T::GROUPS];
#pragma unroll
        for (int g = 0; g < T::GROUPS; g++) {
#pragma unroll
            for (int ahead = g == 0 ? 0 : g + T::AHEAD - 1; ahead < g + T::AHEAD && ahead < T::GROUPS; ahead++) reader.load_keys(codes[ahead], stage, ahead);
            if (g >= 2) wgmma_wait<1>();
            Operands& keys = operands[g % 2];
            keys_to_f16(keys, codes[g]);
            begin_multiplications(logits);
#pragma unroll
            for (int i = 0; i < 4; i++) multiply_columns<false>(logits, keys[i], queries + (T::QueryOrder::groups(g) + i * 32) / 16, g > 0 || i > 0);
            end_of_multiplications(logits);
        }
    }

    // The same of records. What was summed before a group of 128 codes is multiplied by the ratio of the last group's scale to its own, and
    // after all of them by the last scale; those of the rotary part are added to that. So codes are multiplied as they are, and any scale
    // is exact.
    DEVICE void score_records(u32 tile) {
        constexpr int AT_ONCE = T::AT_ONCE, PARTS = T::LATENT / (16 * AT_ONCE), GROUP_PARTS = T::Layout::GROUP / (16 * AT_ONCE), ROPE_PARTS = (T::DIM - T::LATENT) / (16 * AT_ONCE);
        // Which of the two `operands` is first, so that the last scores use operands[0].
        constexpr int FIRST = (PARTS + ROPE_PARTS + 1) % 2;
        const u32 stage = tile % T::STAGES;
        const u64 queries = matrix_at(base + T::QUERIES_AT);
        auto query_at = [&](int step) { return queries + (T::QueryOrder::groups(step / 4) + step % 4 * 32) / 16; };
        wait_for_codes(tile);
#pragma unroll
        for (int part = 0; part < PARTS + ROPE_PARTS; part++) {
            auto& keys = operands[(part + FIRST) % 2];
            u32 codes[AT_ONCE / 2][4];
            if (part < PARTS) {
#pragma unroll
                for (int i = 0; i < AT_ONCE / 2; i++) reader.load_keys(codes[i], stage, part * (AT_ONCE / 2) + i);
            }
            if (part >= 2) wgmma_wait<1>();
            if (part < PARTS) {
#pragma unroll
                for (int i = 0; i < AT_ONCE / 2; i++) keys_to_f16(keys[2 * i], keys[2 * i + 1], codes[i]);
            } else {
                if constexpr (ROPE_PARTS > 0) {
#pragma unroll
                    for (int i = 0; i < AT_ONCE; i++) reader.load_rope(keys[i], stage, (part - PARTS) * AT_ONCE + i);
                }
            }
            if (part > 0 && part <= PARTS && part % GROUP_PARTS == 0) end_group(stage, part / GROUP_PARTS - 1);
            begin_multiplications(logits);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                if (part < PARTS) {
                    multiply_columns<false>(logits, keys[i], query_at(part * AT_ONCE + i), part > 0 || i > 0);
                } else {
                    multiply_columns<true>(logits, keys[i], query_at(part * AT_ONCE + i), true);
                }
            }
            end_of_multiplications(logits);
        }
    }

    // Multiplies the scores of the lane's two tokens, once they are there, by what follows a group.
    DEVICE void end_group(u32 stage, int group) {
        wait_for_scores();
        float by[2];
        scales.after_group(by, stage, warp, group);
        scale_tokens(by);
    }

    // Multiplies the scores of the lane's two tokens.
    DEVICE void scale_tokens(const float (&by)[2]) {
#pragma unroll
        for (int j = 0; j < T::ROW_TILES; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) logits[j][e] *= by[e / 2];
    }

    DEVICE void wait_for_scores() {
        wgmma_wait<0>();
        pin(logits);
    }

    // The softmax weights of the own tile, and their row sums.
    DEVICE void weigh(u32 tile, u32 seen_by_all) {
        const u32 lane = threadIdx.x % LANES, first_token = warp % 4 * 16 + lane / 4, tile_begin = tile * T::TOKENS, barrier = 3 + group;
        // Without a rotary part nothing was issued after the last group.
        if constexpr (T::IS_RECORD && T::DIM == T::LATENT) end_group(tile % T::STAGES, 3);
        if (tile_begin + T::TOKENS > seen_by_all) rows.mask(logits, tile_begin + first_token);
        if (args.is_listed) mask_entries_turned<T>(args, logits, base + T::ENTRIES_AT + (tile % T::STAGES * T::TOKENS + first_token) * 4, NO_WEIGHT);
        const u32 to = base + T::WEIGHTS_AT + (T::weights_of(tile) ^ first_token * 128 + (lane / 4 << 4) + lane % 4 * 4);
        float fresh[T::ROW_TILES][2];
        const bool grows = rows.weigh(logits, to, fresh), moves = any_of_warps<4>(barrier, grows);
        if (moves) {
            rows.move_tops(logits, warp, barrier);
            rescale(group);
            rows.weigh(logits, to, fresh);
        }
        if (warp % 4 == 0 && lane == 0) rows.moved()[group] = moves;
#pragma unroll
        for (int j = 0; j < T::ROW_TILES; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) sum[j][e] += fresh[j][e];
        fence_proxy_async();
        // Every lane arrives, here and in `release`: compute-sanitizer does not see the order of a __syncwarp followed by one lane's
        // arrival.
        arrive(base + T::GIVEN_AT + group * 8);
    }

    // Issues the wgmma of a tile's values, and releases its stage. `before_first` is called before the first is issued; FIRST of the two
    // `operands` is converted first: where scores are still multiplied, not the one that they use.
    template <int FIRST, class Wait>
    DEVICE void add_values(u32 tile, const Wait& before_first) {
        if constexpr (T::IS_RECORD) {
            add_record_values<FIRST>(tile, before_first);
        } else {
            add_code_values<FIRST>(tile, before_first);
        }
    }

    template <int FIRST, class Wait>
    DEVICE void add_code_values(u32 tile, const Wait& before_first) {
        constexpr int AHEAD = T::AHEAD < T::COLUMN_TILES ? T::AHEAD : T::COLUMN_TILES;
        const u32 stage = tile % T::STAGES;
        const u64 weights = matrix_at(base + T::WEIGHTS_AT + T::weights_of(tile));
        Codes codes[T::COLUMN_TILES];
#pragma unroll
        for (int c = 0; c < T::COLUMN_TILES; c++) {
#pragma unroll
            for (int ahead = c == 0 ? 0 : c + AHEAD - 1; ahead < c + AHEAD && ahead < T::COLUMN_TILES; ahead++) {
                reader.load_values(codes[ahead], stage, ahead);
                if (ahead == T::COLUMN_TILES - 1) release(stage);
            }
            if (c >= 2 || c == 0 && FIRST != 0) wgmma_wait<1>();
            Operands& values = operands[(c + FIRST) % 2];
            values_to_f16(values, codes[c]);
            if (c == 0) before_first();
            begin_multiplications(output[c]);
#pragma unroll
            for (int i = 0; i < 4; i++) multiply_values<false>(output[c], values[i], weights + i * (16 * 128 / 16));
            end_of_multiplications(output[c]);
        }
    }

    // The same of records.
    template <int FIRST, class Wait>
    DEVICE void add_record_values(u32 tile, const Wait& before_first) {
        constexpr int AT_ONCE = T::AT_ONCE, COLUMN_PARTS = 4 / AT_ONCE, PARTS = T::COLUMN_TILES * COLUMN_PARTS;
        const u32 stage = tile % T::STAGES;
        const u64 weights = matrix_at(base + T::WEIGHTS_AT + T::weights_of(tile));
        scales.make_table(tile, warp, 3 + group);
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const int c = part / COLUMN_PARTS, first_half = part % COLUMN_PARTS;
            auto& values = operands[(part + FIRST) % 2];
            u32 codes[AT_ONCE / 2][4];
#pragma unroll
            for (int i = 0; i < AT_ONCE / 2; i++) reader.load_values(codes[i], stage, c, first_half + i);
            if (part == PARTS - 1) release(stage);
            if (part >= 2 || part == 0 && FIRST != 0) wgmma_wait<1>();
#pragma unroll
            for (int i = 0; i < AT_ONCE / 2; i++) {
                values_to_f16(values[2 * i], values[2 * i + 1], codes[i]);
                scales.multiply(values[2 * i], values[2 * i + 1], tile, group, c, first_half + i);
            }
            if (part == 0) before_first();
            begin_multiplications(output[c]);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) multiply_values<false>(output[c], values[i], weights + (first_half * 2 + i) * (16 * 128 / 16));
            end_of_multiplications(output[c]);
        }
    }

    // Adds the tile of another warpgroup. `wait_for_others` is for what was issued before.
    template <int FIRST, class Wait>
    DEVICE void add_other(u32 tile, const Wait& wait_for_others) {
        const u32 owner = tile % T::WARPGROUPS;
        wait_for_codes(tile);
        add_values<FIRST>(tile, [&] {
            wait_for_others();
            wait_for_weights(tile);
            wait_for_values();
            if (rows.moved()[owner]) rescale(owner);
        });
        wait_for_values();
    }

    DEVICE void add_others(u32 begin, u32 end) {
#pragma unroll 1
        for (u32 tile = begin; tile < end; tile++) add_other<0>(tile, [] {});
    }

    DEVICE void wait_for_values() {
        wgmma_wait<0>();
#pragma unroll
        for (int c = 0; c < T::COLUMN_TILES; c++) pin(output[c]);
    }

    DEVICE void wait_for_codes(u32 tile) const { mbarrier_wait(base + T::FULL_AT + tile % T::STAGES * 8, tile / T::STAGES % 2); }
    DEVICE void wait_for_weights(u32 tile) const { mbarrier_wait(base + T::GIVEN_AT + tile % T::WARPGROUPS * 8, tile / T::WARPGROUPS % 2); }

    DEVICE void release(u32 stage) const { arrive(base + T::EMPTY_AT + stage * 8); }

    // Multiplies what was summed by the factors of a warpgroup's tile.
    DEVICE void rescale(u32 owner) {
#pragma unroll
        for (int j = 0; j < T::ROW_TILES; j++) {
            const float2 by = rows.pair(rows.factors() + owner * T::ROWS, j);
            sum[j][0] *= by.x;
            sum[j][1] *= by.y;
#pragma unroll
            for (int c = 0; c < T::COLUMN_TILES; c++)
#pragma unroll
                for (int e = 0; e < 4; e++) output[c][j][e] *= e % 2 ? by.y : by.x;
        }
    }

    // Stages the output where the cache was, so that a short loop writes its rows: code that runs once is as slow as its instructions are
    // many.
    DEVICE void finish(u8* shared) {
        const WorkItem item = item_of_block(args); // again: registers are short until here
        rows.finish(sum, warp);
        const u32 lane = threadIdx.x % LANES;
        u32* non_finite = reinterpret_cast<u32*>(shared + T::NON_FINITE_AT);
        // A lane's even and odd latent column are neighbours.
        const u32 column = group * (T::LATENT / T::WARPGROUPS) + warp % 4 * 16 + lane / 4 * 2;
        const u32 place = base + T::STAGES_AT + (rows.first_row() * T::OUTPUT_PITCH + column) * 4;
        float check[4] = {}; // NaN where some element is NaN or infinite
#pragma unroll
        for (int c = 0; c < T::COLUMN_TILES; c++)
#pragma unroll
            for (int j = 0; j < T::ROW_TILES; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float even = output[c][j][e] * RecordScales<T>::UNBIAS, odd = output[c][j][e + 2] * RecordScales<T>::UNBIAS;
                    check[e] = fmaf(even, 0.0f, check[e]);
                    check[e + 2] = fmaf(odd, 0.0f, check[e + 2]);
                    store_8(place + ((j * 8 + e) * T::OUTPUT_PITCH + c * 64) * 4, even, odd);
                }
        if (!((check[0] + check[1]) + (check[2] + check[3]) == 0.0f)) atomicOr(non_finite, 1u);
        bar_sync<T::WARPS>(1);
        write_rows<T>(args, item, shared, warp, *non_finite != 0);
    }
};

template <class T>
DEVICE void decode_swapped_codes(const Args& args, const TensorMap& map) {
    extern __shared__ __align__(1024) u8 shared[];
    WorkItem item = args.items[blockIdx.x];
    griddep_launch();
    const u32 num_items = args.header->num_items;
    if (blockIdx.x >= num_items) return griddep_wait();
    const u32 base = shared_address(shared);
    // The warp's number is uniform in the warp; the shuffle tells the compiler so.
    const u32 warp = __shfl_sync(~0u, threadIdx.x / LANES, 0);

    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < T::STAGES; i++) {
            mbarrier_init(base + T::FULL_AT + i * 8, T::LOADERS * LANES);
            mbarrier_init(base + T::EMPTY_AT + i * 8, T::WARPS * LANES);
        }
#pragma unroll
        for (int i = 0; i < T::WARPGROUPS; i++) mbarrier_init(base + T::GIVEN_AT + i * 8, 4 * LANES);
        *reinterpret_cast<u32*>(shared + T::NON_FINITE_AT) = 0;
        fence_proxy_async();
    }
    __syncthreads();
    griddep_wait();
    find_list(args, item);
    if (warp >= T::WARPS) {
        setmaxnreg_dec<T::LOADER_REGISTERS>();
        return SwapFp8Loader<T>{args, map, item, base, warp - T::WARPS}.run();
    }
    setmaxnreg_inc<T::REGISTERS>();

    UnrolledQueryRows<T> queries;
#pragma unroll 1
    for (u32 row = warp; row < T::ROWS; row += queries.BATCH * T::WARPS) {
        queries.ask(args, item, row);
        queries.store(args, row, base + T::QUERIES_AT, reinterpret_cast<float*>(shared + T::SCALES_AT));
    }
    Fp8Multiplier<T> multiplier(args, item, shared, warp);
    multiplier.run();
    multiplier.finish(shared);
}

// The last argument may be a cluster's dims.
#define DECODE_SWAPPED_CODES(name, layout, rows, ...) \
    extern "C" __global__ void __VA_ARGS__ __launch_bounds__(SwapFp8Tile<rows, layout>::THREADS, 1) name(const __grid_constant__ Args args, const __grid_constant__ TensorMap map) { \
        decode_swapped_codes<SwapFp8Tile<rows, layout>>(args, map); \
    } \
    NUMBERS_OF(name, SwapFp8Tile<rows, layout>)
