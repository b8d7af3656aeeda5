// Prefill in MLA's expanded form by TMA and wgmma, as FlashAttention-3 does it: variant `wgmma_m128`, for compute capability 9.0.
//
//   out = softmax(scale * (q_nope . k_nope + q_pe . k_pe)) . v, lse, for one tile of query rows of one head
//
// Tile: 128 query rows, 64 for each of two warpgroups that multiply; a loader warp copies the tile's queries and blocks of KEYS keys and
// values, two stages of each, by TMA. Softmax and products overlap:
//   1. scores   S of the next block = Q K^T, Q from registers where they have room
//   2. values   O += P V of this block, issued behind it, P from registers
//   3. softmax  of the next block's scores while 2. and the other warpgroup's products run; then O is rescaled, if some row's maximum grew
//
// mbarriers: the queries are `full`; a stage of keys, or of values, is `full` or `empty`. The grid covers max_tiles, so that a captured
// launch serves every work list that fits: blocks past its tiles leave early.
#pragma once

#include "decode/decode_order.cuh"
#include "lib/tma.cuh"
#include "lib/wgmma.cuh"
#include "prefill_rows.cuh"

// Maps of [heads, lines, tokens, 64 elements], a line being 128 bytes of a row; of one head where all heads read the same rows.
struct PrefillMaps {
    TensorMap q_nope, q_pe, k_nope, k_pe, v;
};

// The tile's parameters and shared-memory layout.
template <bool IS_BF16_, int DIM_, int VALUE_, int KEYS_>
struct WgmmaTile {
    static constexpr bool IS_BF16 = IS_BF16_;
    static constexpr int DIM = DIM_, VALUE = VALUE_, KEYS = KEYS_, ROWS = 128, STAGES = 2;
    static constexpr int WARPS = 8, THREADS = (WARPS + 4) * LANES; // warps that multiply; with a warpgroup of which one loads
    static constexpr int STEPS = DIM / 16, KEY_TILES = KEYS / 8, COLUMN_TILES = VALUE / 8;
    // Whether registers hold a warpgroup's queries: less is read from shared memory.
    static constexpr bool KEEPS_QUERIES = VALUE <= 128;
    // Whether the warpgroups issue their products by turns, so that one multiplies while the other computes its softmax. By measurement.
    static constexpr bool TAKES_TURNS = VALUE <= 128;
    using QueryOrder = GroupOrder<ROWS>;
    using KeyOrder = GroupOrder<KEYS>;
    static constexpr int QUERIES_BYTES = ROWS * DIM * 2, KEYS_BYTES = KEYS * DIM * 2, VALUES_BYTES = KEYS * VALUE * 2;
    static constexpr int QUERIES_AT = 0, KEYS_AT = QUERIES_BYTES, VALUES_AT = KEYS_AT + STAGES * KEYS_BYTES;
    // mbarriers, of 8 bytes: [STAGES] keys and [STAGES] values, full and empty; queries; a last block that is not whole, for the loader
    // itself.
    static constexpr int FULL_AT = VALUES_AT + STAGES * VALUES_BYTES, EMPTY_AT = FULL_AT + 2 * STAGES * 8;
    static constexpr int QUERIES_FULL_AT = EMPTY_AT + 2 * STAGES * 8, PART_AT = QUERIES_FULL_AT + 8, SHARED_BYTES = PART_AT + 8;
    static_assert(DIM % 64 == 0 && VALUE % 64 == 0, "whole lines");
};

// The loader warp.
template <class T>
struct PrefillLoader {
    const Args &args;
    const PrefillMaps &maps;
    const Tile &tile;
    const u32 shared, lane;

    DEVICE void run() const {
        if (lane == 0 && tile.num_keys > 0) {
            const u32 full = shared + T::QUERIES_FULL_AT;
            mbarrier_arrive_expect_tx(full, T::QUERIES_BYTES);
            copy_rows_of(shared + T::QUERIES_AT, T::QueryOrder::GROUP_BYTES, {maps.q_nope, args.q_nope}, {maps.q_pe, args.q_pe}, tile.first_token, full);
        }
        for (u32 i = 0; i * T::KEYS < tile.num_keys; i++) {
            keys(i);
            values(i);
        }
    }

    DEVICE void keys(u32 i) const {
        const u32 stage = i % T::STAGES, full = shared + T::FULL_AT + stage * 8;
        wait_until_empty(stage, i);
        if (lane != 0) return;
        mbarrier_arrive_expect_tx(full, T::KEYS_BYTES);
        copy_rows_of(shared + T::KEYS_AT + stage * T::KEYS_BYTES, T::KeyOrder::GROUP_BYTES, {maps.k_nope, args.k_nope}, {maps.k_pe, args.k_pe}, tile.kv_begin + i * T::KEYS, full);
    }

