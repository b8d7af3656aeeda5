// e4m3 codes of f32 that are in registers, of the exact x / scale, rounded to nearest even. The slow path needs no f64, which an epilogue
// has no registers for.
#pragma once

#include "round.cuh"

// CodeScale of src/cuda/ops/codes.rs.
struct CodeScale {
    E4m3Scale fast;
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

// COUNT codes, four to a word, the first one low.
template <int COUNT>
__device__ __forceinline__ void e4m3_codes(const float (&x)[COUNT], const CodeScale &by, u32 (&words)[COUNT / 4]) {
    u32 codes[COUNT], doubt = 0, largest = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const u32 magnitude = __float_as_uint(x[i]) & 0x7FFFFFFFu;
        codes[i] = e4m3_fast(magnitude, by.fast, doubt);
        largest = max(largest, magnitude);
    }
    if (doubt == 0 && largest <= by.fast.max_bits) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            const u32 low = __byte_perm(codes[i], codes[i + 1], 0x0040), high = __byte_perm(codes[i + 2], codes[i + 3], 0x0040);
            const u32 low_tops = __byte_perm(__float_as_uint(x[i]), __float_as_uint(x[i + 1]), 0x0073);
            const u32 high_tops = __byte_perm(__float_as_uint(x[i + 2]), __float_as_uint(x[i + 3]), 0x0073);
            words[i / 4] = __byte_perm(low, high, 0x5410) | (__byte_perm(low_tops, high_tops, 0x5410) & 0x80808080u);
        }
        return;
    }
    float rest[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) rest[i] = x[i];
#pragma unroll
    for (int w = 0; w < COUNT / 4; w++) words[w] = 0;
    // Numbers pass through the first one's register, and codes through the last word's highest byte.
#pragma unroll 1
    for (int i = 0; i < COUNT; i++) {
        const u32 code = e4m3_code(rest[0], by);
#pragma unroll
        for (int j = 0; j + 1 < COUNT; j++) rest[j] = rest[j + 1];
#pragma unroll
        for (int w = 0; w < COUNT / 4; w++) words[w] = words[w] >> 8 | (w + 1 < COUNT / 4 ? words[w + 1] : code) << 24;
    }
}
