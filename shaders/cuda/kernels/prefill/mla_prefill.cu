// FlashAttention-style prefill in MLA's expanded form (ragged batch, causal), in f32 without tensor cores. The same work list as
// shaders/mla_prefill.wgsl.
//
//   out = softmax(scale * (q_nope . k_nope + q_pe . k_pe)) . v, lse, for one tile of query rows of one head
//
// Tile: ROWS query rows a block, looping over blocks of KEYS keys:
//   1. scores   ROWS x KEYS dot products; a slice of 4 * DEPTH_QUADS columns of queries and keys is in shared memory at a time
//   2. softmax  online: the 16 threads of a row are consecutive lanes of a warp
//   3. values   weights x values, VALUE_KEYS keys at a time, staged where the slices were
//
// A thread owns ROWS / 16 rows, 16 apart; for these 4 keys, 16 apart, then COLUMN_QUADS quads (4 consecutive elements) of the output. Keys
// past the last visible one of the tile repeat it and weigh 0. With f32 inputs a block of keys is summed from 0, and blocks are added up
// with compensation, so that many keys cost no digits; half of the columns at a time, as registers are short.
//
// The grid covers max_tiles, so that a captured launch serves every work list that fits: blocks past its tiles leave early.

// limits: mla_prefill_128 registers=168 threads=256
// limits: mla_prefill_256 registers=128 threads=256
// limits: mla_prefill_exact registers=128 threads=256

#include "lib/sum.cuh"
#include "prefill.cuh"

#define THREADS 256u
#define KEYS 64u
#define DEPTH_QUADS 8u
// In float4. One more than the data: 8 lanes that read consecutive rows have no bank conflicts.
#define SLICE_PITCH (DEPTH_QUADS + 1)
#define WEIGHT_PITCH (KEYS / 4 + 1)

// Stages a slice of queries, then of keys; zeros past their last quad.
template <u32 ROWS>
__device__ __forceinline__ void stage_slice(const Args &args, const Tile &tile, u32 block, u32 slice, float4 *staged) {
    constexpr u32 LOADS = (ROWS + KEYS) * DEPTH_QUADS / THREADS;
    u32 quad = slice * DEPTH_QUADS + threadIdx.x % DEPTH_QUADS;
    u32 near = min(quad, args.quads - 1);
    bool is_nope = near < args.nope_quads;
    u32 column = (is_nope ? near : near - args.nope_quads) * quad_bytes(args.dtype);
    u64 at[LOADS];
    float4 loaded[LOADS];
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) {
        u32 row = (i * THREADS + threadIdx.x) / DEPTH_QUADS;
        // Uniform over the block: ROWS is a whole number of iterations.
        if (i * THREADS / DEPTH_QUADS < ROWS) {
            at[i] = row_of(is_nope ? args.q_nope : args.q_pe, token_of(args, tile, row), tile.head) + column;
        } else {
            at[i] = row_of(is_nope ? args.k_nope : args.k_pe, key_of(args, tile, block + row - ROWS), tile.head) + column;
        }
    }
    read_quads(at, args.dtype, loaded);
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) {
        u32 row = (i * THREADS + threadIdx.x) / DEPTH_QUADS;
        staged[row * SLICE_PITCH + threadIdx.x % DEPTH_QUADS] = quad < args.quads ? loaded[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

// Stages values from quad `first_quad` on, [VALUE_KEYS, ROW_QUADS]; columns past the last one repeat it, for sums that are not stored.
template <u32 ROW_QUADS>
__device__ __forceinline__ void stage_values(const Args &args, const Tile &tile, u32 first_key, u32 first_quad, float4 *staged) {
    u64 at[4];
    float4 loaded[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 index = i * THREADS + threadIdx.x;
        u32 quad = min(first_quad + index % ROW_QUADS, args.value_quads - 1);
        at[i] = row_of(args.v, key_of(args, tile, first_key + index / ROW_QUADS), tile.head) + quad * quad_bytes(args.dtype);
    }
    read_quads(at, args.dtype, loaded);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        staged[i * THREADS + threadIdx.x] = loaded[i];
    }
}

__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// The maximum, and below the sum, over the 16 threads of a row.
__device__ __forceinline__ float largest_of_row(float x) {
#pragma unroll
    for (u32 lanes = 1; lanes < 16; lanes *= 2) {
        x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    }
    return x;
}

__device__ __forceinline__ float sum_of_row(float x) {
#pragma unroll
    for (u32 lanes = 1; lanes < 16; lanes *= 2) {
        x += __shfl_xor_sync(~0u, x, lanes);
    }
    return x;
}

// Adds weights x values of a block of keys to COLUMN_QUADS quads of the output, those from `first_quad` on.
template <u32 ROWS_OF_THREAD, u32 COLUMN_QUADS>
__device__ __forceinline__ void add_values(const Args &args, const Tile &tile, u32 block, u32 first_quad, const float4 *weights, float4 *staged, float4 (&out)[ROWS_OF_THREAD][COLUMN_QUADS]) {
    constexpr u32 ROW_QUADS = 16 * COLUMN_QUADS;
    constexpr u32 VALUE_KEYS = 4 * THREADS / ROW_QUADS;
    u32 tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll 1
    for (u32 first = 0; first < KEYS && block + first < tile.num_keys; first += VALUE_KEYS) {
        __syncthreads();
        stage_values<ROW_QUADS>(args, tile, block + first, first_quad, staged);
        __syncthreads();
#pragma unroll 1
        for (u32 key = 0; key < VALUE_KEYS; key += 4) {
            float4 weight[ROWS_OF_THREAD];
#pragma unroll
            for (u32 i = 0; i < ROWS_OF_THREAD; i++) {
                weight[i] = weights[(i * 16 + ty) * WEIGHT_PITCH + (first + key) / 4];
            }
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
#pragma unroll
                for (u32 c = 0; c < COLUMN_QUADS; c++) {
                    float4 value = staged[(key + j) * ROW_QUADS + c * 16 + tx];
#pragma unroll
                    for (u32 i = 0; i < ROWS_OF_THREAD; i++) {
                        float w = j == 0 ? weight[i].x : j == 1 ? weight[i].y : j == 2 ? weight[i].z : weight[i].w;
                        out[i][c] = plus_product(w, value, out[i][c]);
                    }
                }
            }
        }
    }
}

