// Queries of mla_decode: from global memory to shared memory in the tensor cores' dtype and layout (QueryRows), and to fragments (Queries).
#pragma once

#include "decode_tile.cuh"
#include "query_pairs.cuh"

// Whether the rotary part is multiplied as bf16 and the latent as f16: that of records.
template <class T>
__host__ __device__ constexpr bool has_bf16_rope() {
    return T::Layout::IS_RECORD && T::DIM > T::LATENT;
}

// Query rows between global and shared memory, BATCH rows of a warp at a time: `ask` issues all loads before the first is used. QueryRows
// and UnrolledQueryRows convert and store them.
template <class T>
struct LoadedQueryRows {
    using Order = typename T::QueryOrder;
    // Two parts where the tensor cores' dtype does not hold the query: f32, and f16 with a bf16 cache.
    using Pair = typename Either<T::PARTS == 2, float2, u32>::Type;
    static constexpr int PAIRS = pairs_of_lane(T::DIM);
    static constexpr int BATCH = T::QUERY_BATCH;
    static_assert(T::STAGED_ROWS % (BATCH * T::WARPS) == 0, "whole batches");
    Pair pairs[BATCH][PAIRS];

    // Loads rows first, first + WARPS, ..
    DEVICE void ask(const Args& args, const WorkItem& item, u32 first) {
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const u32 index = item.first_row + min(first + b * T::WARPS, item.num_rows - 1);
            const u32 token = bound_token(args, args.queries[index / args.num_heads].token), head = index % args.num_heads;
            const u64 nope = token * args.q_nope_token_stride + head * args.q_nope_head_stride;
            const u64 pe = token * args.q_pe_token_stride + head * args.q_pe_head_stride;
            if constexpr (T::PARTS == 2) {
                if ((T::CACHE == BF16 || has_bf16_rope<T>()) && args.query_dtype == F16) {
                    load_pairs<T::LATENT, T::DIM, u32>(pairs[b], args, nope, pe);
                } else {
                    load_pairs<T::LATENT, T::DIM, float2>(pairs[b], args, nope, pe);
                }
            } else if (args.query_dtype == E4M3) {
                load_pairs<T::LATENT, T::DIM, u16>(pairs[b], args, nope, pe);
            } else {
                load_pairs<T::LATENT, T::DIM, u32>(pairs[b], args, nope, pe);
            }
        }
    }
};

template <class T>
struct QueryRows : LoadedQueryRows<T> {
    using typename LoadedQueryRows<T>::Order;
    using typename LoadedQueryRows<T>::Pair;
    using LoadedQueryRows<T>::PAIRS;
    using LoadedQueryRows<T>::BATCH;
    using LoadedQueryRows<T>::pairs;

    // Converts and stores the rows. Unless QUERY_UNROLL says otherwise it is a loop, so that the code is there once: a row is selected,
    // since registers have no index.
    DEVICE void store(const Args& args, u32 first, u32 to, float* scales) const {
#pragma unroll T::QUERY_UNROLL
        for (int b = 0; b < BATCH; b++) {
            Pair row[PAIRS];
#pragma unroll
            for (int other = 0; other < BATCH; other++) {
                if (other == b) {
#pragma unroll
                    for (int i = 0; i < PAIRS; i++) row[i] = pairs[other][i];
                }
            }
            float2 values[PAIRS];
            convert(args.query_dtype, row, values);
            store_row(args, values, first + b * T::WARPS, to, scales);
        }
    }

    // Converts a row's pairs to f32.
    DEVICE static void convert(u32 dtype, const Pair (&pairs)[PAIRS], float2 (&values)[PAIRS]) {
        if constexpr (T::PARTS == 2) {
#pragma unroll
            for (int i = 0; i < PAIRS; i++) values[i] = pairs[i];
            if ((T::CACHE == BF16 || has_bf16_rope<T>()) && dtype == F16) convert_from<F16>(pairs, values);
        } else if (dtype == BF16) {
            convert_from<BF16>(pairs, values);
        } else if (T::CACHE != BF16 && !has_bf16_rope<T>() && dtype == F16) {
            convert_from<F16>(pairs, values);
        } else if constexpr (CONVERTS_E4M3) {
            convert_from<E4M3>(pairs, values);
        } else {
#pragma unroll
            for (int i = 0; i < PAIRS; i++) values[i].x = __uint_as_float(pairs[i]);
            rolled(values, [](int, float2 codes) { return pair_of<E4M3>(__float_as_uint(codes.x)); });
        }
    }

    template <Dtype DTYPE>
    DEVICE static void convert_from(const Pair (&pairs)[PAIRS], float2 (&values)[PAIRS]) {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) values[i] = pair_of<DTYPE>(pairs[i]);
    }

    // Stores a row. With an FP8 cache, columns are permuted within each 16: a lane's word of four codes then holds the columns 2i, 2i + 1,
    // 2i + 8 and 2i + 9 that an mma fragment needs.
    DEVICE static void store_row(const Args& args, const float2 (&values)[PAIRS], u32 row, u32 to, float* scales) {
        const u32 lane = threadIdx.x % LANES;
        u32 exponent = 127;
        if constexpr (T::CACHE != BF16) {
            float largest = 0.0f;
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                largest = fmaxf(largest, fmaxf(fabsf(values[i].x), fabsf(values[i].y)));
            }
#pragma unroll
            for (int lanes = 1; lanes < LANES; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
            // A power of two that brings the row's largest element just below 2^15.
            exponent = min(max(268 - static_cast<int>(__float_as_uint(largest) >> 23), 1), 253);
        }
        const float power = __uint_as_float(exponent << 23);
        if (lane == 0) scales[row] = args.logit_scale * __uint_as_float((254 - exponent) << 23);
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const u32 column = (i * 32 + lane) * 2;
            if (column >= T::DIM) break;
            u32 place = column;
            if constexpr (T::CACHE == E4M3) {
                const u32 k = column % 16;
                if (!(has_bf16_rope<T>() && column >= T::LATENT)) place = column - k + (k / 2) % 2 * 8 + k / 4 * 2;
            }
            float first = values[i].x * power, second = values[i].y * power;
#pragma unroll
            for (int part = 0; part < T::PARTS; part++) {
                u32 word;
                if (T::CACHE == BF16 || (has_bf16_rope<T>() && column >= T::LATENT)) {
                    word = pack_bf16(first, second);
                    first -= __uint_as_float(word << 16);
                    second -= __uint_as_float(word & 0xFFFF0000u);
                } else {
                    word = pack_f16(first, second);
                    first -= f16_to_float(static_cast<u16>(word));
                    second -= f16_to_float(static_cast<u16>(word >> 16));
                }
                store_4(to + part * T::STAGED_ROWS * T::QUERY_BYTES + Order::at(row, place / 8) + place % 8 * 2, word);
            }
        }
    }
};

