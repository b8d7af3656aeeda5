// Query rows of the kernels on wgmma, which do what QueryRows of decode_queries.cuh do, but are unrolled. With that loop, and epilogues and
// a fallback that loop, 16 heads over an e4m3 cache took 1.08 of the time on an H200 (docs/tried.md).
#pragma once

#include "decode/decode_queries.cuh"

// Does what pair_of does, but converts FP8 codes by arithmetic, as the kernels did that were timed.
template <Dtype DTYPE, class Loaded>
DEVICE float2 unrolled_pair_of(Loaded pair) {
    if constexpr (DTYPE == E4M3) {
        const u16 codes = static_cast<u16>(pair);
        return make_float2(e4m3_to_float(static_cast<u8>(codes)), e4m3_to_float(static_cast<u8>(codes >> 8)));
    } else {
        return pair_of<DTYPE>(pair);
    }
}

template <class T>
struct UnrolledQueryRows : LoadedQueryRows<T> {
    using typename LoadedQueryRows<T>::Order;
    using LoadedQueryRows<T>::PAIRS;
    using LoadedQueryRows<T>::BATCH;
    using LoadedQueryRows<T>::pairs;
    static constexpr bool HAS_BF16_ROPE = has_bf16_rope<T>();

    DEVICE void store(const Args& args, u32 first, u32 to, float* scales) const {
        if constexpr (T::PARTS == 2) {
            if (T::CACHE == BF16 && args.query_dtype == F16) {
                store_as<F16>(args, first, to, scales);
            } else {
                store_as<F32>(args, first, to, scales);
            }
        } else if (args.query_dtype == BF16) {
            store_as<BF16>(args, first, to, scales);
        } else if (T::CACHE != BF16 && !HAS_BF16_ROPE && args.query_dtype == F16) {
            store_as<F16>(args, first, to, scales);
        } else {
            store_as<E4M3>(args, first, to, scales);
        }
    }

    // Converts and stores. With an FP8 cache, columns are permuted within each 16: a lane's word of four codes then holds the columns
    // 2i, 2i + 1, 2i + 8 and 2i + 9 that an mma fragment needs.
    template <Dtype DTYPE>
    DEVICE void store_as(const Args& args, u32 first_row, u32 to, float* scales) const {
        const u32 lane = threadIdx.x % LANES;
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const u32 row = first_row + b * T::WARPS;
            u32 exponent = 127;
            if constexpr (T::CACHE != BF16) {
                float largest = 0.0f;
#pragma unroll
                for (int i = 0; i < PAIRS; i++) {
                    const float2 value = unrolled_pair_of<DTYPE>(pairs[b][i]);
                    largest = fmaxf(largest, fmaxf(fabsf(value.x), fabsf(value.y)));
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
                    if (!(HAS_BF16_ROPE && column >= T::LATENT)) place = column - k + (k / 2) % 2 * 8 + k / 4 * 2;
                }
                const float2 value = unrolled_pair_of<DTYPE>(pairs[b][i]);
                float first = value.x * power, second = value.y * power;
#pragma unroll
                for (int part = 0; part < T::PARTS; part++) {
                    u32 word;
                    if (T::CACHE == BF16 || (HAS_BF16_ROPE && column >= T::LATENT)) {
                        word = pack_bf16(first, second);
                        first -= __uint_as_float(word << 16);
                        second -= __uint_as_float(word & 0xFFFF0000u);
                    } else {
                        word = pack_f16(first, second);
                        first -= f16_to_float(static_cast<u16>(word));
                        second -= f16_to_float(static_cast<u16>(word >> 16));
                    }
                    const u32 at = to + part * T::STAGED_ROWS * T::QUERY_BYTES + Order::at(row, place / 8) + place % 8 * 2;
                    store_4(at, word);
                }
            }
        }
    }
};