template <u32 ROWS, u32 COLUMN_QUADS, bool IS_EXACT>
__device__ __forceinline__ void attend(const Args &args) {
    constexpr u32 ROWS_OF_THREAD = ROWS / 16;
    constexpr u32 TURN = IS_EXACT ? 1 : 2;
    constexpr u32 SLICES = (ROWS + KEYS) * SLICE_PITCH;
    __shared__ float4 staged[SLICES > 4 * THREADS ? SLICES : 4 * THREADS];
    __shared__ float4 weights[ROWS * WEIGHT_PITCH];

    griddep_launch();
    griddep_wait();
    Tile tile;
    if (!tile_of_block(args, tile)) {
        return;
    }
    u32 tx = threadIdx.x % 16, ty = threadIdx.x / 16;

    float row_max[ROWS_OF_THREAD], row_sum[ROWS_OF_THREAD]; // the sum is over this thread's keys only
    float4 out[ROWS_OF_THREAD][COLUMN_QUADS];
    float sum_rest[ROWS_OF_THREAD]; // of compensated sums: exact only
    float4 out_rest[ROWS_OF_THREAD][COLUMN_QUADS];
#pragma unroll
    for (u32 i = 0; i < ROWS_OF_THREAD; i++) {
        row_max[i] = EMPTY;
        row_sum[i] = sum_rest[i] = 0.0f;
#pragma unroll
        for (u32 c = 0; c < COLUMN_QUADS; c++) {
            out[i][c] = out_rest[i][c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }

#pragma unroll 1
    for (u32 block = 0; block < tile.num_keys; block += KEYS) {
        // 1. scores
        float score[ROWS_OF_THREAD][4] = {}, rest[ROWS_OF_THREAD][4] = {};
#pragma unroll 1
        for (u32 slice = 0; slice * DEPTH_QUADS < args.quads; slice++) {
            __syncthreads();
            stage_slice<ROWS>(args, tile, block, slice, staged);
            __syncthreads();
#pragma unroll 1
            for (u32 turn = 0; turn < DEPTH_QUADS; turn += TURN) {
                // Partial sums of TURN quads, for accuracy: a long running sum loses more digits of large logits.
                float part[ROWS_OF_THREAD][4] = {};
#pragma unroll
                for (u32 quad = turn; quad < turn + TURN; quad++) {
                    float4 query[ROWS_OF_THREAD];
#pragma unroll
                    for (u32 i = 0; i < ROWS_OF_THREAD; i++) {
                        query[i] = staged[(i * 16 + ty) * SLICE_PITCH + quad];
                    }
#pragma unroll
                    for (u32 j = 0; j < 4; j++) {
                        float4 key = staged[(ROWS + j * 16 + tx) * SLICE_PITCH + quad];
#pragma unroll
                        for (u32 i = 0; i < ROWS_OF_THREAD; i++) {
                            part[i][j] = dot(query[i], key, part[i][j]);
                        }
                    }
                }
#pragma unroll
                for (u32 i = 0; i < ROWS_OF_THREAD; i++) {
#pragma unroll
                    for (u32 j = 0; j < 4; j++) {
                        float sum = score[i][j] + part[i][j];
                        if (IS_EXACT) {
                            // Compensated summation (2Sum): the rounding error of the addition.
                            float added = sum - score[i][j];
                            rest[i][j] += (score[i][j] - (sum - added)) + (part[i][j] - added);
                        }
                        score[i][j] = sum;
                    }
                }
            }
        }

        // 2. softmax
#pragma unroll
        for (u32 i = 0; i < ROWS_OF_THREAD; i++) {
            u32 visible = visible_to(tile, i * 16 + ty);
            float top = row_max[i];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                top = block + j * 16 + tx < visible ? fmaxf(top, score[i][j] * args.logit_scale) : top;
            }
            top = largest_of_row(top);
            float factor = exp2_fast(row_max[i] - top);
            row_max[i] = top;
            row_sum[i] *= factor;
            if (IS_EXACT) sum_rest[i] *= factor;
#pragma unroll
            for (u32 c = 0; c < COLUMN_QUADS; c++) {
                out[i][c] = plus_product(factor, out[i][c], make_float4(0.0f, 0.0f, 0.0f, 0.0f));
                if (IS_EXACT) out_rest[i][c] = plus_product(factor, out_rest[i][c], make_float4(0.0f, 0.0f, 0.0f, 0.0f));
            }
            float block_sum = 0.0f;
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                // fma: the product is not rounded before the subtraction, so large logits lose no accuracy beyond the dot product's.
                float exponent = fmaf(score[i][j], args.logit_scale, -top);
                exponent = IS_EXACT ? fmaf(rest[i][j], args.logit_scale, exponent) : exponent;
                float weight = block + j * 16 + tx < visible ? exp2_fast(exponent) : 0.0f;
                if (IS_EXACT) {
                    block_sum += weight;
                } else {
                    row_sum[i] += weight;
                }
                ((float *)weights)[(i * 16 + ty) * (4 * WEIGHT_PITCH) + j * 16 + tx] = weight;
            }
            if (IS_EXACT) add_compensated(row_sum[i], sum_rest[i], block_sum);
        }

        // 3. values
        if (!IS_EXACT) {
            add_values(args, tile, block, 0, weights, staged, out);
        } else {
            constexpr u32 HALF = COLUMN_QUADS / 2;
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                // Uniform over the grid: a narrow output has no columns in the second half.
                if (half * 16 * HALF >= args.value_quads) break;
                float4 sums[ROWS_OF_THREAD][HALF] = {};
                add_values(args, tile, block, half * 16 * HALF, weights, staged, sums);
#pragma unroll
                for (u32 i = 0; i < ROWS_OF_THREAD; i++) {
#pragma unroll
                    for (u32 c = 0; c < HALF; c++) add_compensated(out[i][half * HALF + c], out_rest[i][half * HALF + c], sums[i][c]);
                }
            }
        }
    }

