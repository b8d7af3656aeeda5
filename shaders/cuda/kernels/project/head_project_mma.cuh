// Batched GEMM, one matrix a head, on tensor cores (mma.sync m16n8k16): variants `mma` and `mma_*`, for x of a 16-bit dtype and weights
// of the same, or of e4m3.
//
//   for token of the table's range, head: y[token][head] = x[token][head] . W[head]
//
// Tile: TOKENS x COLUMNS of one head a block, WARPS_M x WARPS_N warps, k in slices of DEPTH through STAGES stages of shared memory, copied
// by cp.async. Every tile sums k in ascending steps of 16 into one accumulator, so a token's bits do not depend on the tile, nor on how
// many tokens there are.
//
// Codes of e4m3 are widened to the dtype of x when a slice has come, so they are multiplied as weights that were prepared in 16 bits. The
// sums are multiplied by their head's scale at the end.
//
// Zeros past the end of k, of the columns and of the tokens; products of the latter two are not stored. The grid covers max_tokens, so that
// a captured launch serves every range that fits: blocks past its tokens leave early.
#pragma once

#include "codes.cuh"
#include "decode/decode_order.cuh"
#include "project_store.cuh"

constexpr int DEPTH = 64, CHUNKS = DEPTH / 8;

// The tile's parameters and shared-memory layout: WIDES slices of widened codes, then stages of x, then weights as they lie.
template <bool IS_BF16_, bool HAS_CODES_, bool IS_KN_, int TOKENS_, int COLUMNS_, int WARPS_M, int WARPS_N_, int STAGES_, int WIDES_>
struct MmaTile {
    static constexpr bool IS_BF16 = IS_BF16_, HAS_CODES = HAS_CODES_, IS_KN = IS_KN_;
    static constexpr int TOKENS = TOKENS_, COLUMNS = COLUMNS_, STAGES = STAGES_, WARPS_N = WARPS_N_;
    static constexpr int THREADS = WARPS_M * WARPS_N * LANES;
    static constexpr int WARP_TOKENS = TOKENS / WARPS_M, WARP_COLUMNS = COLUMNS / WARPS_N;
    static constexpr int ROW_TILES = WARP_TOKENS / 16, COLUMN_TILES = WARP_COLUMNS / 8;
    using XOrder = Swizzle<DEPTH * 2>;
    static constexpr int WEIGHT_ROWS = IS_KN ? DEPTH : COLUMNS, WEIGHT_COLUMNS = IS_KN ? COLUMNS : DEPTH;
    using WeightOrder = Swizzle<WEIGHT_COLUMNS * 2>;
    static constexpr int WEIGHT_BYTES = COLUMNS * DEPTH * 2, WIDES = HAS_CODES ? WIDES_ : 0, WIDE_BYTES = WIDES * WEIGHT_BYTES;
    static constexpr int X_BYTES = TOKENS * DEPTH * 2, STAGE_BYTES = X_BYTES + (HAS_CODES ? WEIGHT_BYTES / 2 : WEIGHT_BYTES);
    static constexpr int SHARED_BYTES = WIDE_BYTES + STAGES * STAGE_BYTES;
    // A chunk is 16 bytes.
    static constexpr int ELEMENT_BYTES = HAS_CODES ? 1 : 2, CHUNK_WEIGHTS = 16 / ELEMENT_BYTES;
    using Sums = SumOrder<COLUMN_TILES>;
    // A launch has at least one stage.
    static_assert(WARPS_M * WARPS_N * Sums::BYTES <= WIDE_BYTES + STAGE_BYTES, "the sums' order fits where slices were");
    static_assert(WARP_TOKENS % 16 == 0 && WARP_COLUMNS % 16 == 0, "whole fragments");
};

// Where a tile begins, and how far it goes.
struct Source {
    u64 x, weight;
    u32 tokens, k_chunks, columns, column_chunks;
};

// Issues cp.async of ROWS rows of ROW_CHUNKS chunks of 16 bytes by THREADS threads. Zeros from row `rows` and from chunk `chunks` on.
template <class Order, int ROWS, int ROW_CHUNKS, int THREADS>
DEVICE void copy_rows(u32 to, u64 from, u64 stride, u32 rows, u32 chunks) {
    constexpr int PASS_ROWS = THREADS / ROW_CHUNKS;
    static_assert(ROWS % PASS_ROWS == 0, "whole passes");
    const u32 row = threadIdx.x / ROW_CHUNKS, chunk = threadIdx.x % ROW_CHUNKS;
    from += row * stride + chunk * 16;
#pragma unroll
    for (int pass = 0; pass < ROWS / PASS_ROWS; pass++) {
        const u32 at = pass * PASS_ROWS + row;
        copy_16(to + Order::at(at, chunk), reinterpret_cast<const void *>(from), at < rows && chunk < chunks, true);
        from += PASS_ROWS * stride;
    }
}

