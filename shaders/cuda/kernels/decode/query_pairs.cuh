// A query row as pairs of consecutive elements, of which a lane has every 32nd: their loads, and their conversion to f32.
#pragma once

#include "mla.cuh"

// Two consecutive elements of a query as f32.
template <Dtype DTYPE>
DEVICE float2 pair_of(u32 word) {
    const u16 low = static_cast<u16>(word), high = static_cast<u16>(word >> 16);
    if constexpr (DTYPE == F16) return make_float2(f16_to_float(low), f16_to_float(high));
    if constexpr (DTYPE == BF16) return make_float2(bf16_to_float(low), bf16_to_float(high));
    return e4m3_pair_to_float(low);
}

template <Dtype DTYPE>
DEVICE float2 pair_of(float2 pair) {
    return DTYPE == F32 ? pair : pair_of<F16>(__float_as_uint(pair.x));
}

// A lane's pairs in a row.
__host__ __device__ constexpr int pairs_of_lane(int dim) {
    return (dim + 63) / 64;
}

// Loads a row's pairs, as they are: of f32 (Loaded is float2), of 16 bits (u32) or of FP8 codes (u16). `nope` and `pe` are where the row's
// parts begin, in elements.
template <int LATENT, int DIM, class Loaded, class Pair>
DEVICE void load_pairs(Pair (&to)[pairs_of_lane(DIM)], const Args& args, u64 nope, u64 pe) {
    const u32 lane = threadIdx.x % LANES;
    const Loaded* latent = reinterpret_cast<const Loaded*>(args.q_nope) + nope / 2;
    const Loaded* rope = reinterpret_cast<const Loaded*>(args.q_pe) + pe / 2;
#pragma unroll
    for (int i = 0; i < pairs_of_lane(DIM); i++) {
        const u32 pair = i * 32 + lane;
        Loaded loaded = {};
        if (pair < LATENT / 2) {
            loaded = latent[pair];
        } else if (pair < DIM / 2) {
            loaded = rope[pair - LATENT / 2];
        }
        if constexpr (sizeof(Pair) == 8 && sizeof(Loaded) < 8) {
            to[i].x = __uint_as_float(loaded);
        } else {
            to[i] = loaded;
        }
    }
}

// A row's pairs as f32, of any dtype.
template <int LATENT, int DIM>
DEVICE void load_row(float2 (&to)[pairs_of_lane(DIM)], const Args& args, u64 nope, u64 pe) {
    if (args.query_dtype == F32) return load_pairs<LATENT, DIM, float2>(to, args, nope, pe);
    if (args.query_dtype == E4M3) {
        load_pairs<LATENT, DIM, u16>(to, args, nope, pe);
    } else {
        load_pairs<LATENT, DIM, u32>(to, args, nope, pe);
    }
    rolled(to, [dtype = args.query_dtype](int, float2 pair) {
        const u32 word = __float_as_uint(pair.x);
        return dtype == F16 ? pair_of<F16>(word) : dtype == BF16 ? pair_of<BF16>(word) : pair_of<E4M3>(word);
    });
}
