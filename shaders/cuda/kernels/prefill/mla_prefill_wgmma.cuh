// Prefill in MLA's expanded form by wgmma, as FlashAttention-3 does it: variant `wgmma_m128`, for compute capability 9.0.
//
//   out = softmax(scale * (q_nope . k_nope + q_pe . k_pe)) . v, lse, for one tile of query rows of one head
//
// Tile: 128 query rows a block, 64 for each of two warpgroups that multiply; a third loads blocks of KEYS keys and values, two stages of each, by
// cp.async, whose zero fill masks keys past the last one that the tile sees. A warpgroup overlaps its softmax with its own products:
//   1. scores   S of the next block = Q K^T, both operands from shared memory
//   2. values   O += P V of this block, issued behind it, P from registers
//   3. softmax  of the next block's scores while 2. runs; then O is rescaled, if some row's maximum grew
//
// mbarriers: a stage of keys, or of values, is `full` or `empty`. The grid covers max_tiles, so that a captured launch serves every work list
// that fits: blocks past its tiles leave early.
#pragma once

#include "decode/decode_order.cuh"
#include "lib/in_flight.cuh"
#include "lib/wgmma.cuh"
#include "prefill_rows.cuh"

// The tile's parameters and shared-memory layout.
template <bool IS_BF16_, int DIM_, int VALUE_, int KEYS_>
struct WgmmaTile {
    static constexpr bool IS_BF16 = IS_BF16_;
    static constexpr int DIM = DIM_, VALUE = VALUE_, KEYS = KEYS_, ROWS = 128, STAGES = 2;
    static constexpr int WARPS = 8, LOADERS = 4, THREADS = (WARPS + LOADERS) * LANES; // warps that multiply; warps that load
    static constexpr int STEPS = DIM / 16, KEY_TILES = KEYS / 8, COLUMN_TILES = VALUE / 8;
    using QueryOrder = GroupOrder<ROWS>;
    using KeyOrder = GroupOrder<KEYS>;
    static constexpr int KEYS_BYTES = KEYS * DIM * 2, VALUES_BYTES = KEYS * VALUE * 2;
    static constexpr int QUERIES_AT = 0, KEYS_AT = ROWS * DIM * 2, VALUES_AT = KEYS_AT + STAGES * KEYS_BYTES;
    // mbarriers, of 8 bytes: [STAGES] keys, [STAGES] values.
    static constexpr int FULL_AT = VALUES_AT + STAGES * VALUES_BYTES, EMPTY_AT = FULL_AT + 2 * STAGES * 8;
    static constexpr int SHARED_BYTES = EMPTY_AT + 2 * STAGES * 8;
    static_assert(DIM % 64 == 0 && VALUE % 64 == 0, "whole groups");
};

// The loader warpgroup.
template <class T>
struct PrefillLoader {
    const Args &args;
    const Tile &tile;
    const u32 shared, thread;
    InFlight in_flight;

    DEVICE void run() {
        const u32 blocks = (tile.num_keys + T::KEYS - 1) / T::KEYS;
        for (u32 i = 0; i < blocks; i++) {
            const u32 stage = i % T::STAGES, block = i * T::KEYS, count = tile.num_keys - block;
            begin(stage, i);
            copy_rows<typename T::KeyOrder, T::DIM * 2, T::KEYS, T::LOADERS * LANES, 2>(shared + T::KEYS_AT + stage * T::KEYS_BYTES, thread, count, args.nope_quads / 2, keys_from(args, tile, block));
            end(stage);
            begin(T::STAGES + stage, i);
            copy_rows<typename T::KeyOrder, T::VALUE * 2, T::KEYS, T::LOADERS * LANES, 2>(shared + T::VALUES_AT + stage * T::VALUES_BYTES, thread, count, T::VALUE / 8, values_from(args, tile, block));
            end(T::STAGES + stage);
        }
        in_flight.finish<0>();
    }

    // Waits until a stage is empty. If it is not yet, what is in flight is signalled first: the warpgroups may need it to empty the stage.
    DEVICE void begin(u32 stage, u32 i) {
        const u32 barrier = shared + T::EMPTY_AT + stage * 8, parity = i / T::STAGES % 2 ^ 1;
        if (__all_sync(~0u, has_arrived(barrier, parity))) return;
        in_flight.finish<0>();
        wait_for_arrivals(barrier, parity);
    }

    DEVICE void end(u32 stage) {
        end_of_group();
        in_flight.finish<1>();
        in_flight.barrier = shared + T::FULL_AT + stage * 8;
    }
};