    // Keys past the tile's are masked, but 0 times what is there may be NaN: their values become 0 before the block is full.
    DEVICE void values(u32 i) const {
        const u32 stage = i % T::STAGES, to = shared + T::VALUES_AT + stage * T::VALUES_BYTES, full = shared + T::FULL_AT + (T::STAGES + stage) * 8;
        const u32 own = tile.num_keys - i * T::KEYS;
        const bool is_part = own < T::KEYS;
        const u32 landed = is_part ? shared + T::PART_AT : full;
        wait_until_empty(T::STAGES + stage, i);
        if (lane == 0) {
            mbarrier_arrive_expect_tx(landed, T::VALUES_BYTES);
            copy_box(to, maps.v, tile.kv_begin + i * T::KEYS, head_of(args.v), landed);
        }
        if (!is_part) return;
        mbarrier_wait(landed, 0);
        const u32 zeros[4] = {};
        for (u32 chunk = own * 8 + lane; chunk < T::KEYS * 8; chunk += LANES) {
#pragma unroll
            for (int group = 0; group < T::VALUE / 64; group++) store_16(to + T::KeyOrder::groups(group) + chunk * 16, zeros);
        }
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) arrive(full);
    }

    struct Rows {
        const TensorMap &map;
        const Place &place;
    };

    // From a row on: the part without rotary embedding, then the rotary part, if there is one.
    DEVICE void copy_rows_of(u32 to, u32 line_bytes, Rows nope, Rows pe, u32 row, u32 barrier) const {
        copy_box(to, nope.map, row, head_of(nope.place), barrier);
        if (args.nope_quads < T::DIM / 4) copy_box(to + args.nope_quads / 16 * line_bytes, pe.map, row, head_of(pe.place), barrier);
    }

    DEVICE u32 head_of(const Place &rows) const { return rows.head_stride > 0 ? tile.head : 0; }

    DEVICE void wait_until_empty(u32 stage, u32 i) const { mbarrier_wait(shared + T::EMPTY_AT + stage * 8, i / T::STAGES % 2 ^ 1); }
};

// One of the two warpgroups that multiply.
template <class T>
struct PrefillGroup {
    const Args &args;
    const Tile &tile;
    const u32 shared, lane, warp, group;

    using Queries = u32[T::KEEPS_QUERIES ? T::STEPS : 1][4];
    using Scores = float[T::KEY_TILES][4];
    using Weights = u32[T::KEYS / 16][4];
    using Out = float[T::COLUMN_TILES][4];

    DEVICE void run() const {
        PrefillRows rows;
        rows.begin(tile, warp * 16);
        Queries queries;
        Scores scores;
        Weights weights;
        Out out = {};
        float factor[2];
        const u32 blocks = (tile.num_keys + T::KEYS - 1) / T::KEYS;
        if (blocks > 0) {
            if (group == 1) end_turn();
            mbarrier_wait(shared + T::QUERIES_FULL_AT, 0);
            keep(queries);
            begin_turn();
            score(0, queries, scores);
            end_turn();
            wgmma_wait<0>();
            pin(scores);
            done_with(0);
            rows.weigh(scores, 0, args.logit_scale, factor);
            pack(scores, weights);
            for (u32 i = 1; i < blocks; i++) {
                begin_turn();
                score(i, queries, scores);
                add(i - 1, weights, out);
                end_turn();
                wgmma_wait<1>();
                pin(scores);
                done_with(i % T::STAGES);
                rows.weigh(scores, i * T::KEYS, args.logit_scale, factor);
                wgmma_wait<0>();
                pin(out);
                done_with(T::STAGES + (i - 1) % T::STAGES);
                rows.rescale(out, factor);
                pack(scores, weights);
            }
            if (group == 0) begin_turn();
            add(blocks - 1, weights, out);
            wgmma_wait<0>();
            pin(out);
        }
        rows.write(args, tile, warp * 16, out);
    }

    DEVICE void keep(Queries &queries) const {
        if constexpr (T::KEEPS_QUERIES) {
#pragma unroll
            for (int step = 0; step < T::STEPS; step++)
                load_matrices(queries[step], shared + T::QUERIES_AT + T::QueryOrder::at(warp * 16 + lane % 16, step * 2 + lane / 16));
        }
    }

