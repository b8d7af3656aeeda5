// Prefill in MLA's expanded form on tensor cores (mma.sync m16n8k16), as FlashAttention-2 does it: variants `mma_m128` and `mma_m64`.
//
//   out = softmax(scale * (q_nope . k_nope + q_pe . k_pe)) . v, lse, for one tile of query rows of one head
//
// Tile: ROWS query rows a block, 16 a warp, looping over blocks of KEYS keys, double-buffered in shared memory by cp.async. For each block:
//   1. scores   a warp multiplies its rows, kept in registers where they fit (KEPT), with all keys
//   2. softmax  online, in registers; a warp rescales its output only if some row's maximum grew
//   3. values   the weights are already fragments of the second product: no exchange
//
// Keys past the last visible one of the tile are zeros and weigh 0. Weights are rounded to the dtype of the inputs, their sum is not. The
// grid covers max_tiles, so that a captured launch serves every work list that fits: blocks past its tiles leave early.
#pragma once

#include "decode/decode_order.cuh"
#include "prefill_rows.cuh"

// The tile's parameters and shared-memory layout: queries, unless they are kept, then two stages of keys and values.
template <bool IS_BF16_, int DIM_, int VALUE_, int ROWS_, int KEYS_, bool KEPT_>
struct MmaTile {
    static constexpr bool IS_BF16 = IS_BF16_, KEPT = KEPT_;
    static constexpr int DIM = DIM_, VALUE = VALUE_, ROWS = ROWS_, KEYS = KEYS_;
    static constexpr int THREADS = ROWS / 16 * LANES;
    static constexpr int STEPS = DIM / 16, KEY_TILES = KEYS / 8, COLUMN_TILES = VALUE / 8;
    using KeyOrder = Swizzle<DIM * 2>;
    using ValueOrder = Swizzle<VALUE * 2>;
    static constexpr int KEYS_BYTES = KEYS * DIM * 2, STAGE_BYTES = KEYS_BYTES + KEYS * VALUE * 2;
    static constexpr int STAGES_AT = KEPT ? 0 : ROWS * DIM * 2;
    static constexpr int SHARED_BYTES = STAGES_AT + 2 * STAGE_BYTES;
    static_assert(DIM % 32 == 0 && VALUE % 32 == 0 && KEYS % 16 == 0, "whole swizzled groups");
};

template <class T>
DEVICE void copy_block(const Args &args, const Tile &tile, u32 block, u32 to) {
    const u32 count = tile.num_keys - block;
    copy_rows<typename T::KeyOrder, T::DIM * 2, T::KEYS, T::THREADS>(to, threadIdx.x, count, args.nope_quads / 2, keys_from(args, tile, block));
    copy_rows<typename T::ValueOrder, T::VALUE * 2, T::KEYS, T::THREADS>(to + T::KEYS_BYTES, threadIdx.x, count, T::VALUE / 8, values_from(args, tile, block));
    cp_async_commit();
}

// A warp's 16 query rows as fragments: in registers, or in shared memory.
template <class T>
struct PrefillQueries {
    u32 kept[T::KEPT ? T::STEPS : 1][4];
    u32 at;

    // From global memory, two elements a load; a lane has rows lane / 4 and lane / 4 + 8. Rows past the last repeat it.
    DEVICE void load(const Args &args, const Tile &tile, u32 staged) {
        const u32 lane = threadIdx.x % LANES, first_row = threadIdx.x / LANES * 16;
        at = staged + T::KeyOrder::at(first_row + lane % 16, lane / 16);
        const u32 nope_chunks = args.nope_quads / 2;
        if constexpr (T::KEPT) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 token = token_of(args, tile, first_row + h * 8 + lane / 4);
                const u64 nope = row_of(args.q_nope, token, tile.head), pe = row_of(args.q_pe, token, tile.head) - nope_chunks * 16;
#pragma unroll
                for (u32 chunk = 0; chunk < T::STEPS * 2; chunk++)
                    kept[chunk / 2][chunk % 2 * 2 + h] = read_4((chunk < nope_chunks ? nope : pe) + chunk * 16 + lane % 4 * 4);
            }
        } else {
            copy_rows<typename T::KeyOrder, T::DIM * 2, T::ROWS, T::THREADS>(staged, threadIdx.x, ~0u, nope_chunks, queries_from(args, tile, 0));
        }
    }

    DEVICE void get(u32 (&to)[4], int step) const {
        if constexpr (T::KEPT) {
#pragma unroll
            for (int i = 0; i < 4; i++) to[i] = kept[step][i];
        } else {
            load_matrices(to, T::KeyOrder::from(at, step * 2));
        }
    }
};

