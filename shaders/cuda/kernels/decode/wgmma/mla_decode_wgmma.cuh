// Split-KV MLA decode in absorbed form by wgmma, 64 query rows as M: variant `wgmma_m64`, for compute capability 9.0.
//
// Work items, tables and softmax as in mla_decode.cuh. Tile: 64 query rows, looping over tiles of TOKENS = 32 tokens in a pipeline of STAGES = 4
// stages. Warp specialisation: two warpgroups multiply, a third loads. Each of the two owns half of the output's columns; they
// alternate as the owner of a tile:
//   1. scores   the owner multiplies all 64 query rows with the tile (m64n32k16), while the other warpgroup computes the softmax of the
//               previous tile
//   2. softmax  in registers, a row's tokens in four lanes, with lazy rescaling (FlashAttention-4): the running maximum moves only when it
//               grows by more than LAZY
//   3. values   both warpgroups add the weights of every tile, in order, to their half of the output (m64n256k16). The owner passes its
//               weights through shared memory, lane by lane, as register fragments on both sides
//
// mbarriers: a stage is `full` or `empty`; weights are `given`; it is a warpgroup's `turn` to multiply scores.
// Loads are one TMA box of 32 tokens a tile where pages allow it, else cp.async: the same bits. Tokens past the item's end are zeros and weigh
// 0. A row's bits do not depend on which rows share its block. An item with a logit that is NaN or infinite, masked or not, is done again in
// f32 (decode_f32.cuh).
// Measured on H200s: benches/results/h200-cuda6-2026-11-23.md.
#pragma once

#include "decode/decode_f32.cuh"
#include "decode/decode_queries.cuh"
#include "decode/decode_tile.cuh"
#include "lib/in_flight.cuh"
#include "lib/wgmma.cuh"

// The tile's parameters and shared-memory layout.
template <Dtype CACHE_>
struct GroupTile {
    static constexpr Dtype CACHE = CACHE_;
    static constexpr int LATENT = 512, DIM = 576, ROWS = 64, TOKENS = 32, STAGES = 4, PARTS = 1;
    static constexpr int WARPS = 8, LOADERS = 4, THREADS = (WARPS + LOADERS) * LANES; // warps that multiply; warps that load
    static constexpr int STEPS = DIM / 16, KEPT = 8; // of k = 16, of a dot product; those whose queries stay in registers
    static constexpr int TOKEN_TILES = TOKENS / 8, COLUMN_TILES = LATENT / 2 / 8; // of a warpgroup's scores, of its output
    static constexpr int ROW_BYTES = DIM * 2, QUERY_BYTES = DIM * 2, STAGED_ROWS = ROWS, QUERY_BATCH = 2, STAGE_BYTES = TOKENS * ROW_BYTES;
    using Order = GroupOrder<TOKENS>; // layout of a stage
    using QueryOrder = GroupOrder<ROWS>;
    static constexpr int QUERIES_AT = 0, STAGES_AT = ROWS * QUERY_BYTES;
    static constexpr int WEIGHTS_AT = STAGES_AT + STAGES * STAGE_BYTES; // [WARPS, 2, LANES, 4 words]
    static constexpr int TOPS_AT = WEIGHTS_AT + WARPS * 2 * LANES * 16; // [2, ROWS]
    static constexpr int SCALES_AT = TOPS_AT + 2 * ROWS * 4; // [ROWS]
    // mbarriers, of 8 bytes.
    static constexpr int FULL_AT = SCALES_AT + ROWS * 4; // [STAGES]
    static constexpr int EMPTY_AT = FULL_AT + STAGES * 8; // [STAGES]
    static constexpr int GIVEN_AT = EMPTY_AT + STAGES * 8; // [WARPS]
    static constexpr int TURN_AT = GIVEN_AT + WARPS * 8; // [2]
    static constexpr int NON_FINITE_AT = TURN_AT + 2 * 8; // whether some logit is NaN or infinite
    static constexpr int SHARED_BYTES = NON_FINITE_AT + 8;
};

// The loader warpgroup: one TMA box a tile; cp.async where the page size or the item's begin is no multiple of TOKENS, or where the item ends
// within the tile.
template <class T>
struct GroupLoader {
    using Order = typename T::Order;
    const Args& args;
    const TensorMap& map;
    const WorkItem& item;
    const u32 stages, full, empty, warp; // `warp` counts within the warpgroup
    InFlight in_flight;

