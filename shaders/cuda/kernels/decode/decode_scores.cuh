// The scores of a tile in mla_decode, S = Q K^T by mma.sync, and the reduction among warps that split the columns of the dot product.
#pragma once

#include "decode_queries.cuh"

template <class T>
DEVICE void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    multiply_16_bit<T::CACHE == BF16>(sum, a, b0, b1);
}

// SHARERS of 1 or 2: a warp multiplies TOKEN_TILES x 8 tokens with its own 16 query rows and, of two sharers, with those of the other, over
// its share of the columns. `meanwhile` is called after each step, to issue copies between multiplications.
template <class T>
struct Scores {
    static constexpr bool KEEPS_MANY = T::PARTS * T::KEPT + T::ROW_TILES * T::COLUMN_TILES > 44; // sets of four registers: few are left
    // Independent accumulators: an mma waits for the one before it with the same sums. Few tokens get several, if registers are left.
    static constexpr int CHAINS = T::SHARERS > 1 ? 1 : T::TOKEN_TILES == 1 ? 4 : T::TOKEN_TILES == 2 && !KEEPS_MANY ? 2 : 1;
    float sums[CHAINS][T::SHARERS][T::TOKEN_TILES][4] = {};

    template <class Meanwhile>
    DEVICE void add(const Queries<T>& queries, u32 stage, u32, u32 row_warp, u32 token_warp, Meanwhile meanwhile) {
        using Order = typename T::Order;
        if constexpr (T::Layout::IS_RECORD) return add_records(queries, stage, token_warp, meanwhile);
        const u32 lane = threadIdx.x % LANES, first_token = token_warp * (T::TOKEN_TILES * 8), sharer = row_warp % T::SHARERS;
        // An ldmatrix.x4 loads four chunks of 8 tokens (LONG), or two chunks of 16 tokens.
        constexpr bool LONG = T::CACHE == E4M3 ? T::SHARERS == 1 : T::TOKEN_TILES == 1;
        constexpr int CHUNKS = LONG ? 4 : 2, STEP_CHUNKS = T::CACHE == E4M3 ? 1 : 2, LOAD_STEPS = CHUNKS / STEP_CHUNKS;
        const u32 row = first_token + lane % 8 + (LONG ? 0 : lane / 16 * 8), chunk = LONG ? lane / 8 : lane / 8 % 2;
        const u32 at = stage + Order::at(row, sharer * 2 + chunk);
        // Unrolled by a template: nvcc ignores `#pragma unroll` where the body is large.
        unrolled<(T::WARP_STEPS + LOAD_STEPS - 1) / LOAD_STEPS>([&](auto load) {
            constexpr int step = decltype(load)::value * LOAD_STEPS;
            u32 a[LOAD_STEPS][T::PARTS][T::SHARERS][4];
#pragma unroll
            for (int i = 0; i < LOAD_STEPS; i++)
#pragma unroll
                for (int part = 0; part < T::PARTS; part++)
#pragma unroll
                    for (int r = 0; r < T::SHARERS; r++)
                        if (step + i < T::WARP_STEPS) queries.get(a[i][part][r], part, r, step + i);
            // The last load repeats chunks where fewer are left.
            const int first = step * STEP_CHUNKS * T::SHARERS;
            const u32 place = step + LOAD_STEPS <= T::WARP_STEPS ? Order::from(at, first) : stage + Order::at(row, min(first + chunk, T::STEPS * STEP_CHUNKS - 1));
#pragma unroll
            for (int j = 0; j < T::TOKEN_TILES; j += LONG ? 1 : 2) {
                u32 b[4];
                load_matrices(b, Order::rows(place, j * 8));
#pragma unroll
                for (int s = 0; s < LOAD_STEPS; s++) {
                    if (step + s < T::WARP_STEPS) {
                        const int i = s * STEP_CHUNKS;
                        multiply_rows(s, j, a[s], b[i], b[i + STEP_CHUNKS - 1]);
                        if (!LONG) multiply_rows(s, j + 1, a[s], b[2 + i], b[2 + i + STEP_CHUNKS - 1]);
                        if (j + (LONG ? 1 : 2) >= T::TOKEN_TILES) meanwhile(step + s);
                    }
                }
            }
        });
#pragma unroll
        for (int j = 0; j < T::TOKEN_TILES; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int c = 1; c < CHAINS; c++) sums[0][0][j][e] += sums[c][0][j][e];
    }

