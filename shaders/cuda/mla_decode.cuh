// Attention of one tile of query rows over one range of tokens on tensor cores: a split of a split-KV decode.
//
// The twin of ../mla_decode_coop.wgsl: the same work items and tables. A block takes one item. STAGES tiles of TOKENS cache rows are on
// their way to shared memory, as they lie in the cache. For each tile:
//   1. scores   ROW_WARPS x TOKEN_WARPS: each warp multiplies 16 query rows with its share of the tokens
//   2. softmax  in registers; the warps of a row tell each other their largest logit. A row's maximum moves only when it grew by more
//               than LAZY: weights stay below 2^LAZY, and the output is rarely rescaled
//   3. values   each warp owns L / WARPS columns of the output of all rows: += weights x values
//
// bf16 rows are multiplied as bf16, others as f16: FP8 codes become f16 in registers. A query that the type does not hold is split in PARTS, after a
// power of two has brought its row into f16's range.
//
// Masked tokens weigh exactly 0 and an unchanged maximum rescales by exactly 1, so a row's result does not depend on which
// rows share its tile.
#pragma once

#include "decode_queries.cuh"

constexpr float LAZY = 12.0f;

// Two FP8 codes as f16: exact, NaN stays NaN.
DEVICE u32 e4m3_to_f16(u16 codes) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    return halves;
}

template <class T>
DEVICE void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (T::CACHE == BF16) {
        multiply_bf16(sum, a, b0, b1);
    } else {
        multiply_f16(sum, a, b0, b1);
    }
}

