// Split-KV MLA decode in absorbed form by wgmma, 64 query rows as M: variant `wgmma_m64`, for compute capability 9.0.
//
// Work items, tables and softmax as in mla_decode.cuh. Tile: 64 query rows, looping over tiles of 64 tokens, two of them in shared memory.
// Warp specialisation: two warpgroups multiply, a third loads. Each of the two has a stage, whose tiles it owns, and half of the output's
// columns:
//   1. scores   the owner of a tile multiplies all 64 query rows with it (m64n64k16), a group of 64 columns as soon as it is there
//   2. softmax  in registers, a row's tokens in four lanes, with lazy rescaling (FlashAttention-4): the running maximum moves only when it
//               grows by more than LAZY
//   3. values   both warpgroups add the weights times the values of every tile, in order, to their half of the output (m64n128k16 for each
//               quarter). The owner passes its weights through shared memory, lane by lane, as register fragments on both sides
// Shared memory is what this kernel is short of: a stage is loaded, multiplied twice, and released in parts, so that its next tile is on
// its way while the other stage is multiplied.
//
// mbarriers: a group of columns is `full`; a part of a stage is `empty`; weights are `given`. Blocks are in clusters of two, which have the
// same tokens where a sequence has two tiles of query rows: such a pair reads the cache at about the same time and from one partition of
// the L2. Tokens past the item's end are zeros and weigh 0. TMA and cp.async give the same bits, and a row's bits do not depend on which
// rows share its block. An output that has NaN or infinity, from a masked key too, is done again in f32 (decode_f32.cuh). Measured:
// benches/results/h100-decode-128-heads-2026-11-25.md.
#pragma once

#define UNROLLED 1
#include "decode/decode_queries.cuh"
#include "decode/unrolled_queries.cuh"
#include "wgmma_loader.cuh"
#include "wgmma_output.cuh"
#include "wgmma_softmax.cuh"

template <class T>
DEVICE void init_barriers(u32 base, u32 full, u32 empty, u32* non_finite) {
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < T::STAGES * T::GROUPS; i++) mbarrier_init(full + i * 8, 1);
#pragma unroll
        for (int i = 0; i < T::STAGES * T::EMPTIES; i++) mbarrier_init(empty + i * 8, T::WARPS / 2);
#pragma unroll
        for (int i = 0; i < T::WARPS; i++) mbarrier_init(base + T::GIVEN_AT + i * 8, LANES);
        *non_finite = 0;
        fence_proxy_async();
    }
}

// The queries of the first group of columns, as fragments.
template <class T>
DEVICE void keep_queries(u32 (&kept)[T::KEPT][4], u32 staged, u32 warp, u32 lane) {
#pragma unroll
    for (int step = 0; step < T::KEPT; step++) load_matrices(kept[step], staged + T::QueryOrder::at(warp % 4 * 16 + lane % 16, step * 2 + lane / 16));
}

// Gives a tile's weights and running maxima to the other warpgroup, and adds up row sums.
template <class T>
DEVICE void give_weights(u32 own_weights, const u32 (&words)[2][T::TOKEN_TILES], float* tops, u32 group, u32 first_row, u32 lane, const float (&top)[2], const float (&factor)[2], const float (&fresh)[2], float (&sum)[2]) {
    // The buffer is free: the other warpgroup took the previous weights before it gave those that add_other took above.
    store_weights<T>(own_weights, words);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (lane % 4 == 0) tops[group * T::ROWS + first_row + h * 8] = top[h];
        sum[h] = sum[h] * factor[h] + fresh[h];
    }
}