template <class T>
DEVICE void copy_slice(const Args &args, const Source &source, u32 slice, u32 to) {
    const u32 chunks = source.k_chunks - slice * CHUNKS;
    copy_rows<typename T::XOrder, T::TOKENS, CHUNKS, T::THREADS>(to, source.x + slice * (DEPTH * 2), args.x.token_stride, source.tokens, chunks);
    const u64 weight = source.weight + (T::IS_KN ? slice * DEPTH * args.weight.token_stride : slice * (DEPTH * T::ELEMENT_BYTES));
    if constexpr (T::HAS_CODES) {
        copy_codes<T>(to + T::X_BYTES, weight, args.weight.token_stride, T::IS_KN ? chunks * 8 : source.columns, T::IS_KN ? source.column_chunks : chunks / 2);
    } else if constexpr (T::IS_KN) {
        copy_rows<typename T::WeightOrder, DEPTH, T::COLUMNS / 8, T::THREADS>(to + T::X_BYTES, weight, args.weight.token_stride, chunks * 8, source.column_chunks);
    } else {
        copy_rows<typename T::WeightOrder, T::COLUMNS, CHUNKS, T::THREADS>(to + T::X_BYTES, weight, args.weight.token_stride, source.columns, chunks);
    }
}

// Fetches a tile's weights into the L2, where all writes to them go: the kernel before may still be writing them.
template <class T>
DEVICE void prefetch_weights(const Args &args, const Source &source) {
    const u32 rows = T::IS_KN ? source.k_chunks * 8 : min(source.columns, T::COLUMNS);
    const u32 chunks = T::IS_KN ? min(source.column_chunks, T::COLUMNS / T::CHUNK_WEIGHTS) : source.k_chunks * 8 / T::CHUNK_WEIGHTS;
    const u32 parts = (chunks + 3) / 4;
    // Threads a row: one for each part of 64 bytes of the widest row.
    constexpr u32 PARTS = T::IS_KN ? (T::COLUMNS + 4 * T::CHUNK_WEIGHTS - 1) / (4 * T::CHUNK_WEIGHTS) : 16;
#pragma unroll 1
    for (u32 row = threadIdx.x / PARTS; row < rows; row += T::THREADS / PARTS) {
        const u64 from = source.weight + row * args.weight.token_stride;
#pragma unroll 1
        for (u32 part = threadIdx.x % PARTS; part < parts; part += PARTS) prefetch_to_l2(from + part * 64);
    }
}