    // Issues the wgmma of a block's scores, asynchronously.
    DEVICE void score(u32 i, const Queries &queries, Scores &scores) const {
        const u32 stage = i % T::STAGES;
        wait_until_full(stage, i);
        const u64 own = matrix_at(shared + T::QUERIES_AT + group * (64 * 128)), keys = matrix_at(shared + T::KEYS_AT + stage * T::KEYS_BYTES);
        begin_multiplications(scores);
#pragma unroll
        for (int step = 0; step < T::STEPS; step++) {
            const u64 some = keys + (T::KeyOrder::groups(step / 4) + step % 4 * 32) / 16;
            if constexpr (T::KEEPS_QUERIES) {
                multiply_keys<T::IS_BF16>(scores, queries[step], some, step > 0);
            } else {
                multiply_keys<T::IS_BF16>(scores, own + (T::QueryOrder::groups(step / 4) + step % 4 * 32) / 16, some, step > 0);
            }
        }
        end_of_multiplications(scores);
    }

    // Issues the wgmma of a block's values, asynchronously.
    DEVICE void add(u32 i, const Weights &weights, Out &out) const {
        const u32 stage = i % T::STAGES;
        wait_until_full(T::STAGES + stage, i);
        const u64 values = matrix_at(shared + T::VALUES_AT + stage * T::VALUES_BYTES, T::KeyOrder::GROUP_BYTES);
        begin_multiplications(out);
#pragma unroll
        for (int step = 0; step < T::KEYS / 16; step++) multiply_values<T::IS_BF16>(out, weights[step], values + step * (16 * 128 / 16));
        end_of_multiplications(out);
    }

    DEVICE static void pack(const Scores &scores, Weights &weights) {
#pragma unroll
        for (int step = 0; step < T::KEYS / 16; step++) weights_of<T::IS_BF16>(scores, step * 2, weights[step]);
    }

    DEVICE void begin_turn() const {
        if (T::TAKES_TURNS) bar_sync<8>(1 + group);
    }

    DEVICE void end_turn() const {
        if (T::TAKES_TURNS) bar_arrive<8>(2 - group);
    }

    DEVICE void wait_until_full(u32 stage, u32 i) const { mbarrier_wait(shared + T::FULL_AT + stage * 8, i / T::STAGES % 2); }

    DEVICE void done_with(u32 stage) const {
        __syncwarp();
        if (lane == 0) arrive(shared + T::EMPTY_AT + stage * 8);
    }
};

template <class T>
DEVICE void attend_wgmma(const Args &args, const PrefillMaps &maps) {
    extern __shared__ __align__(1024) u8 shared_bytes[];
    const u32 shared = shared_address(shared_bytes);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < 2 * T::STAGES; i++) {
            mbarrier_init(shared + T::FULL_AT + i * 8, 1);
            mbarrier_init(shared + T::EMPTY_AT + i * 8, T::WARPS);
        }
        mbarrier_init(shared + T::QUERIES_FULL_AT, 1);
        mbarrier_init(shared + T::PART_AT, 1);
        fence_proxy_async();
    }
    __syncthreads();
    griddep_launch();
    griddep_wait();
    Tile tile;
    if (!tile_of_block(args, tile)) return;
    // Uniform in a warp, which the shuffle tells the compiler.
    const u32 lane = threadIdx.x % LANES, warp = __shfl_sync(~0u, threadIdx.x / LANES, 0);
    if (warp >= T::WARPS) {
        setmaxnreg_dec<24>();
        if (warp == T::WARPS) PrefillLoader<T>{args, maps, tile, shared, lane}.run();
    } else {
        setmaxnreg_inc<240>();
        PrefillGroup<T>{args, tile, shared, lane, warp, warp / 4}.run();
    }
}

#define PREFILL(name, ...) \
    extern "C" __device__ const u32 name##_threads = WgmmaTile<__VA_ARGS__>::THREADS; \
    extern "C" __device__ const u32 name##_shared_bytes = WgmmaTile<__VA_ARGS__>::SHARED_BYTES; \
    extern "C" __device__ const u32 name##_tokens = WgmmaTile<__VA_ARGS__>::KEYS; \
    extern "C" __global__ void __launch_bounds__(WgmmaTile<__VA_ARGS__>::THREADS, 1) name(const __grid_constant__ Args args, const __grid_constant__ PrefillMaps maps) { \
        attend_wgmma<WgmmaTile<__VA_ARGS__>>(args, maps); \
    }

// By P + R and V: DeepSeek and Kimi; GLM; Mistral Small 4. Of 168 registers a thread, the loader's warpgroup gives up 144 by setmaxnreg.
// limits: mla_prefill_wgmma_m128_* registers=168 threads=384 shared=232448
#define PREFILLS(dtype, IS_BF16) \
    PREFILL(mla_prefill_wgmma_m128_192_128_##dtype, IS_BF16, 192, 128, 128) \
    PREFILL(mla_prefill_wgmma_m128_256_256_##dtype, IS_BF16, 256, 256, 80) \
    PREFILL(mla_prefill_wgmma_m128_128_128_##dtype, IS_BF16, 128, 128, 128)
