// Conversions between f32, f16, bf16 and e4m3 on bit patterns, bit for bit as on the host, by the crate `half` and `e4m3_encode`.
//
// The hardware rounds to nearest even, subnormals included; only its NaN patterns differ, so NaNs are converted here.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define F32_INF 0x7F800000u

__device__ __forceinline__ bool is_nan(u32 bits) { return (bits & 0x7FFFFFFFu) > F32_INF; }

// f16 bits -> f32; any NaN for a NaN.
__device__ __forceinline__ float f32_of_f16(u32 code) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)code));
    return x;
}

// f16 bits -> f32 bits; a NaN is made quiet, with all of its payload.
__device__ __forceinline__ u32 f32_bits_of_f16(u32 code) {
    u32 nan = (code & 0x8000u) << 16 | 0x7FC00000u | (code & 0x3FFu) << 13;
    return (code & 0x7FFFu) > 0x7C00u ? nan : __float_as_uint(f32_of_f16(code));
}

// f32 bits; a NaN is made quiet.
__device__ __forceinline__ u32 f32_quiet(u32 x) { return is_nan(x) ? x | 0x400000u : x; }

// f32 bits -> f16 bits. Overflows to infinity; a NaN is made quiet, with the top of its payload.
__device__ __forceinline__ u32 f16_bits(u32 x) {
    u32 nan = (x >> 16 & 0x8000u) | 0x7E00u | (x >> 13 & 0x3FFu);
    u16 code;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(code) : "f"(__uint_as_float(x)));
    return is_nan(x) ? nan : code;
}

// f32 bits -> bf16 bits. Overflows to infinity; a NaN is made quiet.
__device__ __forceinline__ u32 bf16_bits(u32 x) {
    u32 rounded = (x + 0x7FFFu + (x >> 16 & 1u)) >> 16;
    return is_nan(x) ? x >> 16 | 0x40u : rounded;
}

// Two codes of two f32, the first in the low half; any NaN for a NaN.
__device__ __forceinline__ u32 f16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// An e4m3 cache holds x / k_scale.
struct E4m3Scale {
    float k_scale;
    // For the fast path: bounds of 128 / k_scale, wider than a product's rounding error; both exact for a power of two, both 0 where the
    // scale is too small or too large for the fast path.
    float inv_low;
    float inv_high;
    u32 max_bits; // f32 bits of 456 * k_scale, the largest x that rounds to 448 without saturation; 0 without a fast path
};

// f32 bits of |x| -> e4m3 bits of the exact |x| / k_scale, rounded to nearest even, in the lowest byte. Sets a bit of `doubt` where only
// `e4m3_quotient` can decide.
//
// Interval arithmetic: y = 128 * |x| / k_scale lies between |x| * inv_low and |x| * inv_high. Each bound is rounded to e4m3 by an addition:
//
//   base = the power of two at or below y, at least 128 * 2^-6, below which codes are subnormal
//   sum = base + y * 2^-20 = base + n * ulp(base), n = y in eighths of base, to nearest even
//   code = 8 * (exponent of base - 1) + n; 8 times the exponent bits of 2^1 are 0 in a byte
//
// Where both bounds give the same sum it is that of the exact quotient, as rounding is monotonic. That holds up to max_bits.
__device__ __forceinline__ u32 e4m3_fast(u32 magnitude, const E4m3Scale &scale, u32 &doubt) {
    float low = __uint_as_float(magnitude) * scale.inv_low;
    float high = __uint_as_float(magnitude) * scale.inv_high;
    float base = __uint_as_float(max(__float_as_uint(low) & F32_INF, 0x40000000u));
    u32 sum = __float_as_uint(fmaf(low, 0x1p-20f, base));
    doubt |= sum ^ __float_as_uint(fmaf(high, 0x1p-20f, base));
    return sum + (sum >> 20);
}

// f32 bits x -> e4m3 bits of the exact x / k_scale, rounded to nearest even. Saturates at 448, infinities too; NaN gives 0x7F.
// It is exact because the f64 quotient of two f32 is on the same side of every tie as the exact quotient.
__device__ __forceinline__ u32 e4m3_quotient(u32 x, float k_scale) {
    if (is_nan(x)) {
        return 0x7Fu;
    }
    double quotient = fmin((double)__uint_as_float(x & 0x7FFFFFFFu) / (double)k_scale, 448.0);
    // The last place is 2^(e-3), and 2^-9 below 2^-6. Rounding up to the next power of two carries into the exponent by itself.
    int e = max((int)(__double_as_longlong(quotient) >> 52) - 1023, -6);
    double places = quotient * __longlong_as_double((long long)(1023 + 3 - e) << 52);
    u32 code = ((u32)(e + 7) << 3) + (u32)__double2int_rn(places) - 8u;
    return code | (x >> 24 & 0x80u);
}
