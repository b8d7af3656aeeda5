// Batched GEMM, one matrix a head, by TMA and wgmma for compute capability 9.0: the tiles of variant `mma` for many tokens.
//
//   for token of the table's range, head: y[token][head] = x[token][head] . W[head]
//
// Tile: TOKENS x COLUMNS of one head, 128 x 256 where W is [k, n] (absorb), 256 x 128 where it is [n, k] (v_up, k_up); half of the tokens
// for each of two warpgroups that multiply. A loader warp copies slices of DEPTH of k, STAGES of them, by TMA. Blocks are persistent: the
// loader copies for the next tile while this one is stored. k is summed in ascending steps of 16, as head_project_mma.cuh does.
//
// mbarriers: a stage is `full` or `empty`. Past the arrays' ends TMA gives zeros, whose products are not stored.
#pragma once

#include "decode/decode_order.cuh"
#include "lib/tma.cuh"
#include "lib/wgmma.cuh"
#include "project_store.cuh"

// Tensor maps of x, [heads, lines, tokens, 64 elements], and of the matrices, in the order in which they lie; a line is 128 bytes of a row.
struct ProjectMaps {
    TensorMap x, weight;
};

// The tile's parameters and shared-memory layout: stages of x, then weights.
template <bool IS_BF16_, bool IS_KN_>
struct WgmmaTile {
    static constexpr bool IS_BF16 = IS_BF16_, IS_KN = IS_KN_;
    static constexpr int TOKENS = IS_KN ? 128 : 256, COLUMNS = IS_KN ? 256 : 128, DEPTH = 64, STAGES = 4;
    static constexpr int WARPS = 8, THREADS = (WARPS + 4) * LANES; // warps that multiply; with a warpgroup of which one loads
    static constexpr int PARTS = TOKENS / 128, COLUMN_TILES = COLUMNS / 8; // of 64 tokens for each warpgroup
    using XOrder = GroupOrder<TOKENS>;
    using WeightOrder = GroupOrder<IS_KN ? DEPTH : COLUMNS>;
    static constexpr int X_BYTES = TOKENS * DEPTH * 2, STAGE_BYTES = X_BYTES + COLUMNS * DEPTH * 2;
    static constexpr int FULL_AT = STAGES * STAGE_BYTES, EMPTY_AT = FULL_AT + STAGES * 8, SUMS_AT = EMPTY_AT + STAGES * 8;
    using Sums = SumOrder<COLUMN_TILES>;
    static constexpr int SHARED_BYTES = SUMS_AT + WARPS * Sums::BYTES;
};

// The tiles of a block, one after another, and the number of slices that it has begun.
template <class T>
struct ProjectTiles {
    const Args &args;
    const u32 slices; // of a tile
    u32 index, count = 0;

    DEVICE ProjectTiles(const Args &args) : args(args), slices(args.k_quads * 4 / T::DEPTH), index(blockIdx.x) {}

    // The next tile that has tokens.
    DEVICE bool next(Tile &tile) {
        for (const u32 tiles = args.num_tiles; index < tiles;) {
            tile = tile_at<T::TOKENS, T::COLUMNS>(args, index);
            index += gridDim.x;
            if (has_tokens(args, tile)) return true;
        }
        return false;
    }

    DEVICE u32 stage() const { return count % T::STAGES; }
    DEVICE u32 parity() const { return count / T::STAGES % 2; }
};

// The loader's only thread.
template <class T>
DEVICE void load_tiles(const Args &args, const ProjectMaps &maps, u32 shared) {
    Tile tile;
    for (ProjectTiles<T> tiles(args); tiles.next(tile);) {
        const u32 x_head = args.x.head_stride > 0 ? tile.head : 0, weight_head = args.weight.head_stride > 0 ? tile.head : 0;
        for (u32 slice = 0; slice < tiles.slices; slice++, tiles.count++) {
            const u32 x = shared + tiles.stage() * T::STAGE_BYTES, full = shared + T::FULL_AT + tiles.stage() * 8;
            mbarrier_wait(shared + T::EMPTY_AT + tiles.stage() * 8, tiles.parity() ^ 1);
            mbarrier_arrive_expect_tx(full, T::STAGE_BYTES);
            copy_lines(x, maps.x, tile.first + tile.begin, slice, x_head, full);
            if constexpr (T::IS_KN) {
                copy_lines(x + T::X_BYTES, maps.weight, slice * T::DEPTH, tile.first_column / 64, weight_head, full);
            } else {
                copy_lines(x + T::X_BYTES, maps.weight, tile.first_column, slice, weight_head, full);
            }
        }
    }
}