#pragma unroll
    for (u32 i = 0; i < ROWS_OF_THREAD; i++) {
        float sum = sum_of_row(IS_EXACT ? compensated(row_sum[i], sum_rest[i]) : row_sum[i]);
        u32 row = i * 16 + ty, to = tile.first_row + row;
        if (row >= tile.num_rows || to >= args.max_rows) {
            continue;
        }
        bool any = sum > 0.0f;
        float factor = any ? factor_of_row(sum) * args.v_scale : 0.0f;
#pragma unroll
        for (u32 c = 0; c < COLUMN_QUADS; c++) {
            if (c * 16 + tx < args.value_quads) {
                float4 x = IS_EXACT ? compensated(out[i][c], out_rest[i][c]) : out[i][c];
                x = make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
                store_quad(row_of(args.out, to, tile.head) + (c * 16 + tx) * quad_bytes(args.out_dtype), args.out_dtype, x);
            }
        }
        if (tx == 0) {
            float lse = lse_of_row(row_max[i], sum) * 0.693147182f;
            store_4(row_of(args.lse, to, tile.head), any ? __float_as_uint(lse) : 0xFF800000u);
        }
    }
}

// 16-bit inputs, with values of up to 128 or 256 columns; and f32 inputs (`exact`), which compensate their sums.
// mla_prefill_128 needs more registers than two blocks on a multiprocessor leave it.
extern "C" __global__ void __launch_bounds__(THREADS, 1) mla_prefill_128(const Args args) { attend<64, 2, false>(args); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) mla_prefill_256(const Args args) { attend<32, 4, false>(args); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) mla_prefill_exact(const Args args) { attend<32, 4, true>(args); }