// A warp's query rows of bf16 for a bf16 cache, copied as they are: all are on their way at once.
template <class T>
DEVICE void copy_query_rows(const Args& args, const WorkItem& item, u32 warp, u32 to, float* scales) {
    constexpr u32 ROWS = T::ROWS / T::WARPS, CHUNKS = T::DIM / 8, LATENT_CHUNKS = T::LATENT / 8;
    const u32 lane = threadIdx.x % LANES, own = warp + lane % ROWS * T::WARPS, index = item.first_row + min(own, item.num_rows - 1);
    const u32 token = bound_token(args, args.queries[index / args.num_heads].token), head = index % args.num_heads;
    const u64 nope = token * args.q_nope_token_stride + head * args.q_nope_head_stride;
    const u64 pe = token * args.q_pe_token_stride + head * args.q_pe_head_stride;
    if (lane < ROWS) scales[own] = args.logit_scale;
#pragma unroll 1
    for (u32 i = 0; i < ROWS; i++) {
        const u8* latent = args.q_nope + __shfl_sync(~0u, nope, i) * 2;
        const u8* rope = args.q_pe + __shfl_sync(~0u, pe, i) * 2;
#pragma unroll
        for (u32 chunk = lane; chunk < CHUNKS; chunk += LANES) {
            const u8* from = chunk < LATENT_CHUNKS ? latent + chunk * 16 : rope + (chunk - LATENT_CHUNKS) * 16;
            copy_16(to + T::QueryOrder::at(warp + i * T::WARPS, chunk), from, true);
        }
    }
    cp_async_commit();
    cp_async_wait<0>();
}

// A warp's query fragments, [PARTS, SCORE_ROWS, WARP_STEPS], its own 16 rows first: KEPT steps in registers, the others in shared memory.
template <class T>
struct Queries {
    using Order = Swizzle<T::QUERY_BYTES>;
    static constexpr int REST = T::WARP_STEPS - T::KEPT, ROWS = T::SCORE_ROWS, TILES = T::PARTS * ROWS;
    u32 kept[T::KEPT > 0 ? TILES * T::KEPT : 1][4];
    u32 at[ROWS];
    u32 rest;

    // The caller has a barrier between staging and `keep` or `get`.
    DEVICE Queries(u32 staged, u32 rest, u32 row_warp, u32 token_warp) {
        const u32 lane = threadIdx.x % LANES, sharer = T::SHARERS == 4 ? row_warp % 2 * 2 + token_warp % 2 : row_warp % T::SHARERS;
#pragma unroll
        for (int r = 0; r < ROWS; r++) at[r] = staged + Order::at((row_warp ^ r) * 16 % T::STAGED_ROWS + lane % 16, sharer * 2 * T::RUN + lane / 16);
        this->rest = rest + ((T::SHARERS == 4 ? row_warp * T::TOKEN_WARPS + token_warp : row_warp) * TILES * REST * LANES + lane) * 16;
    }

    // Takes the fragments of the row tiles that are staged, from row tile `first` on.
    DEVICE void keep(u32 first, u32 row_warp, u32 token_warp) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            if (T::STAGED_ROWS < T::ROWS && (row_warp ^ tile % ROWS) - first >= T::STAGED_ROWS / 16) continue;
#pragma unroll
            for (int step = 0; step < T::WARP_STEPS; step++) {
                u32 queries[4];
                read(queries, tile / ROWS, tile % ROWS, step);
                if (step < T::KEPT) {
#pragma unroll
                    for (int i = 0; i < 4; i++) kept[tile * T::KEPT + min(step, T::KEPT - 1)][i] = queries[i];
                } else if (T::SHARERS == 4 || token_warp == 0) {
                    store_16(rest + (tile * REST + step - T::KEPT) * LANES * 16, queries);
                }
            }
        }
    }

    DEVICE void read(u32 (&to)[4], int part, int rows, int step) const {
        const int first = step / T::RUN * T::RUN * T::SHARERS + step % T::RUN;
        load_matrices(to, Order::from(at[rows], first * 2) + part * T::STAGED_ROWS * T::QUERY_BYTES);
    }

    DEVICE void get(u32 (&to)[4], int part, int rows, int step) const {
        const int tile = part * ROWS + rows;
        if (T::KEPT == 0) {
            read(to, part, rows, step);
        } else if (step >= T::KEPT) {
            load_16(to, rest + (tile * REST + step - T::KEPT) * LANES * 16);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) to[i] = kept[T::KEPT > 0 ? tile * T::KEPT + step : 0][i];
        }
    }
};