template <class T>
DEVICE void attend_mma(const Args &args) {
    extern __shared__ __align__(1024) u8 shared[];
    griddep_launch();
    griddep_wait();
    Tile tile;
    if (!tile_of_block(args, tile)) return;
    const u32 stages = shared_address(shared + T::STAGES_AT);
    const u32 lane = threadIdx.x % LANES, first_row = threadIdx.x / LANES * 16;

    PrefillQueries<T> queries;
    if (!T::KEPT) queries.load(args, tile, shared_address(shared));
    if (tile.num_keys > 0) copy_block<T>(args, tile, 0, stages);
    if (T::KEPT) queries.load(args, tile, 0);

    PrefillRows rows;
    rows.begin(tile, first_row);
    float out[T::COLUMN_TILES][4] = {};
    // ldmatrix addresses: of keys, two chunks of 16 keys; of values, transposed, 16 keys of two chunks.
    const u32 key_at = T::KeyOrder::at(lane % 8 + lane / 16 * 8, lane / 8 % 2), value_at = T::KEYS_BYTES + T::ValueOrder::at(lane % 16, lane / 16);

    u32 stage = stages;
    for (u32 block = 0; block < tile.num_keys; block += T::KEYS) {
        cp_async_wait<0>();
        __syncthreads();
        const u32 other = 2 * stages + T::STAGE_BYTES - stage;
        if (block + T::KEYS < tile.num_keys) copy_block<T>(args, tile, block + T::KEYS, other);
        if (block < rows.seen_by_any) {
            // 1. scores
            float scores[T::KEY_TILES][4] = {};
#pragma unroll
            for (int step = 0; step < T::STEPS; step++) {
                u32 a[4];
                queries.get(a, step);
#pragma unroll
                for (int j = 0; j < T::KEY_TILES; j += 2) {
                    u32 b[4];
                    load_matrices(b, T::KeyOrder::rows(T::KeyOrder::from(stage + key_at, step * 2), j * 8));
                    multiply_16_bit<T::IS_BF16>(scores[j], a, b[0], b[1]);
                    multiply_16_bit<T::IS_BF16>(scores[j + 1], a, b[2], b[3]);
                }
            }

            // 2. softmax
            float factor[2];
            rows.weigh(scores, block, args.logit_scale, factor);
            rows.rescale(out, factor);

            // 3. values
#pragma unroll
            for (int j = 0; j < T::KEY_TILES; j += 2) {
                u32 a[4];
                weights_of<T::IS_BF16>(scores, j, a);
#pragma unroll
                for (int c = 0; c < T::COLUMN_TILES; c += 2) {
                    u32 b[4];
                    load_matrices_transposed(b, T::ValueOrder::rows(T::ValueOrder::from(stage + value_at, c), j * 8));
                    multiply_16_bit<T::IS_BF16>(out[c], a, b[0], b[1]);
                    multiply_16_bit<T::IS_BF16>(out[c + 1], a, b[2], b[3]);
                }
            }
        }
        stage = other;
    }
    cp_async_wait<0>();
    rows.write(args, tile, first_row, out);
}

#define PREFILL(name, BLOCKS, ...) \
    extern "C" __device__ const u32 name##_threads = MmaTile<__VA_ARGS__>::THREADS; \
    extern "C" __device__ const u32 name##_shared_bytes = MmaTile<__VA_ARGS__>::SHARED_BYTES; \
    extern "C" __global__ void __launch_bounds__(MmaTile<__VA_ARGS__>::THREADS, BLOCKS) name(const __grid_constant__ Args args) { \
        attend_mma<MmaTile<__VA_ARGS__>>(args); \
    }

// By P + R and V: DeepSeek and Kimi; GLM; Mistral Small 4; MiniCPM3. All fit the 99 KB of shared memory of a desktop card.
// limits: mla_prefill_mma_m128_* registers=255 threads=256 shared=101376
// limits: mla_prefill_mma_m64_96_64_* registers=168 threads=128 shared=101376
// limits: mla_prefill_mma_m64_* registers=255 threads=128 shared=101376
#define PREFILLS(dtype, IS_BF16) \
    /*      entry                               blocks         D    V  rows keys kept */ \
    PREFILL(mla_prefill_mma_m128_192_128_##dtype, 1, IS_BF16, 192, 128, 128, 64, true) \
    PREFILL(mla_prefill_mma_m128_128_128_##dtype, 1, IS_BF16, 128, 128, 128, 64, true) \
    PREFILL(mla_prefill_mma_m64_192_128_##dtype, 2, IS_BF16, 192, 128, 64, 64, true) \
    PREFILL(mla_prefill_mma_m64_256_256_##dtype, 2, IS_BF16, 256, 256, 64, 32, false) \
    PREFILL(mla_prefill_mma_m64_128_128_##dtype, 2, IS_BF16, 128, 128, 64, 64, true) \
    PREFILL(mla_prefill_mma_m64_96_64_##dtype, 3, IS_BF16, 96, 64, 64, 64, true)