// One of the two warpgroups that multiply.
template <class T>
DEVICE void multiply_tiles(const Args &args, u32 shared, u32 lane, u32 warp) {
    const u32 first_row = warp / 4 * (T::TOKENS / 2);
    Tile tile;
    for (ProjectTiles<T> tiles(args); tiles.next(tile);) {
        float sums[T::PARTS][1][T::COLUMN_TILES][4] = {};
        u32 before = 0;
#pragma unroll 1
        for (u32 slice = 0; slice < tiles.slices; slice++, tiles.count++) {
            const u32 x = shared + tiles.stage() * T::STAGE_BYTES;
            mbarrier_wait(shared + T::FULL_AT + tiles.stage() * 8, tiles.parity());
            const u64 left = matrix_at(x + first_row * 128), right = matrix_at(x + T::X_BYTES, T::IS_KN ? T::WeightOrder::GROUP_BYTES : 0);
#pragma unroll
            for (int part = 0; part < T::PARTS; part++) pin(sums[part][0]);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < T::DEPTH / 16; step++) {
#pragma unroll
                for (int part = 0; part < T::PARTS; part++) {
                    const u64 rows = left + (part * (64 * 128) + step * 32) / 16;
                    if constexpr (T::IS_KN) {
                        multiply_columns<T::IS_BF16>(sums[part][0], rows, right + step * (16 * 128 / 16), true);
                    } else {
                        multiply_keys<T::IS_BF16>(sums[part][0], rows, right + step * 32 / 16, true);
                    }
                }
            }
            wgmma_commit();
#pragma unroll
            for (int part = 0; part < T::PARTS; part++) pin(sums[part][0]);
            if (slice > 0) {
                wgmma_wait<1>();
                if (lane == 0) arrive(before);
            }
            before = shared + T::EMPTY_AT + tiles.stage() * 8;
        }
        wgmma_wait<0>();
        if (lane == 0) arrive(before);
        unrolled<T::PARTS>([&](auto part) {
            pin(sums[part.value][0]);
            const u32 tokens = tile.count - tile.begin, columns = args.n_quads * 4 - tile.first_column;
            const u32 row = first_row + part.value * 64 + warp % 4 * 16, seen = seen_by(args.guard.row);
            Lost lost = store_products(args, tile, tokens, columns, row, 0, 1.0f, sums[part.value], shared + T::SUMS_AT + warp * T::Sums::BYTES);
            if (args.guard.row) {
                // A tile is so large that its eight warps may add one by one.
                lost.add_of_warp(args.guard.row, seen);
            }
        });
    }
}

template <class T>
DEVICE void project_wgmma(const Args &args, const ProjectMaps &maps) {
    extern __shared__ __align__(1024) u8 shared_bytes[];
    const u32 shared = shared_address(shared_bytes);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < T::STAGES; i++) {
            mbarrier_init(shared + T::FULL_AT + i * 8, 1);
            mbarrier_init(shared + T::EMPTY_AT + i * 8, T::WARPS);
        }
        fence_proxy_async();
    }
    __syncthreads();
    griddep_launch();
    griddep_wait();
    // Uniform in a warp, which the shuffle tells the compiler.
    const u32 lane = threadIdx.x % LANES, warp = __shfl_sync(~0u, threadIdx.x / LANES, 0);
    if (warp >= T::WARPS) {
        setmaxnreg_dec<24>();
        if (warp == T::WARPS && lane == 0) load_tiles<T>(args, maps, shared);
    } else {
        setmaxnreg_inc<240>();
        multiply_tiles<T>(args, shared, lane, warp);
    }
}

#define PROJECT(name, ...) \
    extern "C" __device__ const u32 name##_threads = WgmmaTile<__VA_ARGS__>::THREADS; \
    extern "C" __device__ const u32 name##_shared_bytes = WgmmaTile<__VA_ARGS__>::SHARED_BYTES; \
    extern "C" __global__ void __launch_bounds__(WgmmaTile<__VA_ARGS__>::THREADS, 1) name(const __grid_constant__ Args args, const __grid_constant__ ProjectMaps maps) { \
        project_wgmma<WgmmaTile<__VA_ARGS__>>(args, maps); \
    }

// The kernel is compiled for 168 registers a thread, of which the loader's warpgroup releases 144 by setmaxnreg.
// limits: head_project_wgmma_* registers=168 threads=384 shared=232448
#define PROJECTS(dtype, IS_BF16) \
    PROJECT(head_project_wgmma_m128n256_kn_##dtype, IS_BF16, true) \
    PROJECT(head_project_wgmma_m256n128_nk_##dtype, IS_BF16, false)
