// What merge_states and correct_attn_out share: weights of sets, and what a thread takes of a row.
#pragma once

#include "lib/quads.cuh"
#include "lib/sum.cuh"

// -inf, +inf and NaN have all bits of the exponent set: a set with such an LSE is empty.
#define EXPONENT 0x7F800000u
#define NOTHING 0xFF800000u // -inf, the LSE of an empty set
#define LOWEST -3.402823466e38f

__device__ __forceinline__ bool weighs(u32 lse_bits) { return (lse_bits & EXPONENT) != EXPONENT; }

// base^x; log2_base is log2 of the base.
__device__ __forceinline__ float exp_of(float x, float log2_base) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * log2_base));
    return y;
}

__device__ __forceinline__ bool is_not_finite(float x) { return !weighs(__float_as_uint(x)); }

// A quad, for rows that are a multiple of 8 elements.
struct Quads {
    float4 x;

    static __device__ __forceinline__ u32 bytes(u32 dtype) { return quad_bytes(dtype); }
    static __device__ __forceinline__ Quads zero() { return {make_float4(0.0f, 0.0f, 0.0f, 0.0f)}; }
    static __device__ __forceinline__ Quads read(u64 at, u32 dtype) {
        u64 from[1] = {at};
        float4 quad[1];
        read_quads(from, dtype, quad);
        return {quad[0]};
    }
    __device__ __forceinline__ void store(u64 at, u32 dtype) const { store_quad(at, dtype, x); }
    // Bit for bit.
    static __device__ __forceinline__ void copy(u64 to, u64 from, u32 dtype) {
        if (dtype == DTYPE_F32) {
            store_16(to, read_16(from));
        } else {
            store_8(to, read_8(from));
        }
    }
    __device__ __forceinline__ Quads times(float by) const { return {make_float4(x.x * by, x.y * by, x.z * by, x.w * by)}; }
    // Adds to a sum and its rest.
    __device__ __forceinline__ void add(Quads &rest, const Quads &other) { add_compensated(x, rest.x, other.x); }
    __device__ __forceinline__ Quads with(const Quads &rest) const { return {compensated(x, rest.x)}; }
    __device__ __forceinline__ bool not_finite() const {
        return is_not_finite(x.x) | is_not_finite(x.y) | is_not_finite(x.z) | is_not_finite(x.w);
    }
};

// An element, for other rows.
struct Element {
    float x;

    static __device__ __forceinline__ u32 bytes(u32 dtype) { return dtype == DTYPE_F32 ? 4 : 2; }
    static __device__ __forceinline__ Element zero() { return {0.0f}; }
    static __device__ __forceinline__ Element read(u64 at, u32 dtype) {
        if (dtype == DTYPE_F32) {
            return {__uint_as_float(read_4(at))};
        }
        u32 code = read_2(at);
        return {dtype == DTYPE_F16 ? f32_of_f16(code) : __uint_as_float(code << 16)};
    }
    __device__ __forceinline__ void store(u64 at, u32 dtype) const {
        u32 bits = __float_as_uint(x);
        if (dtype == DTYPE_F32) {
            store_4(at, bits);
        } else {
            store_2(at, dtype == DTYPE_F16 ? f16_bits(bits) : bf16_bits(bits));
        }
    }
    static __device__ __forceinline__ void copy(u64 to, u64 from, u32 dtype) {
        if (dtype == DTYPE_F32) {
            store_4(to, read_4(from));
        } else {
            store_2(to, read_2(from));
        }
    }
    __device__ __forceinline__ Element times(float by) const { return {x * by}; }
    __device__ __forceinline__ void add(Element &rest, const Element &other) { add_compensated(x, rest.x, other.x); }
    __device__ __forceinline__ Element with(const Element &rest) const { return {compensated(x, rest.x)}; }
    __device__ __forceinline__ bool not_finite() const { return is_not_finite(x); }
};
