// How a token lies in the cache, in bytes: the host's are in src/cache/layout.rs. A layout has the dims, the dtype of the latent, the
// elements of that dtype from a token to the next, as Args counts strides, and two consecutive elements of a token as f32.
#pragma once

#include "lib/ptx.cuh"
#include "mla.cuh"

// Kernels that define UNROLLED have the code of this file and of decode_f32.cuh unrolled: see unrolled_queries.cuh.
#ifndef UNROLLED
#define UNROLLED 0
#endif

// Two consecutive elements of a cache row.
template <Dtype CACHE>
DEVICE float2 cache_pair(const u8* row, u32 column) {
    if constexpr (CACHE == F32) {
        return *reinterpret_cast<const float2*>(row + column * 4);
    } else if constexpr (CACHE == E4M3) {
#if UNROLLED
        const u16 codes = *reinterpret_cast<const u16*>(row + column);
        return make_float2(e4m3_to_float(static_cast<u8>(codes)), e4m3_to_float(static_cast<u8>(codes >> 8)));
#else
        return e4m3_pair_to_float(*reinterpret_cast<const u16*>(row + column));
#endif
    } else {
        const u32 word = *reinterpret_cast<const u32*>(row + column * 2);
        const u16 first = static_cast<u16>(word), second = static_cast<u16>(word >> 16);
        if constexpr (CACHE == F16) return make_float2(f16_to_float(first), f16_to_float(second));
        return make_float2(bf16_to_float(first), bf16_to_float(second));
    }
}

// Elements of one dtype.
template <int LATENT_, int ROPE_, Dtype CACHE_>
struct Plain {
    static constexpr Dtype CACHE = CACHE_;
    static constexpr int LATENT = LATENT_, DIM = LATENT_ + ROPE_, ELEMENTS = DIM;
    static constexpr bool IS_RECORD = false;

    DEVICE static float2 pair(const u8* token, u32 column) { return cache_pair<CACHE>(token, column); }
};

// Records of 656 bytes, or without the rotary part of 528: 512 FP8 codes, an f32 scale for each 128 of them, rope in bf16.
template <int ROPE_>
struct Record {
    static constexpr Dtype CACHE = E4M3;
    static constexpr int LATENT = 512, DIM = LATENT + ROPE_;
    static constexpr int GROUP = 128, SCALES_AT = LATENT, ROPE_AT = SCALES_AT + LATENT / GROUP * 4, ELEMENTS = ROPE_AT + ROPE_ * 2;
    static constexpr bool IS_RECORD = true;

    DEVICE static float2 pair(const u8* token, u32 column) {
        if (column >= LATENT) return cache_pair<BF16>(token + ROPE_AT, column - LATENT);
        const float2 codes = cache_pair<E4M3>(token, column);
        const float scale = reinterpret_cast<const float*>(token + SCALES_AT)[column / GROUP];
        return make_float2(codes.x * scale, codes.y * scale);
    }
};

// On tensor cores values are multiplied by their scales in f16, times SCALE_BIAS: with what a scale and a product are rounded by, a value
// is off by 2^-10 of itself, and where it is that small by 2^-12 of its token's largest in the group. A scale that f16 does not hold so
// well becomes NaN, and so does a ratio of two scales of a token that is out of range: they show in the result, and the item is done again
// in f32 (decode_f32.cuh). Tokens that were loaded as zeros have scales of 0.
constexpr float SCALE_BIAS = 16.0f, LEAST_SCALE = 0x1p-18f, MOST_SCALE = 9.0f, MOST_RATIO = 0x1p60f;

DEVICE float checked_scale(float scale) {
    return (scale >= LEAST_SCALE && scale <= MOST_SCALE) || scale == 0.0f ? scale : NOT_A_NUMBER;
}

DEVICE float checked_ratio(float scale, float next) {
    const float ratio = __fdividef(scale, next);
    return ratio >= 1.0f / MOST_RATIO && ratio <= MOST_RATIO ? ratio : NOT_A_NUMBER;
}

// A token's scale of a group over that of the next; of the last group, its scale. `scales` is the shared address of the token's first.
DEVICE float factor_after_group(u32 scales, int group) {
    const float scale = checked_scale(__uint_as_float(load_4(scales + group * 4)));
    if (group == 3) return scale;
    const float next = __uint_as_float(load_4(scales + (group + 1) * 4));
    return scale == 0.0f && next == 0.0f ? 0.0f : checked_ratio(scale, next);
}

// The scales of two tokens, by which values are multiplied.
DEVICE u32 pack_scales(float first, float second) {
    return pack_f16(first * SCALE_BIAS, second * SCALE_BIAS);
}