    // The same of records, of which a warp multiplies all columns. Codes are multiplied as they are: after each group of 128 the sums are
    // multiplied by the ratio of its scale to the next one's, after the last by its scale, then those of the rotary part are added. So any
    // scale is exact.
    template <class Meanwhile>
    DEVICE void add_records(const Queries<T>& queries, u32 stage, u32 token_warp, Meanwhile meanwhile) {
        using Order = typename T::Order;
        static_assert(!T::Layout::IS_RECORD || T::SHARERS == 1, "all columns");
        constexpr int LOAD_STEPS = 4, CODES_STEPS = T::LATENT / 16, GROUP_LOADS = 128 / 16 / LOAD_STEPS;
        const u32 lane = threadIdx.x % LANES, first_token = token_warp * (T::TOKEN_TILES * 8);
        const u32 at = stage + Order::at(first_token + lane % 8, lane / 8);
        const u32 scales = stage + Order::at(first_token + lane % 4 * 2, 0) + T::LATENT;
        unrolled<CODES_STEPS / LOAD_STEPS>([&](auto load) {
            constexpr int step = decltype(load)::value * LOAD_STEPS;
            u32 a[LOAD_STEPS][T::PARTS][1][4];
#pragma unroll
            for (int i = 0; i < LOAD_STEPS; i++)
#pragma unroll
                for (int part = 0; part < T::PARTS; part++) queries.get(a[i][part][0], part, 0, step + i);
#pragma unroll
            for (int j = 0; j < T::TOKEN_TILES; j++) {
                u32 b[4];
                load_matrices(b, Order::rows(at, j * 8) + step * 16);
#pragma unroll
                for (int s = 0; s < LOAD_STEPS; s++) {
                    multiply_rows(s, j, a[s], b[s], b[s]);
                    if (j + 1 == T::TOKEN_TILES) meanwhile(step + s);
                }
            }
            if ((load.value + 1) % GROUP_LOADS == 0) end_group(scales, load.value / GROUP_LOADS);
        });
        if constexpr (T::DIM > T::LATENT) {
#pragma unroll
            for (int step = CODES_STEPS; step < T::STEPS; step += 2) {
                u32 a[2][T::PARTS][4];
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int part = 0; part < T::PARTS; part++) queries.get(a[i][part], part, 0, step + i);
#pragma unroll
                for (int j = 0; j < T::TOKEN_TILES; j++) {
                    u32 b[4];
                    load_matrices(b, Order::rows(at, j * 8) + T::Layout::ROPE_AT + (step - CODES_STEPS) * 32);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
#pragma unroll
                        for (int part = 0; part < T::PARTS; part++) multiply_bf16(sums[i % CHAINS][0][j], a[i][part], b[2 * i], b[2 * i + 1]);
                        if (j + 1 == T::TOKEN_TILES) meanwhile(step + i);
                    }
                }
            }
        }