template <class T>
DEVICE void project_mma(const Args &args) {
    extern __shared__ __align__(1024) u8 shared[];
    griddep_launch();
    Tile tile = tile_of_block<T::TOKENS, T::COLUMNS>(args);
    Source source;
    source.k_chunks = args.k_quads / 2;
    source.columns = args.n_quads * 4 - tile.first_column;
    source.column_chunks = source.columns / T::CHUNK_WEIGHTS;
    source.weight = row_of(args.weight, T::IS_KN ? 0 : tile.first_column, tile.head) + (T::IS_KN ? tile.first_column * T::ELEMENT_BYTES : 0);
    if (args.prefetches && tile.begin == 0) prefetch_weights<T>(args, source);
    // The host writes the table, no kernel does.
    const bool any = has_tokens(args, tile);
    griddep_wait();
    if (!any) return;
    source.tokens = tile.count - tile.begin;
    source.x = row_of(args.x, tile.first + tile.begin, tile.head);

    const float of_head = T::HAS_CODES ? head_scale(args, tile.head) : 1.0f;
    const u32 wides = shared_address(shared), stages = wides + T::WIDE_BYTES, slices = (source.k_chunks + CHUNKS - 1) / CHUNKS;
#pragma unroll 1
    for (u32 slice = 0; slice < T::STAGES - 1; slice++) {
        if (slice < slices) copy_slice<T>(args, source, slice, stages + slice * T::STAGE_BYTES);
        cp_async_commit();
    }

    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const u32 first_row = warp / T::WARPS_N * T::WARP_TOKENS, first_column = warp % T::WARPS_N * T::WARP_COLUMNS;
    // ldmatrix addresses: of x, 16 tokens of two chunks; of weights, two chunks of 16 columns, or transposed, 16 rows of two chunks.
    const u32 x_at = T::XOrder::at(first_row + lane % 16, lane / 16);
    const u32 weight_at = (T::HAS_CODES ? 0 : T::X_BYTES) + (T::IS_KN ? T::WeightOrder::at(lane % 16, first_column / 8 + lane / 16) : T::WeightOrder::at(first_column + lane % 8 + lane / 16 * 8, lane / 8 % 2));
    float sums[T::ROW_TILES][T::COLUMN_TILES][4] = {};

    u32 stage = stages, free = stages + (T::STAGES - 1) * T::STAGE_BYTES;
    const u32 last = free;
#pragma unroll 1
    for (u32 slice = 0; slice < slices; slice++) {
        cp_async_wait<T::STAGES - 2>();
        u32 weights = stage;
        if constexpr (T::HAS_CODES) {
            // With two slices of them, this one was read two slices ago, and the last barrier was after that.
            if (T::WIDES == 1) __syncthreads();
            weights = wides + slice % T::WIDES * T::WEIGHT_BYTES;
            widen_codes<T>(stage + T::X_BYTES, weights);
        }
        __syncthreads();
        if (slice + T::STAGES - 1 < slices) copy_slice<T>(args, source, slice + T::STAGES - 1, free);
        cp_async_commit();
#pragma unroll
        for (int step = 0; step < DEPTH / 16; step++) {
            u32 a[T::ROW_TILES][4];
#pragma unroll
            for (int i = 0; i < T::ROW_TILES; i++) load_matrices(a[i], T::XOrder::rows(T::XOrder::from(stage + x_at, step * 2), i * 16));
#pragma unroll
            for (int j = 0; j < T::COLUMN_TILES; j += 2) {
                u32 b[4];
                if constexpr (T::IS_KN) {
                    load_matrices_transposed(b, T::WeightOrder::rows(T::WeightOrder::from(weights + weight_at, j), step * 16));
                } else {
                    load_matrices(b, T::WeightOrder::rows(T::WeightOrder::from(weights + weight_at, step * 2), j * 8));
                }
#pragma unroll
                for (int i = 0; i < T::ROW_TILES; i++) {
                    multiply_16_bit<T::IS_BF16>(sums[i][j], a[i], b[0], b[1]);
                    multiply_16_bit<T::IS_BF16>(sums[i][j + 1], a[i], b[2], b[3]);
                }
            }
        }
        free = stage;
        stage = stage == last ? stages : stage + T::STAGE_BYTES;
    }
    const u32 seen = seen_by(args.guard.row);
    // Nothing reads the slices any more.
    __syncthreads();
    Lost lost = store_products(args, tile, source.tokens, source.columns, first_row, first_column, of_head, sums, wides + warp * T::Sums::BYTES);
    if (args.guard.row) {
        __syncthreads();
        lost.add_of_block<T::THREADS / LANES>(args.guard.row, seen, (WarpLost *)shared);
    }
}

#define PROJECT(name, BLOCKS, ...) \
    extern "C" __device__ const u32 name##_threads = MmaTile<__VA_ARGS__>::THREADS; \
    extern "C" __device__ const u32 name##_shared_bytes = MmaTile<__VA_ARGS__>::SHARED_BYTES; \
    extern "C" __global__ void __launch_bounds__(MmaTile<__VA_ARGS__>::THREADS, BLOCKS) name(const __grid_constant__ Args args) { \
        project_mma<MmaTile<__VA_ARGS__>>(args); \
    }

// All fit the 99 KB of shared memory of a desktop card. A launch asks for the stages that its k fills.
// limits: head_project_mma_m16n32_* registers=128 threads=64 shared=101376
// limits: head_project_mma_m64n32_* registers=128 threads=128 shared=101376
// limits: head_project_mma_m64n64_* registers=128 threads=128 shared=101376
// limits: head_project_mma_m128n128_* registers=128 threads=256 shared=101376
#define PROJECTS_OF_ORDER(order, of, IS_BF16, HAS_CODES, IS_KN) \
    /*      entry                                blocks                       tokens columns warps stages wides */ \
    PROJECT(head_project_mma_m16n32_##order##_##of, 8, IS_BF16, HAS_CODES, IS_KN, 16, 32, 1, 2, 9, 2) \
    PROJECT(head_project_mma_m64n32_##order##_##of, 4, IS_BF16, HAS_CODES, IS_KN, 64, 32, 4, 1, 8, 2) \
    PROJECT(head_project_mma_m64n64_##order##_##of, 4, IS_BF16, HAS_CODES, IS_KN, 64, 64, 2, 2, 5, 2) \
    PROJECT(head_project_mma_m128n128_##order##_##of, 2, IS_BF16, HAS_CODES, IS_KN, 128, 128, 2, 4, 3, 1)
#define PROJECTS(of, IS_BF16, HAS_CODES) \
    PROJECTS_OF_ORDER(kn, of, IS_BF16, HAS_CODES, true) \
    PROJECTS_OF_ORDER(nk, of, IS_BF16, HAS_CODES, false)