// Scores of a warp's 16 rows and TOKEN_TILES x 8 tokens. Few tokens have several sums at a time, as a multiplication waits for the one
// before it.
template <class T>
DEVICE void score(float (&sums)[T::TOKEN_TILES][4], const Queries<T>& queries, u32 stage, u32 first_token) {
    using Order = Swizzle<T::ROW_BYTES>;
    // Where queries and a wide output leave few registers, one.
    constexpr int CHAINS = T::TOKEN_TILES == 1 ? 4 : T::TOKEN_TILES == 2 && !(T::KEEPS_QUERIES && T::ROW_TILES * T::COLUMN_TILES >= 16) ? 2 : 1;
    const u32 lane = threadIdx.x % LANES;
    float chains[CHAINS][T::TOKEN_TILES][4] = {};
    if constexpr (T::CACHE == E4M3) {
        // One chunk is the 16 columns of a step; four steps at a time, the last two twice if there are no more.
#pragma unroll
        for (int step = 0; step < T::STEPS; step += 4) {
            u32 a[T::PARTS][4][4];
#pragma unroll
            for (int part = 0; part < T::PARTS; part++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (step + i < T::STEPS) queries.get(a[part][i], part, step + i);
#pragma unroll
            for (int j = 0; j < T::TOKEN_TILES; j++) {
                const u32 row = first_token + j * 8 + lane % 8;
                u32 codes[4];
                load_matrices(codes, stage + Order::at(row, min(step + lane / 8, T::STEPS - 1)));
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (step + i >= T::STEPS) break;
                    const u32 b0 = e4m3_to_f16(static_cast<u16>(codes[i])), b1 = e4m3_to_f16(static_cast<u16>(codes[i] >> 16));
#pragma unroll
                    for (int part = 0; part < T::PARTS; part++) multiply<T>(chains[i % CHAINS][j], a[part][i], b0, b1);
                }
            }
        }
    } else if constexpr (T::TOKEN_TILES == 1) {
        const u32 row = first_token + lane % 8;
#pragma unroll
        for (int step = 0; step < T::STEPS; step += 2) {
            u32 b[4];
            load_matrices(b, stage + Order::at(row, step * 2 + lane / 8));
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int part = 0; part < T::PARTS; part++) {
                    u32 a[4];
                    queries.get(a, part, step + i);
                    multiply<T>(chains[(step + i) % CHAINS][0], a, b[2 * i], b[2 * i + 1]);
                }
            }
        }
    } else {
#pragma unroll
        for (int step = 0; step < T::STEPS; step++) {
            u32 a[T::PARTS][4];
#pragma unroll
            for (int part = 0; part < T::PARTS; part++) queries.get(a[part], part, step);
#pragma unroll
            for (int j = 0; j < T::TOKEN_TILES; j += 2) {
                const u32 row = first_token + j * 8 + lane % 8 + lane / 16 * 8;
                u32 b[4];
                load_matrices(b, stage + Order::at(row, step * 2 + lane / 8 % 2));
#pragma unroll
                for (int part = 0; part < T::PARTS; part++) {
                    multiply<T>(chains[step % CHAINS][j], a[part], b[0], b[1]);
                    multiply<T>(chains[step % CHAINS][j + 1 < T::TOKEN_TILES ? j + 1 : j], a[part], b[2], b[3]);
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < T::TOKEN_TILES; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            sums[j][e] = chains[0][j][e];
#pragma unroll
            for (int c = 1; c < CHAINS; c++) sums[j][e] += chains[c][j][e];
        }
}

// The output of all rows in a warp's columns.
template <class T>
struct Output {
    float sums[T::ROW_TILES][T::COLUMN_TILES][4] = {};

    DEVICE void rescale(const float* factors) {
        const u32 row = threadIdx.x % LANES / 4;
#pragma unroll
        for (int r = 0; r < T::ROW_TILES; r++) {
            const float low = factors[r * 16 + row], high = factors[r * 16 + 8 + row];
#pragma unroll
            for (int c = 0; c < T::COLUMN_TILES; c++) {
                sums[r][c][0] *= low;
                sums[r][c][1] *= low;
                sums[r][c][2] *= high;
                sums[r][c][3] *= high;
            }
        }
    }

    DEVICE void add(u32 weights, u32 stage) {
        using Order = Swizzle<T::ROW_BYTES>;
        const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
        const u32 weight_at = weights + lane % 16 * (T::WEIGHT_PITCH * 2) + lane / 16 * 16;
#pragma unroll
        for (int step = 0; step < T::TOKENS / 16; step++) {
            u32 a[T::ROW_TILES][4];
#pragma unroll
            for (int r = 0; r < T::ROW_TILES; r++) load_matrices(a[r], weight_at + (r * 16 * T::WEIGHT_PITCH + step * 16) * 2);
            const u32 row = step * 16 + lane % 16;
            if constexpr (T::CACHE == E4M3) {
                // A chunk is 16 columns: a tile of the even ones and a tile of the odd ones.
#pragma unroll
                for (int c = 0; c < T::COLUMN_TILES; c += 4) {
                    u32 codes[4];
                    const u32 chunk = warp * (T::COLUMN_TILES / 2) + c / 2 + (T::COLUMN_TILES >= 4 ? lane / 16 : 0);
                    load_matrices_transposed(codes, stage + Order::at(row, chunk));
#pragma unroll
                    for (int i = 0; i < 2 && c + 2 * i < T::COLUMN_TILES; i++) {
                        const u32 low = __byte_perm(codes[2 * i], 0, 0x3120), high = __byte_perm(codes[2 * i + 1], 0, 0x3120);
                        const u32 even_0 = e4m3_to_f16(static_cast<u16>(low)), odd_0 = e4m3_to_f16(static_cast<u16>(low >> 16));
                        const u32 even_1 = e4m3_to_f16(static_cast<u16>(high)), odd_1 = e4m3_to_f16(static_cast<u16>(high >> 16));
#pragma unroll
                        for (int r = 0; r < T::ROW_TILES; r++) {
                            multiply<T>(sums[r][c + 2 * i], a[r], even_0, even_1);
                            multiply<T>(sums[r][c + 2 * i + 1], a[r], odd_0, odd_1);
                        }
                    }
                }
            } else {
#pragma unroll
                for (int c = 0; c < T::COLUMN_TILES; c += 2) {
                    u32 b[4];
                    load_matrices_transposed(b, stage + Order::at(row, warp * T::COLUMN_TILES + c + lane / 16));
#pragma unroll
                    for (int r = 0; r < T::ROW_TILES; r++) {
                        multiply<T>(sums[r][c], a[r], b[0], b[1]);
                        multiply<T>(sums[r][c + 1], a[r], b[2], b[3]);
                    }
                }
            }
        }
    }

    // Each row times its factor, where it goes.
    DEVICE void write(const Args& args, const WorkItem& item, const float* factors) const {
        const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
#pragma unroll
        for (int r = 0; r < T::ROW_TILES; r++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 row = r * 16 + h * 8 + lane / 4;
                if (row >= item.num_rows) continue;
                const float factor = factors[row];
                const u32 index = item.first_row + row;
                const u32 token = bound_token(args, args.queries[index / args.num_heads].token), head = index % args.num_heads;
                float* partial = args.partials + (static_cast<u64>(item.slot) + row) * (T::LATENT + 4);
                auto put = [&](u32 column, float first, float second) {
                    if (item.slot == DIRECT) {
                        store_out(args, token, head, column, first * factor, second * factor);
                    } else {
                        *reinterpret_cast<float2*>(partial + column) = make_float2(first * factor, second * factor);
                    }
                };
                const u32 first_column = warp * (T::COLUMN_TILES * 8);
#pragma unroll
                for (int c = 0; c < T::COLUMN_TILES; c += 2) {
                    if constexpr (T::CACHE == E4M3) {
                        // Even columns in one tile, odd ones in the next.
                        const u32 column = first_column + c * 8 + lane % 4 * 4;
                        put(column, sums[r][c][2 * h], sums[r][c + 1][2 * h]);
                        put(column + 2, sums[r][c][2 * h + 1], sums[r][c + 1][2 * h + 1]);
                    } else {
                        const u32 column = first_column + c * 8 + lane % 4 * 2;
                        put(column, sums[r][c][2 * h], sums[r][c][2 * h + 1]);
                        put(column + 8, sums[r][c + 1][2 * h], sums[r][c + 1][2 * h + 1]);
                    }
                }
            }
        }
    }
};

template <class T>
DEVICE void decode(const Args& args) {
    extern __shared__ __align__(1024) u8 shared[];
    if (blockIdx.x >= args.header->num_items) return;
    const WorkItem item = args.items[blockIdx.x];
    const u32 stages = shared_address(shared + T::STAGES_AT), weights = shared_address(shared + T::WEIGHTS_AT);
    float* maxima = reinterpret_cast<float*>(shared + T::MAXIMA_AT);
    float* factors = reinterpret_cast<float*>(shared + T::FACTORS_AT);
    float* scales = reinterpret_cast<float*>(shared + T::SCALES_AT);
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const u32 row_warp = warp / T::TOKEN_WARPS, token_warp = warp % T::TOKEN_WARPS;

    const u32 tiles = (item.kv_end - item.kv_begin + T::TOKENS - 1) / T::TOKENS;
    Loader<T> loader(args, item);
#pragma unroll
    for (int i = 0; i < T::STAGES - 1; i++) {
        if (i < tiles) loader.load(stages + i * T::STAGE_BYTES);
        end_of_group();
    }
    const u32 staged = shared_address(shared + T::QUERIES_AT);
    stage_queries<T>(args, item, staged, scales);
    __syncthreads();
    Queries<T> queries(staged, row_warp * 16);
    queries.keep();

    // A lane has rows lane / 4 and 8 further, and of each two neighbouring tokens of every eight.
    float scale[2], top[2], sum[2];
    u32 seen[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = row_warp * 16 + h * 8 + lane / 4;
        const u32 index = item.first_row + min(row, item.num_rows - 1);
        seen[h] = min(args.queries[index / args.num_heads].visible, item.kv_end);
        scale[h] = scales[row];
        top[h] = EMPTY;
        sum[h] = 0.0f;
    }
    Output<T> output;

    for (u32 tile = 0, stage = 0; tile < tiles; tile++) {
        wait_for_all_but<T::STAGES - 2>();
        __syncthreads();
        {
            const u32 free = stage == 0 ? T::STAGES - 1 : stage - 1;
            if (tile + T::STAGES - 1 < tiles) loader.load(stages + free * T::STAGE_BYTES);
            end_of_group();
        }
        const u32 rows = stages + stage * T::STAGE_BYTES;

        // 1. scores
        float logits[T::TOKEN_TILES][4];
        score<T>(logits, queries, rows, token_warp * (T::TOKEN_TILES * 8));

        // 2. softmax
        const u32 first = item.kv_begin + tile * T::TOKENS + token_warp * (T::TOKEN_TILES * 8) + lane % 4 * 2;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float largest = EMPTY;
#pragma unroll
            for (int j = 0; j < T::TOKEN_TILES; j++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& logit = logits[j][2 * h + e];
                    logit = first + j * 8 + e < seen[h] ? logit * scale[h] : EMPTY;
                    largest = fmaxf(largest, logit);
                }
            }
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            if (lane % 4 == 0) maxima[token_warp * T::ROWS + row_warp * 16 + h * 8 + lane / 4] = largest;
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 row = row_warp * 16 + h * 8 + lane / 4;
            float largest = EMPTY;
#pragma unroll
            for (int w = 0; w < T::TOKEN_WARPS; w++) largest = fmaxf(largest, maxima[w * T::ROWS + row]);
            float factor = 1.0f;
            if (largest > top[h] + LAZY) {
                factor = exp2_fast(top[h] - largest);
                top[h] = largest;
            }
            sum[h] *= factor;
#pragma unroll
            for (int j = 0; j < T::TOKEN_TILES; j++) {
                float weight[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    weight[e] = first + j * 8 + e < seen[h] ? exp2_fast(logits[j][2 * h + e] - top[h]) : 0.0f;
                    sum[h] += weight[e];
                }
                const u32 word = T::CACHE == BF16 ? pack_bf16(weight[0], weight[1]) : pack_f16(weight[0], weight[1]);
                const u32 column = token_warp * (T::TOKEN_TILES * 8) + j * 8 + lane % 4 * 2;
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(weights + (row * T::WEIGHT_PITCH + column) * 2), "r"(word) : "memory");
            }
            if (token_warp == 0 && lane % 4 == 0) factors[row] = factor;
        }
        __syncthreads();

        // 3. values
        bool moved = false;