template <class T>
DEVICE void attend_wgmma(const Args &args) {
    extern __shared__ __align__(1024) u8 shared_bytes[];
    let_next_kernel_begin();
    wait_for_kernel_before();
    Tile tile;
    if (!tile_of_block(args, tile)) return;
    const u32 shared = shared_address(shared_bytes);
    // Uniform in a warp, which the shuffle tells the compiler.
    const u32 lane = threadIdx.x % LANES, warp = __shfl_sync(~0u, threadIdx.x / LANES, 0), group = warp / 4;

    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < 2 * T::STAGES; i++) {
            begin_barrier(shared + T::FULL_AT + i * 8, T::LOADERS);
            begin_barrier(shared + T::EMPTY_AT + i * 8, T::WARPS);
        }
        before_tensor_copies();
    }
    __syncthreads();
    if (warp >= T::WARPS) {
        give_registers<56>();
        return PrefillLoader<T>{args, tile, shared, threadIdx.x - T::WARPS * LANES}.run();
    }
    take_registers<224>();

    // A warpgroup's own 64 query rows.
    copy_rows<typename T::QueryOrder, T::DIM * 2, 64, 4 * LANES>(shared + T::QUERIES_AT + group * (64 * 128), threadIdx.x % (4 * LANES), ~0u, args.nope_quads / 2, queries_from(args, tile, group * 64));
    end_of_group();
    wait_for_all_but<0>();
    before_tensor_copies();
    wait_for_warps<4>(1 + group);

    PrefillRows rows;
    const u32 first_row = warp * 16;
    rows.begin(tile, first_row);
    float scores[T::KEY_TILES][4], out[T::COLUMN_TILES][4] = {}, factor[2];
    u32 weights[T::KEYS / 16][4];
    const u64 queries = matrix_at(shared + T::QUERIES_AT + group * (64 * 128));
    auto full = [&](u32 stage, u32 i) { wait_for_arrivals(shared + T::FULL_AT + stage * 8, i / T::STAGES % 2); };
    auto done_with = [&](u32 stage) {
        __syncwarp();
        if (lane == 0) arrive(shared + T::EMPTY_AT + stage * 8);
    };
    // Issues the wgmma of a block's scores, asynchronously.
    auto score = [&](u32 i) {
        const u32 stage = i % T::STAGES;
        full(stage, i);
        const u64 keys = matrix_at(shared + T::KEYS_AT + stage * T::KEYS_BYTES);
        begin_multiplications(scores);
#pragma unroll
        for (int step = 0; step < T::STEPS; step++)
            multiply_keys<T::IS_BF16>(scores, queries + (T::QueryOrder::groups(step / 4) + step % 4 * 32) / 16, keys + (T::KeyOrder::groups(step / 4) + step % 4 * 32) / 16, step > 0);
        end_of_multiplications(scores);
    };
    // Issues the wgmma of a block's values, asynchronously.
    auto add = [&](u32 i) {
        const u32 stage = i % T::STAGES;
        full(T::STAGES + stage, i);
        const u64 values = matrix_at(shared + T::VALUES_AT + stage * T::VALUES_BYTES, T::KeyOrder::GROUP_BYTES);
        begin_multiplications(out);
#pragma unroll
        for (int step = 0; step < T::KEYS / 16; step++) multiply_values<T::IS_BF16>(out, weights[step], values + step * (16 * 128 / 16));
        end_of_multiplications(out);
    };
    auto pack = [&]() {
#pragma unroll
        for (int step = 0; step < T::KEYS / 16; step++) weights_of<T::IS_BF16>(scores, step * 2, weights[step]);
    };

    const u32 blocks = (tile.num_keys + T::KEYS - 1) / T::KEYS;
    if (blocks > 0) {
        score(0);
        wait_for_multiplications<0>();
        pin(scores);
        done_with(0);
        rows.weigh(scores, 0, args.logit_scale, factor);
        pack();
        for (u32 i = 1; i < blocks; i++) {
            score(i);
            add(i - 1);
            wait_for_multiplications<1>();
            pin(scores);
            done_with(i % T::STAGES);
            rows.weigh(scores, i * T::KEYS, args.logit_scale, factor);
            wait_for_multiplications<0>();
            pin(out);
            done_with(T::STAGES + (i - 1) % T::STAGES);
            rows.rescale(out, factor);
            pack();
        }
        add(blocks - 1);
        wait_for_multiplications<0>();
        pin(out);
    }
    rows.write(args, tile, first_row, out);
}

#define PREFILL(name, ...) \
    extern "C" __device__ const u32 name##_threads = WgmmaTile<__VA_ARGS__>::THREADS; \
    extern "C" __device__ const u32 name##_shared_bytes = WgmmaTile<__VA_ARGS__>::SHARED_BYTES; \
    extern "C" __global__ void __launch_bounds__(WgmmaTile<__VA_ARGS__>::THREADS, 1) name(const __grid_constant__ Args args) { \
        attend_wgmma<WgmmaTile<__VA_ARGS__>>(args); \
    }

// By P + R and V: DeepSeek and Kimi; GLM; Mistral Small 4. Of 168 registers a thread, the loader warpgroup gives up 112 by setmaxnreg.
// limits: mla_prefill_wgmma_m128_* registers=168 threads=384 shared=232448
#define PREFILLS(dtype, IS_BF16) \
    PREFILL(mla_prefill_wgmma_m128_192_128_##dtype, IS_BF16, 192, 128, 128) \
    PREFILL(mla_prefill_wgmma_m128_256_256_##dtype, IS_BF16, 256, 256, 64) \
    PREFILL(mla_prefill_wgmma_m128_128_128_##dtype, IS_BF16, 128, 128, 128)
