// Quads, 4 consecutive elements, of f32, f16 or bf16, by a dtype known at run time: for kernels that are not bound by these conversions.
#pragma once

#include "global.cuh"
#include "round.cuh"

// Codes of src/cuda/formats.rs. Only outputs are e4m3.
#define DTYPE_F32 0u
#define DTYPE_F16 1u
#define DTYPE_BF16 2u
#define DTYPE_E4M3 3u

// An array of [tokens, heads, dim]. Strides count bytes.
struct Place {
    u64 address;
    u64 token_stride;
    u64 head_stride;
};

__device__ __forceinline__ u64 row_of(const Place &place, u32 token, u32 head) {
    return place.address + token * place.token_stride + head * place.head_stride;
}

__device__ __forceinline__ u32 quad_bytes(u32 dtype) { return dtype == DTYPE_F32 ? 16 : 8; }

// Loads COUNT quads: all loads are issued before the first conversion. Offsets and strides are multiples of 8 elements.
template <u32 COUNT>
__device__ __forceinline__ void read_quads(const u64 (&at)[COUNT], u32 dtype, float4 (&quads)[COUNT]) {
    if (dtype == DTYPE_F32) {
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            uint4 x = read_16(at[i]);
            quads[i] = make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
        }
        return;
    }
    uint2 words[COUNT];
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
        words[i] = read_8(at[i]);
    }
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
        u32 low = words[i].x, high = words[i].y;
        if (dtype == DTYPE_F16) {
            quads[i] = make_float4(f32_of_f16(low & 0xFFFFu), f32_of_f16(low >> 16), f32_of_f16(high & 0xFFFFu), f32_of_f16(high >> 16));
        } else {
            quads[i] = make_float4(__uint_as_float(low << 16), __uint_as_float(low & 0xFFFF0000u), __uint_as_float(high << 16), __uint_as_float(high & 0xFFFF0000u));
        }
    }
}

__device__ __forceinline__ void store_quad(u64 at, u32 dtype, float4 x) {
    if (dtype == DTYPE_F32) {
        store_16(at, make_uint4(__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w)));
    } else if (dtype == DTYPE_F16) {
        store_8(at, make_uint2(f16_pair(x.x, x.y), f16_pair(x.z, x.w)));
    } else {
        store_8(at, make_uint2(bf16_pair(x.x, x.y), bf16_pair(x.z, x.w)));
    }
}

// sum + a * b.
__device__ __forceinline__ float4 plus_product(float a, float4 b, float4 sum) {
    return make_float4(fmaf(a, b.x, sum.x), fmaf(a, b.y, sum.y), fmaf(a, b.z, sum.z), fmaf(a, b.w, sum.w));
}