    DEVICE void run() {
        const bool boxes = args.copies == BOXES && item.kv_begin % T::TOKENS == 0;
        u32 stage = 0, parity = 1;
        u32 page = item.kv_begin / args.page_size, offset = item.kv_begin - page * args.page_size, id = 0;
        if (item.kv_begin < item.kv_end) id = page_id(args, item, page);
        if (boxes) prefetch_map(map);
        for (u32 tile_begin = item.kv_begin; tile_begin < item.kv_end; tile_begin += T::TOKENS) {
            wait_for_arrivals(empty + stage * 8, parity);
            const u32 to = stages + stage * T::STAGE_BYTES, barrier = full + stage * 8;
            if (boxes && tile_begin + T::TOKENS <= item.kv_end) {
                if (threadIdx.x % LANES == 0) {
                    if (warp == 0) {
                        arrive_and_expect(barrier, T::STAGE_BYTES);
                        copy_box(to, map, offset, id, barrier);
                    } else {
                        arrive(barrier);
                    }
                }
                offset += T::TOKENS;
                if (offset >= args.page_size) {
                    offset -= args.page_size;
                    page++;
                    if (tile_begin + T::TOKENS < item.kv_end) id = page_id(args, item, page);
                }
            } else {
                by_chunks(tile_begin, to);
                in_flight.finish<1>();
                in_flight.barrier = barrier;
            }
            if (++stage == T::STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
        in_flight.finish<0>();
    }

    DEVICE void by_chunks(u32 tile_begin, u32 to) const {
        constexpr int PASS_ROWS = T::LOADERS * LANES / Order::GROUP;
        const u32 lane = threadIdx.x % LANES, first = warp * (LANES / Order::GROUP) + lane / Order::GROUP;
#pragma unroll 1
        for (u32 row = first; row < T::TOKENS; row += PASS_ROWS) {
            const u32 token = tile_begin + row;
            const bool is_there = token < item.kv_end;
            u64 element = 0;
            if (is_there) element = row_of_token<T::DIM>(args, item, token);
            const u8* from = args.kv + element * 2 + lane % Order::GROUP * 16;
            const u32 place = to + Order::at(row, lane % Order::GROUP);
#pragma unroll
            for (int i = 0; i < T::ROW_BYTES / 128; i++) copy_16(place + Order::groups(i), from + i * 128, is_there, true);
        }
        end_of_group();
    }
};

// Softmax weights in registers, two tokens a word, and a lane's sums of them by row.
template <class T>
DEVICE void weigh_in_registers(const float (&logits)[T::TOKEN_TILES][4], const float (&top)[2], float (&sum)[2], u32 (&words)[2][T::TOKEN_TILES]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float base = base_of(top[h]);
        sum[h] = 0.0f;
#pragma unroll
        for (int j = 0; j < T::TOKEN_TILES; j++) words[h][j] = weigh_two<T>(logits[j][2 * h], logits[j][2 * h + 1], base, sum[h]);
    }
}

// The accumulators of a warpgroup's half of the output.
template <class T>
struct HalfOutput {
    float sums[T::COLUMN_TILES][4] = {};

    DEVICE void rescale(const float (&factor)[2]) {
#pragma unroll
        for (int c = 0; c < T::COLUMN_TILES; c++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[c][e] *= factor[e / 2];
    }

    // Issues the wgmma of a tile at `stage`, asynchronously.
    DEVICE void add(const u32 (&words)[2][T::TOKEN_TILES], u32 stage, u32 group) {
        const u64 values = matrix_at(stage + T::Order::groups(group * 4), T::Order::GROUP_BYTES);
        begin_multiplications(sums);
#pragma unroll
        for (int step = 0; step < T::TOKENS / 16; step++) {
            const u32 a[4] = {words[0][2 * step], words[1][2 * step], words[0][2 * step + 1], words[1][2 * step + 1]};
            multiply_256<T::CACHE == BF16>(sums, a, values + step * (16 * 128 / 16));
        }
        end_of_multiplications(sums);
    }

    template <int LEFT>
    DEVICE void wait() {
        wait_for_multiplications<LEFT>();
        pin(sums);
    }
};

template <class T>
DEVICE void decode_groups(const Args& args, const TensorMap& map) {
    extern __shared__ __align__(1024) u8 shared[];
    const WorkItem item = args.items[blockIdx.x];
    let_next_kernel_begin();
    const u32 num_items = args.header->num_items;
    if (blockIdx.x >= num_items) return wait_for_kernel_before();
    const u32 base = shared_address(shared), stages = base + T::STAGES_AT, full = base + T::FULL_AT, empty = base + T::EMPTY_AT;
    float* tops = reinterpret_cast<float*>(shared + T::TOPS_AT);
    float* scales = reinterpret_cast<float*>(shared + T::SCALES_AT);
    u32* non_finite = reinterpret_cast<u32*>(shared + T::NON_FINITE_AT);
    // Uniform in a warp, which the shuffle tells the compiler.
    const u32 lane = threadIdx.x % LANES, warp = __shfl_sync(~0u, threadIdx.x / LANES, 0);

    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < T::STAGES; i++) {
            begin_barrier(full + i * 8, T::LOADERS);
            begin_barrier(empty + i * 8, T::WARPS);
        }
#pragma unroll
        for (int i = 0; i < T::WARPS; i++) begin_barrier(base + T::GIVEN_AT + i * 8, LANES);
#pragma unroll
        for (int i = 0; i < 2; i++) begin_barrier(base + T::TURN_AT + i * 8, T::WARPS / 2);
        *non_finite = 0;
        before_tensor_copies();
    }
    __syncthreads();
    wait_for_kernel_before();
    if (warp >= T::WARPS) {
        give_registers<24>();
        GroupLoader<T> loader{args, map, item, stages, full, empty, warp - T::WARPS};
        return loader.run();
    }
    take_registers<240>();

