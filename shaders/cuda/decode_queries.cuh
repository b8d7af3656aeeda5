// How a block of mla_decode gets its queries: to shared memory, in the type and the order that the matrices take, and from there.
#pragma once

#include "decode_tile.cuh"

// Two neighbouring elements of a query as they are loaded, and what they are.
template <Dtype DTYPE>
struct Pair;

template <>
struct Pair<F32> {
    using Raw = float2;
    DEVICE static float2 of(Raw raw) { return raw; }
};

template <>
struct Pair<F16> {
    using Raw = u32;
    DEVICE static float2 of(Raw raw) { return make_float2(f16_to_float(static_cast<u16>(raw)), f16_to_float(static_cast<u16>(raw >> 16))); }
};

template <>
struct Pair<BF16> {
    using Raw = u32;
    DEVICE static float2 of(Raw raw) { return make_float2(__uint_as_float(raw << 16), __uint_as_float(raw & 0xFFFF0000u)); }
};

template <>
struct Pair<E4M3> {
    using Raw = u16;
    DEVICE static float2 of(Raw raw) { return make_float2(e4m3_to_float(static_cast<u8>(raw)), e4m3_to_float(static_cast<u8>(raw >> 8))); }
};

// Query rows to shared memory as the matrices take them, two rows of a warp at a time. All loads are asked for before the first is waited for.
// An FP8 tile's columns are permuted in each 16: a lane's four codes are of two neighbouring places and of those 8 further.
template <class T, Dtype DTYPE>
DEVICE void stage_queries_of(const Args& args, const WorkItem& item, u32 to, float* scales) {
    using Order = Swizzle<T::QUERY_BYTES>;
    using Raw = typename Pair<DTYPE>::Raw;
    constexpr int PAIRS = (T::DIM + 63) / 64; // of a lane
    constexpr int BATCH = 2;
    static_assert(T::ROWS % (BATCH * T::WARPS) == 0, "whole batches");
    const u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    for (u32 first_row = warp; first_row < T::ROWS; first_row += BATCH * T::WARPS) {
        Raw raw[BATCH][PAIRS] = {};
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const u32 index = item.first_row + min(first_row + b * T::WARPS, item.num_rows - 1);
            const u32 token = bound_token(args, args.queries[index / args.num_heads].token), head = index % args.num_heads;
            const Raw* nope = reinterpret_cast<const Raw*>(args.q_nope) + (token * args.q_nope_token_stride + head * args.q_nope_head_stride) / 2;
            const Raw* pe = reinterpret_cast<const Raw*>(args.q_pe) + (token * args.q_pe_token_stride + head * args.q_pe_head_stride) / 2;
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                const u32 pair = i * 32 + lane;
                if (pair < T::LATENT / 2) {
                    raw[b][i] = nope[pair];
                } else if (pair < T::DIM / 2) {
                    raw[b][i] = pe[pair - T::LATENT / 2];
                }
            }
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const u32 row = first_row + b * T::WARPS;
            u32 exponent = 127;
            if constexpr (T::CACHE != BF16) {
                float largest = 0.0f;
#pragma unroll
                for (int i = 0; i < PAIRS; i++) {
                    const float2 value = Pair<DTYPE>::of(raw[b][i]);
                    largest = fmaxf(largest, fmaxf(fabsf(value.x), fabsf(value.y)));
                }
#pragma unroll
                for (int lanes = 1; lanes < LANES; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
                // The largest element to just below 2^15.
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
                    place = column - k + (k / 2) % 2 * 8 + k / 4 * 2;
                }
                const float2 value = Pair<DTYPE>::of(raw[b][i]);
                float first = value.x * power, second = value.y * power;
#pragma unroll
                for (int part = 0; part < T::PARTS; part++) {
                    u32 word;
                    if constexpr (T::CACHE == BF16) {
                        word = pack_bf16(first, second);
                        first -= __uint_as_float(word << 16);
                        second -= __uint_as_float(word & 0xFFFF0000u);
                    } else {
                        word = pack_f16(first, second);
                        first -= f16_to_float(static_cast<u16>(word));
                        second -= f16_to_float(static_cast<u16>(word >> 16));
                    }
                    const u32 at = to + part * T::ROWS * T::QUERY_BYTES + Order::at(row, place / 8) + place % 8 * 2;
                    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
                }
            }
        }
    }
}

template <class T>
DEVICE void stage_queries(const Args& args, const WorkItem& item, u32 to, float* scales) {
    // Others than these have two parts on this cache, and the other way round.
    if constexpr (T::PARTS == 2) {
        if (T::CACHE == BF16 && args.query_dtype == F16) {
            stage_queries_of<T, F16>(args, item, to, scales);
        } else {
            stage_queries_of<T, F32>(args, item, to, scales);
        }
    } else if (args.query_dtype == BF16) {
        stage_queries_of<T, BF16>(args, item, to, scales);
    } else if (T::CACHE != BF16 && args.query_dtype == F16) {
        stage_queries_of<T, F16>(args, item, to, scales);
    } else {
        stage_queries_of<T, E4M3>(args, item, to, scales);
    }
}

// The queries of a step, part by part: from registers, or from shared memory.
template <class T>
struct Queries {
    using Order = Swizzle<T::QUERY_BYTES>;
    u32 kept[T::KEEPS_QUERIES ? T::PARTS * T::STEPS : 1][4];
    u32 at, order, half;

    DEVICE Queries(u32 staged, u32 first_row) {
        const u32 lane = threadIdx.x % LANES, row = first_row + lane % 16;
        at = staged + row * T::QUERY_BYTES;
        order = Order::of(row);
        half = lane / 16;
    }

    DEVICE void read(u32 (&to)[4], int part, int step) const {
        load_matrices(to, at + part * T::ROWS * T::QUERY_BYTES + (((step * 2 + half) ^ order) << 4));
    }

    DEVICE void keep() {
        if constexpr (T::KEEPS_QUERIES) {
#pragma unroll
            for (int i = 0; i < T::PARTS * T::STEPS; i++) read(kept[i], i / T::STEPS, i % T::STEPS);
        }
    }

    DEVICE void get(u32 (&to)[4], int part, int step) const {
        if constexpr (T::KEEPS_QUERIES) {
#pragma unroll
            for (int i = 0; i < 4; i++) to[i] = kept[T::KEEPS_QUERIES ? part * T::STEPS + step : 0][i];
        } else {
            read(to, part, step);
        }
    }
};
