// Batched GEMM, one matrix a head, in f32 without tensor cores: the variant `simple`, for every dtype and format.
//
//   for token of the table's range, head: y[token][head] = x[token][head] . W[head]
//
// Tile: 16 * ROWS tokens x COLUMNS columns of one head a block, k in slices of DEPTH staged in shared memory, the next slice prefetched
// into registers; a thread owns ROWS tokens, 16 apart, x 4 columns. Each slice is summed by itself and then added, in both tiles alike, so
// a token's bits do not depend on how many tokens there are.
//
// The grid covers max_tokens, so that a captured launch serves every range that fits: blocks past its tokens leave early.

// limits: head_project_few registers=64 threads=256
// limits: head_project_many registers=128 threads=256

#include "weights.cuh"

#define THREADS 256u
#define COLUMNS 64u
#define DEPTH 32u
#define DEPTH_QUADS (DEPTH / 4)
// In float4. One more than the data: 8 lanes that read consecutive rows have no bank conflicts.
#define X_PITCH (DEPTH_QUADS + 1)
#define W_PITCH (COLUMNS / 4 + 1)

// A thread's share of a slice.
template <u32 X_LOADS> struct Slice {
    float4 x[X_LOADS];
    float4 weight[2];
};

// Loads a slice into registers. Zeros past the end of k; past the last token or column it repeats that one, for products that are not
// stored.
template <u32 X_LOADS>
__device__ __forceinline__ void load_slice(const Args &args, u32 head, u32 first_token, u32 last_token, u32 first_column, u32 slice, Slice<X_LOADS> &to) {
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    u64 at[X_LOADS];
    u32 quad = slice * DEPTH_QUADS + threadIdx.x % DEPTH_QUADS;
    u32 near = min(quad, args.k_quads - 1);
#pragma unroll
    for (u32 i = 0; i < X_LOADS; i++) {
        u32 token = min(first_token + (i * THREADS + threadIdx.x) / DEPTH_QUADS, last_token);
        at[i] = row_of(args.x, token, head) + near * quad_bytes(args.x_dtype);
    }
    read_quads(at, args.x_dtype, to.x);
#pragma unroll
    for (u32 i = 0; i < X_LOADS; i++) {
        to.x[i] = quad < args.k_quads ? to.x[i] : zero;
    }
    u64 row_at[2];
    u32 quads[2];
    bool is_used[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 index = i * THREADS + threadIdx.x;
        u32 row, column;
        if (args.is_kn) {
            row = slice * DEPTH + index / (COLUMNS / 4);
            column = min(first_column / 4 + index % (COLUMNS / 4), args.n_quads - 1);
            is_used[i] = row < 4 * args.k_quads;
            row = min(row, 4 * args.k_quads - 1);
        } else {
            row = min(first_column + index / DEPTH_QUADS, 4 * args.n_quads - 1);
            column = near;
            is_used[i] = quad < args.k_quads;
        }
        row_at[i] = row_of(args.weight, row, head);
        quads[i] = column;
    }
    read_weights(row_at, quads, args.weight_format, to.weight);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        to.weight[i] = is_used[i] ? to.weight[i] : zero;
    }
}

