// e4m3 codes of f32 that are in registers, without a branch and without f64: for epilogues, which have no room for the slow path of
// round.cuh. The codes are the same: of the exact x / scale, rounded to nearest even.
#pragma once

#include "round.cuh"

// CodeScale of src/cuda/ops/codes.rs.
struct CodeScale {
    float factor; // a power of two that brings the scale near 1; exact, or what it multiplies is far from every tie
    float scale; // the scale times `factor`
    float inverse; // 1 / scale, rounded
    u32 reserved;
};

// The code of x / scale. Saturates at 448, infinities too; NaN gives 0x7F.
//
//   y = |x| / scale, to within a few units in its last place; e = its exponent, at least -6, below which codes are subnormal
//   n = floor(y / 2^(e-3)), so that the code is n or n + 1
//   the tie (n + 1/2) * 2^(e-3) has 5 bits, so the sign of |x| - tie * scale by one fma is exact, and says which of both is nearest
//
// Where y is on the wrong side of a whole number, the quotient is next to it, and far from the tie that is looked at.
__device__ __forceinline__ u32 e4m3_code(float x, const CodeScale &by) {
    const float a = __fmul_rn(fabsf(x), by.factor);
    const float y = fminf(__fmul_rn(a, by.inverse), 448.0f);
    const u32 biased = max(__float_as_uint(y) >> 23, 121u);
    const float unit = __uint_as_float((biased - 3u) << 23);
    const float n = truncf(__fmul_rn(y, __uint_as_float((257u - biased) << 23)));
    const float above = fmaf(-__fmul_rn(n + 0.5f, unit), by.scale, a);
    const u32 low = (u32)n;
    const u32 up = above > 0.0f || (above == 0.0f && (low & 1u)) ? 1u : 0u;
    const u32 code = min(((biased - 120u) << 3) + low - 8u + up, 0x7Eu);
    const u32 bits = __float_as_uint(x);
    return is_nan(bits) ? 0x7Fu : code | (bits >> 24 & 0x80u);
}

// Four codes in a word, the first one low.
__device__ __forceinline__ u32 e4m3_codes(float a, float b, float c, float d, const CodeScale &by) {
    return e4m3_code(a, by) | e4m3_code(b, by) << 8 | e4m3_code(c, by) << 16 | e4m3_code(d, by) << 24;
}