    const u32 staged = base + T::QUERIES_AT;
    QueryRows<T> rows;
    for (u32 row = warp; row < T::ROWS; row += rows.BATCH * T::WARPS) {
        rows.ask(args, item, row);
        rows.store(args, row, staged, scales);
    }
    before_tensor_copies();
    wait_for_warps<T::WARPS>(1);

    // The wgmma accumulator layout: a lane has rows lane / 4 and lane / 4 + 8 of its warp's 16, and of each two consecutive tokens of every
    // eight.
    const u32 group = warp / 4, first_row = warp % 4 * 16 + lane / 4;
    float top[2], sum[2], scale[2];
    u32 seen[2], seen_by_all = ~0u; // keys before this position are visible
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = first_row + h * 8, index = item.first_row + min(row, item.num_rows - 1);
        seen[h] = min(args.queries[index / args.num_heads].visible, item.kv_end);
        seen_by_all = min(seen_by_all, seen[h]);
        scale[h] = scales[row];
        top[h] = EMPTY;
        sum[h] = 0.0f;
    }
    seen_by_all = __reduce_min_sync(~0u, seen_by_all);
    HalfOutput<T> output;
    const u64 queries = matrix_at(staged);
    u32 kept[T::KEPT][4];
#pragma unroll
    for (int step = 0; step < T::KEPT; step++) load_matrices(kept[step], staged + T::QueryOrder::at(warp % 4 * 16 + lane % 16, step * 2 + lane / 16));

    // `twin` is the other warpgroup's warp with the same rows.
    const u32 twin = warp ^ 4, weights = base + T::WEIGHTS_AT + lane * 16;
    const u32 own_given = base + T::GIVEN_AT + warp * 8, own_turn = base + T::TURN_AT + group * 8;
    const u32 other_given = base + T::GIVEN_AT + twin * 8, other_turn = base + T::TURN_AT + (group ^ 1) * 8;
    auto stage_of = [&](u32 tile) { return stages + tile % T::STAGES * T::STAGE_BYTES; };
    auto done_with = [&](u32 barrier) {
        __syncwarp();
        if (lane == 0) arrive(barrier);
    };
    // Adds the other warpgroup's tile to the output, after adopting its running maxima.
    auto add_other = [&](u32 tile) {
        wait_for_arrivals(other_given, tile / 2 % 2);
        u32 words[2][T::TOKEN_TILES];
        float factor[2];
        bool grew = false;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            load_16(words[h], weights + (twin * 2 + h) * (LANES * 16));
            const float now = tops[(group ^ 1) * T::ROWS + first_row + h * 8];
            factor[h] = exp2_fast(top[h] - now);
            grew |= now != top[h];
            top[h] = now;
            sum[h] *= factor[h];
        }
        // No wgmma on the output is in flight here; wait<0> tells the compiler so.
        if (__any_sync(~0u, grew)) {
            output.template wait<0>();
            output.rescale(factor);
        }
        output.add(words, stage_of(tile), group);
    };

    const u32 num_tiles = (item.kv_end - item.kv_begin + T::TOKENS - 1) / T::TOKENS;
    u32 tile = group;
    for (; tile < num_tiles; tile += 2) {
        // 1. scores
        wait_for_arrivals(full + tile % T::STAGES * 8, tile / T::STAGES % 2);
        if (tile > 0) wait_for_arrivals(own_turn, (tile - 1) / 2 % 2);
        float logits[T::TOKEN_TILES][4];
        const u64 keys = matrix_at(stage_of(tile));
        begin_multiplications(logits);
#pragma unroll
        for (int step = 0; step < T::STEPS; step++) {
            const u64 b = keys + (T::Order::groups(step / 4) + step % 4 * 32) / 16;
            if (step < T::KEPT) {
                multiply_32<T::CACHE == BF16>(logits, kept[step < T::KEPT ? step : 0], b, step > 0);
            } else {
                multiply_32<T::CACHE == BF16>(logits, queries + (T::QueryOrder::groups(step / 4) + step % 4 * 32) / 16, b, step > 0);
            }
        }
        end_of_multiplications(logits);
        if (tile > 0) {
            add_other(tile - 1);
            wait_for_multiplications<1>();
        } else {
            wait_for_multiplications<0>();
        }
        pin(logits);
        done_with(other_turn);

        // 2. softmax
        const u32 tile_begin = item.kv_begin + tile * T::TOKENS, first = tile_begin + lane % 4 * 2;
        const bool masks = tile_begin + T::TOKENS > seen_by_all;
        float largest[2], factor[2];
        bool has_non_finite = false;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            largest[h] = EMPTY;
            factor[h] = 1.0f;
#pragma unroll
            for (int j = 0; j < T::TOKEN_TILES; j++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& logit = logits[j][2 * h + e];
                    logit *= scale[h];
                    has_non_finite |= !is_finite(logit);
                    if (masks && first + j * 8 + e >= seen[h]) logit = EMPTY;
                    largest[h] = fmaxf(largest[h], logit);
                }
            }
        }
        if (has_non_finite) atomicOr(non_finite, 1u);
        const bool grows = __any_sync(~0u, largest[0] > top[0] + LAZY || largest[1] > top[1] + LAZY);
        if (grows) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 1));
                largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 2));
                if (largest[h] > top[h] + LAZY) {
                    factor[h] = exp2_fast(top[h] - largest[h]);
                    top[h] = largest[h];
                }
            }
        }
        float fresh[2];
        u32 words[2][T::TOKEN_TILES];
        weigh_in_registers<T>(logits, top, fresh, words);
        // The buffer is free: the other warpgroup took the previous weights before it gave those that add_other took above.