#pragma unroll
        for (int j = 0; j < T::TOKEN_TILES; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int c = 1; c < CHAINS; c++) sums[0][0][j][e] += sums[c][0][j][e];
    }

    // `scales` are those of the lane's first token.
    DEVICE void end_group(u32 scales, int group) {
#pragma unroll
        for (int j = 0; j < T::TOKEN_TILES; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float by = factor_after_group(scales + (j * 8 + e) * T::ROW_BYTES, group);
#pragma unroll
                for (int c = 0; c < CHAINS; c++) {
                    sums[c][0][j][e] *= by;
                    sums[c][0][j][2 + e] *= by;
                }
            }
    }

    DEVICE void multiply_rows(int step, int j, const u32 (&a)[T::PARTS][T::SHARERS][4], u32 first, u32 last) {
        u32 b[2] = {first, last};
        if constexpr (T::CACHE == E4M3) e4m3_to_f16(first, b[0], b[1]);
#pragma unroll
        for (int part = 0; part < T::PARTS; part++)
#pragma unroll
            for (int r = 0; r < T::SHARERS; r++) multiply<T>(sums[step % CHAINS][r][j], a[part][r], b[0], b[1]);
    }

    DEVICE float (&logits())[T::TOKEN_TILES][4] { return sums[0][0]; }

    // Reduces: each sharer gives the other the sums of the other's rows, by halves, through the place of the receiver's weights.
    DEVICE void exchange(u32 weights, u32 row_warp, u32 token_warp) {
        if constexpr (T::SHARERS == 2) {
            const u32 lane = threadIdx.x % LANES * 16, barrier = 1 + row_warp / 2 * T::TOKEN_WARPS + token_warp;
            const u32 own = weights + weights_of<T>(row_warp, token_warp), other = weights + weights_of<T>(row_warp ^ 1, token_warp);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (half == 1) bar_sync<2>(barrier);
#pragma unroll
                for (int j = 0; j < T::TOKEN_TILES / 2; j++) {
                    const float(&sum)[4] = sums[0][T::SHARERS - 1][half * T::TOKEN_TILES / 2 + j];
                    store_16(other + lane + j * LANES * 16, {__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]), __float_as_uint(sum[3])});
                }
                bar_sync<2>(barrier);
#pragma unroll
                for (int j = 0; j < T::TOKEN_TILES / 2; j++) {
                    u32 words[4];
                    load_16(words, own + lane + j * LANES * 16);
#pragma unroll
                    for (int e = 0; e < 4; e++) sums[0][0][half * T::TOKEN_TILES / 2 + j][e] += __uint_as_float(words[e]);
                }
            }
            // All lanes have read before any writes weights there.
            __syncwarp();
        }
    }
};

// SHARERS of 4: four warps, of two row tiles and twice a warp's tokens, split the columns: each multiplies a quarter of them for the rows
// and tokens of all four, with queries that stay in registers, and gives each other warp the sums that belong to it. Each key is read once,
// and 64 query rows fit the 99 KB of shared memory of a desktop card.
template <class T>
struct QuarterScores {
    static constexpr int CHUNKS = T::CACHE == E4M3 ? 1 : 2; // chunks of 16 bytes of a step
    float own[T::TOKEN_TILES][4];

    // A warp's index among the four: row tile in bit 1, token tile in bit 0.
    DEVICE static u32 place_of(u32 row_warp, u32 token_warp) { return row_warp % 2 * 2 + token_warp % 2; }
    // Where a warp finds the sums from the warp whose index differs in `bits`.
    DEVICE static u32 piece(u32 weights, u32 row_warp, u32 token_warp, u32 bits) {
        return weights + weights_of<T>(row_warp, token_warp) + (bits - 1) * T::PIECE_BYTES + threadIdx.x % LANES * 16;
    }