template <u32 ROWS>
__device__ __forceinline__ void project(const Args &args) {
    constexpr u32 TOKENS = 16 * ROWS;
    constexpr u32 X_QUADS = TOKENS * DEPTH_QUADS;
    constexpr u32 X_LOADS = (X_QUADS + THREADS - 1) / THREADS;
    __shared__ float4 x_tile[TOKENS * X_PITCH];
    __shared__ float4 weight_tile[DEPTH * W_PITCH];
    __shared__ WarpLost warps[THREADS / 32];

    Tile tile = tile_of_block<TOKENS, COLUMNS>(args);
    griddep_launch();
    griddep_wait();
    if (!has_tokens(args, tile)) {
        return;
    }
    u32 head = tile.head, first_column = tile.first_column, begin = tile.begin, first = tile.first, count = tile.count;
    u32 tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 sums[ROWS];
#pragma unroll
    for (u32 i = 0; i < ROWS; i++) {
        sums[i] = zero;
    }
    Slice<X_LOADS> next;
    load_slice(args, head, first + begin, first + count - 1, first_column, 0, next);
#pragma unroll 1
    for (u32 slice = 0; slice * DEPTH_QUADS < args.k_quads; slice++) {
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < X_LOADS; i++) {
            u32 index = i * THREADS + threadIdx.x;
            if (X_QUADS % THREADS == 0 || index < X_QUADS) {
                x_tile[index / DEPTH_QUADS * X_PITCH + index % DEPTH_QUADS] = next.x[i];
            }
        }
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 index = i * THREADS + threadIdx.x;
            if (args.is_kn) {
                weight_tile[index / (COLUMNS / 4) * W_PITCH + index % (COLUMNS / 4)] = next.weight[i];
            } else {
                float *to = (float *)weight_tile + index % DEPTH_QUADS * 4 * (4 * W_PITCH) + index / DEPTH_QUADS;
                to[0] = next.weight[i].x;
                to[4 * W_PITCH] = next.weight[i].y;
                to[2 * 4 * W_PITCH] = next.weight[i].z;
                to[3 * 4 * W_PITCH] = next.weight[i].w;
            }
        }
        __syncthreads();
        if ((slice + 1) * DEPTH_QUADS < args.k_quads) {
            load_slice(args, head, first + begin, first + count - 1, first_column, slice + 1, next);
        }
        float4 part[ROWS];
#pragma unroll
        for (u32 i = 0; i < ROWS; i++) {
            part[i] = zero;
        }
#pragma unroll 2
        for (u32 quad = 0; quad < DEPTH_QUADS; quad++) {
            float4 weight[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                weight[j] = weight_tile[(quad * 4 + j) * W_PITCH + tx];
            }
#pragma unroll
            for (u32 i = 0; i < ROWS; i++) {
                float4 x = x_tile[(i * 16 + ty) * X_PITCH + quad];
                part[i] = plus_product(x.x, weight[0], part[i]);
                part[i] = plus_product(x.y, weight[1], part[i]);
                part[i] = plus_product(x.z, weight[2], part[i]);
                part[i] = plus_product(x.w, weight[3], part[i]);
            }
        }
#pragma unroll
        for (u32 i = 0; i < ROWS; i++) {
            sums[i] = plus_product(1.0f, part[i], sums[i]);
        }
    }
    const float of_head = head_scale(args, head);
    const u32 seen = seen_by(args.guard.row);
    u32 column = first_column / 4 + tx;
    Lost lost;
#pragma unroll
    for (u32 i = 0; i < ROWS; i++) {
        sums[i] = plus_product(of_head, sums[i], zero);
        u32 token = begin + i * 16 + ty;
        if (token < count && column < args.n_quads) {
            const float4 sum = make_float4(scaled(args, sums[i].x), scaled(args, sums[i].y), scaled(args, sums[i].z), scaled(args, sums[i].w));
            if (args.guard.row) {
                const u32 magnitudes[4] = {product_magnitude(args, sums[i].x), product_magnitude(args, sums[i].y),
                                           product_magnitude(args, sums[i].z), product_magnitude(args, sums[i].w)};
                lost.note(magnitudes, args.guard);
            }
            const u64 row = row_of(args.y, first + token, head);
            if (args.y_dtype == DTYPE_E4M3) {
                const float products[4] = {sum.x, sum.y, sum.z, sum.w};
                u32 words[1];
                e4m3_codes(products, args.out_scale, words);
                store_4(row + column * 4, words[0]);
            } else {
                store_quad(row + column * quad_bytes(args.y_dtype), args.y_dtype, sum);
            }
        }
    }
    if (args.guard.row) {
        lost.add_of_block<THREADS / 32>(args.guard.row, seen, warps);
    }
}

// `few` for up to 16 tokens, `many` for more.
extern "C" __global__ void __launch_bounds__(THREADS, 4) head_project_few(const Args args) { project<1>(args); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) head_project_many(const Args args) { project<4>(args); }