#pragma unroll
        for (int r = 0; r < T::ROW_TILES * 2; r++) moved |= factors[r * 8 + lane / 4] != 1.0f;
        if (__any_sync(~0u, moved)) output.rescale(factors);
        output.add(weights, rows);
        stage = stage + 1 == T::STAGES ? 0 : stage + 1;
    }
    wait_for_all_but<0>();
    __syncthreads();

    // The rows' sums, then the output.
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
        sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
        if (lane % 4 == 0) maxima[token_warp * T::ROWS + row_warp * 16 + h * 8 + lane / 4] = sum[h];
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = row_warp * 16 + h * 8 + lane / 4;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < T::TOKEN_WARPS; w++) total += maxima[w * T::ROWS + row];
        if (token_warp == 0 && lane % 4 == 0) {
            const bool any = total > 0.0f;
            const float base_2 = any ? top[h] + log2_fast(total) : EMPTY;
            factors[row] = any ? 1.0f / total : 1.0f;
            if (row < item.num_rows) {
                if (item.slot == DIRECT) {
                    const u32 index = item.first_row + row;
                    store_lse(args, bound_token(args, args.queries[index / args.num_heads].token), index % args.num_heads, base_2, any);
                } else {
                    args.partials[(static_cast<u64>(item.slot) + row) * (T::LATENT + 4) + T::LATENT] = base_2;
                }
            }
        }
    }
    __syncthreads();
    output.write(args, item, factors);
}

#define DECODE(name, ...) \
    extern "C" __global__ void __launch_bounds__(Tile<__VA_ARGS__>::THREADS, 1) name(const __grid_constant__ Args args) { \
        decode<Tile<__VA_ARGS__>>(args); \
    } \
    extern "C" __device__ const u32 name##_threads = Tile<__VA_ARGS__>::THREADS; \
    extern "C" __device__ const u32 name##_shared_bytes = Tile<__VA_ARGS__>::SHARED_BYTES;