    template <class Meanwhile>
    DEVICE void add(const Queries<T>& queries, u32 stage, u32 weights, u32 row_warp, u32 token_warp, Meanwhile meanwhile) {
        using Order = typename T::Order;
        static_assert(Order::GROUP == 4 * CHUNKS, "a quarter of each group");
        const u32 lane = threadIdx.x % LANES;
        // An ldmatrix.x4 loads two token tiles, of two steps (FP8) or of both chunks of one.
        constexpr int LOAD_STEPS = 2 / CHUNKS, PAIRS = T::TOKEN_TILES, SIDE = (T::TOKEN_TILES + 1) / 2;
        const u32 tile = lane / 16, half = lane / 8 % 2;
        const u32 chunk = place_of(row_warp, token_warp) * CHUNKS + (CHUNKS == 2 ? half : 0);
        // The other token warp's tokens first, as it waits for them; with one tile each, both are one pair.
        const u32 begin = stage + token_warp / 2 * (T::TOKEN_TILES * 16) * T::ROW_BYTES;
        u32 at[2];
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const u32 token = T::TOKEN_TILES == 1 ? (token_warp % 2 ^ tile) * 8 : (token_warp % 2 ^ side) * (T::TOKEN_TILES * 8) + tile * 8;
            at[side] = begin + Order::at(token + lane % 8, chunk) + (CHUNKS == 1 ? half * 64 : 0);
        }
        unrolled<PAIRS>([&](auto pair_) {
            constexpr int pair = decltype(pair_)::value, side = T::TOKEN_TILES == 1 ? 0 : 1 - pair / SIDE, first = pair % SIDE * 2;
            float sums[2][2][4] = {};
            unrolled<(T::WARP_STEPS + LOAD_STEPS - 1) / LOAD_STEPS>([&](auto load) {
                constexpr int step = decltype(load)::value * LOAD_STEPS;
                u32 b[4];
                // With an odd number of steps the last load repeats its first step.
                const bool twice = step + LOAD_STEPS > T::WARP_STEPS;
                load_matrices(b, at[side] + first * 8 * T::ROW_BYTES + step * Order::GROUP * 16 - (twice ? half * 64 : 0));
#pragma unroll
                for (int s = 0; s < LOAD_STEPS; s++) {
                    if (step + s >= T::WARP_STEPS) break;
#pragma unroll
                    for (int t = 0; t < 2; t++) {
                        u32 keys[2] = {b[2 * t + s], b[2 * t + 1]};
                        if constexpr (T::CACHE == E4M3) e4m3_to_f16(b[2 * t + s], keys[0], keys[1]);
#pragma unroll
                        for (int r = 0; r < 2; r++) {
                            u32 a[4];
                            queries.get(a, 0, r, step + s);
                            multiply<T>(sums[r][t], a, keys[0], keys[1]);
                        }
                    }
                    meanwhile(pair * T::WARP_STEPS + step + s);
                }
            });
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    const int other = r * 2 + (T::TOKEN_TILES == 1 ? t : side), index = T::TOKEN_TILES == 1 ? 0 : first + t;
                    const float(&sum)[4] = sums[r][t];
                    if (other == 0) {
#pragma unroll
                        for (int e = 0; e < 4; e++) own[index][e] = sum[e];
                    } else {
                        store_16(piece(weights, row_warp ^ (other >> 1), token_warp ^ (other & 1), max(other, 1)) + index * LANES * 16,
                                 {__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]), __float_as_uint(sum[3])});
                    }
                }
        });
    }

    DEVICE float (&logits())[T::TOKEN_TILES][4] { return own; }

    // Reduces the quarters. The order of additions is the same for all four warps, so a row's bits do not depend on which warp owns it.
    DEVICE void exchange(u32 weights, u32 row_warp, u32 token_warp) {
        bar_sync<4>(1 + row_warp / 2 * (T::TOKEN_WARPS / 2) + token_warp / 2);
#pragma unroll
        for (int j = 0; j < T::TOKEN_TILES; j++) {
            u32 given[3][4];
            // Keeps the compiler from loading all tiles at once: registers are short.
            if (j > 0) __syncwarp();
#pragma unroll
            for (int i = 0; i < 3; i++) load_16(given[i], piece(weights, row_warp, token_warp, i + 1) + j * LANES * 16);
#pragma unroll
            for (int e = 0; e < 4; e++)
                own[j][e] = (own[j][e] + __uint_as_float(given[0][e])) + (__uint_as_float(given[1][e]) + __uint_as_float(given[2][e]));
        }
        // All lanes have read before any writes weights there.
        __syncwarp();
    }
};

template <class T>
using ScoresOf = typename Either<T::SHARERS == 4, QuarterScores<T>, Scores<T>>::Type;