#pragma unroll
        for (int h = 0; h < 2; h++) {
            store_16(weights + (warp * 2 + h) * (LANES * 16), words[h]);
            if (lane % 4 == 0) tops[group * T::ROWS + first_row + h * 8] = top[h];
            sum[h] = sum[h] * factor[h] + fresh[h];
        }
        // Every lane arrives: compute-sanitizer does not see the order of a __syncwarp followed by one lane's arrival.
        arrive(own_given);

        // 3. values
        output.template wait<0>();
        if (tile > 0) done_with(empty + (tile - 1) % T::STAGES * 8);
        if (grows) output.rescale(factor);
        output.add(words, stage_of(tile), group);
        output.template wait<0>();
        done_with(empty + tile % T::STAGES * 8);
    }
    if (num_tiles > 0 && tile == num_tiles) {
        add_other(tile - 1);
        output.template wait<0>();
    }

    // Row sums across the two warpgroups, LSEs, then the epilogue.
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
        sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    }
    wait_for_warps<T::WARPS>(1);
    if (*non_finite != 0) return decode_rows<T>(args, warp);
    if (lane % 4 == 0) {
        tops[group * T::ROWS + first_row] = sum[0];
        tops[group * T::ROWS + first_row + 8] = sum[1];
    }
    wait_for_warps<T::WARPS>(1);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = first_row + h * 8, index = item.first_row + row;
        if (row >= item.num_rows) continue;
        const float total = tops[row] + tops[T::ROWS + row];
        const bool any = !(total == 0.0f); // NaN too
        const float base_2 = any ? top[h] + log2_fast(total) : EMPTY, share = any ? 1.0f / total : 1.0f;
        const u32 token = bound_token(args, args.queries[index / args.num_heads].token), head = index % args.num_heads;
        float* partial = args.partials + (static_cast<u64>(item.partial) + row) * (T::LATENT + 4);
        if (group == 0 && lane % 4 == 0) {
            if (item.partial == DIRECT) {
                store_lse(args, token, head, base_2, any);
            } else {
                partial[T::LATENT] = base_2;
            }
        }
#pragma unroll
        for (int c = 0; c < T::COLUMN_TILES; c++) {
            const u32 column = group * (T::LATENT / 2) + c * 8 + lane % 4 * 2;
            const float first = output.sums[c][2 * h] * share, second = output.sums[c][2 * h + 1] * share;
            if (item.partial == DIRECT) {
                store_out(args, token, head, column, first, second);
            } else {
                *reinterpret_cast<float2*>(partial + column) = make_float2(first, second);
            }
        }
    }
}

#define DECODE_GROUPS(name, ...) \
    extern "C" __global__ void __launch_bounds__(GroupTile<__VA_ARGS__>::THREADS, 1) name(const __grid_constant__ Args args, const __grid_constant__ TensorMap map) { \
        decode_groups<GroupTile<__VA_ARGS__>>(args, map); \
    } \
    NUMBERS_OF(name, GroupTile<__VA_ARGS__>)