template <class T>
DEVICE void decode_groups(const Args& args, const TensorMap& map) {
    extern __shared__ __align__(1024) u8 shared[];
    WorkItem item = args.items[blockIdx.x];
    griddep_launch();
    const u32 num_items = args.header->num_items;
    if (blockIdx.x >= num_items) return griddep_wait();
    const u32 base = shared_address(shared), stages = base + T::STAGES_AT, full = base + T::FULL_AT, empty = base + T::EMPTY_AT;
    float* tops = reinterpret_cast<float*>(shared + T::TOPS_AT);
    float* scales = reinterpret_cast<float*>(shared + T::SCALES_AT);
    u32* non_finite = reinterpret_cast<u32*>(shared + T::NON_FINITE_AT);
    // The warp's number is uniform in the warp; the shuffle tells the compiler so.
    const u32 lane = threadIdx.x % LANES, warp = __shfl_sync(~0u, threadIdx.x / LANES, 0);

    init_barriers<T>(base, full, empty, non_finite);
    __syncthreads();
    griddep_wait();
    find_list(args, item);
    if (warp >= T::WARPS) {
        setmaxnreg_dec<24>();
        return GroupLoader<T>{args, map, item, stages, base + T::ENTRIES_AT, full, empty, warp - T::WARPS}.run();
    }
    setmaxnreg_inc<240>();

    const u32 staged = base + T::QUERIES_AT;
    if (T::CACHE == BF16 && args.query_dtype == BF16) {
        copy_query_rows<T>(args, item, warp, staged, scales);
    } else {
        UnrolledQueryRows<T> rows;
#pragma unroll 1
        for (u32 row = warp; row < T::ROWS; row += rows.BATCH * T::WARPS) {
            rows.ask(args, item, row);
            rows.store(args, row, staged, scales);
        }
    }
    fence_proxy_async();
    bar_sync<T::WARPS>(1);

    // The wgmma accumulator layout: a lane has rows lane / 4 and lane / 4 + 8 of its warp's 16, and of each two consecutive tokens of every
    // eight.
    const u32 group = warp / 4, first_row = warp % 4 * 16 + lane / 4;
    float top[2] = {EMPTY, EMPTY}, sum[2] = {}, scale[2];
    u32 seen[2]; // keys before this position are visible
    const u32 seen_by_all = see_rows(args, item, scales, first_row, scale, seen);
    HalfOutput<T> output;
    const u64 queries = matrix_at(staged);
    u32 kept[T::KEPT][4];
    keep_queries<T>(kept, staged, warp, lane);
    bar_sync<T::WARPS>(1);

    // `twin` is the other warpgroup's warp with the same rows.
    const u32 twin = warp ^ 4;
    const u32 own_weights = base + (group == 0 ? T::QUERIES_AT : T::WEIGHTS_AT) + warp % 4 * (4 * LANES * 16) + lane * 16;
    const u32 other_weights = base + (group == 1 ? T::QUERIES_AT : T::WEIGHTS_AT) + warp % 4 * (4 * LANES * 16) + lane * 16;
    const u32 own_given = base + T::GIVEN_AT + warp * 8, other_given = base + T::GIVEN_AT + twin * 8;
    auto release = [&](u32 stage, u32 part) {
        __syncwarp();
        if (lane == 0) arrive(empty + (stage * T::EMPTIES + part) * 8);
    };
    // Adds the other warpgroup's tile to the output, after adopting its running maxima.
    auto add_other = [&](u32 tile) {
        mbarrier_wait(other_given, tile / 2 % 2);
        u32 words[2][T::TOKEN_TILES];
        load_weights<T>(words, other_weights);
        adopt_tops(output, [&](int h) { return tops[(group ^ 1) * T::ROWS + first_row + h * 8]; }, top, sum);
        output.add(words, stages + tile % T::STAGES * T::STAGE_BYTES, group);
    };

    const u32 num_tiles = (item.kv_end - item.kv_begin + T::TOKENS - 1) / T::TOKENS;
    const u32 stage = group, filled = full + stage * (T::GROUPS * 8), own_stage = stages + stage * T::STAGE_BYTES;
    const u64 keys = matrix_at(own_stage);
    u32 tile = group;
    for (; tile < num_tiles; tile += 2) {
        const u32 parity = tile / 2 % 2;
        float logits[T::TOKEN_TILES][4];
        auto score = [&](int i) {
            const int columns = T::group_at(i);
            mbarrier_wait(filled + columns * 8, parity);
#pragma unroll
            for (int step = 0; step < 4; step++) {
                const u64 b = keys + (T::Order::groups(columns) + step * 32) / 16;
                if (columns == 0) {
                    multiply_64<T::CACHE == BF16>(logits, kept[step], b, true);
                } else {
                    multiply_64<T::CACHE == BF16>(logits, queries + (T::QueryOrder::groups(columns) + step * 32) / 16, b, i > 0 || step > 0);
                }
            }
        };
        // 1. scores, between whose groups of columns the other warpgroup's weights come
        begin_multiplications(logits);
#pragma unroll
        for (int i = 0; i < T::FIRST_GROUPS; i++) score(i);
        end_of_multiplications(logits);
        if (tile > 0) {
            add_other(tile - 1);
            output.template wait<0>();
            release(stage ^ 1, group * 2);
            output.template wait<1>();
            release(stage ^ 1, group * 2 + 1);
        }
        begin_multiplications(logits);
#pragma unroll
        for (int i = T::FIRST_GROUPS; i < T::GROUPS; i++) score(i);
        end_of_multiplications(logits);
        wgmma_wait<0>();
        pin(logits);
        release(stage, 4);

        // 2. softmax
        mask_tokens<T>(logits, item.kv_begin + tile * T::TOKENS, seen, seen_by_all);
        if (args.is_listed) mask_entries<T>(args, logits, base + T::ENTRIES_AT + stage * (T::TOKENS * 4));
        float factor[2];
        const bool grows = move_tops<T>(logits, scale, top, factor);
        float fresh[2];
        u32 words[2][T::TOKEN_TILES];
        weigh_in_registers<T>(logits, scale, top, fresh, words);

        // 3. values
        if (grows) output.rescale(factor);
        output.add(words, own_stage, group);

        give_weights<T>(own_weights, words, tops, group, first_row, lane, top, factor, fresh, sum);
        // Every lane arrives: compute-sanitizer does not see the order of a __syncwarp followed by one lane's arrival.
        arrive(own_given);

        output.template wait<0>();
        release(stage, group * 2);
        output.template wait<1>();
        release(stage, group * 2 + 1);
    }
    if (num_tiles > 0 && tile == num_tiles) {
        add_other(tile - 1);
        output.template wait<0>();
        output.template wait<1>();
    }

    finish<T>(args, item, shared, warp, output, top, sum);
}

#define DECODE_GROUPS(name, ...) \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(GroupTile<__VA_ARGS__>::THREADS, 1) name(const __grid_constant__ Args args, const __grid_constant__ TensorMap map) { \
        decode_groups<GroupTile<__VA_ARGS__>>(args, map); \
    } \
    NUMBERS_OF(name, GroupTile<__VA_ARGS__>)
