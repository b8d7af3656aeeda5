// Quads, 4 consecutive elements, of weights in a format known at run time.
#pragma once

#include "project.cuh"

// Codes of src/cuda/formats.rs behind those of dtypes.
#define WEIGHTS_E4M3 3u
#define WEIGHTS_Q8_0 4u

// Four bytes of a word, the first one low, as e4m3 codes: exact, NaN codes included.
__device__ __forceinline__ float4 quad_of_e4m3(u32 codes) {
    float quad[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 code = codes >> (8 * i), magnitude = code & 0x7Fu;
        const float value = magnitude == 0x7Fu ? __uint_as_float(0x7FC00000u) : __uint_as_float(magnitude << 20) * 0x1p120f;
        quad[i] = code & 0x80u ? -value : value;
    }
    return make_float4(quad[0], quad[1], quad[2], quad[3]);
}

// Quad `quad` of a row of Q8_0 blocks: 34 bytes, which are an f16 scale and 32 i8, aligned to 2 bytes.
__device__ __forceinline__ float4 quad_of_q8_0(u64 row, u32 quad) {
    const u64 block = row + quad / 8 * 34, at = block + 2 + quad % 8 * 4;
    const u32 scale_bits = read_2(block), low = read_2(at), high = read_2(at + 2);
    const float scale = f32_of_f16(scale_bits);
    return make_float4(scale * (float)(signed char)low, scale * (float)(signed char)(low >> 8), scale * (float)(signed char)high, scale * (float)(signed char)(high >> 8));
}

// Loads a quad of each of COUNT rows: all loads of elements are issued before the first conversion.
template <u32 COUNT>
__device__ __forceinline__ void read_weights(const u64 (&rows)[COUNT], const u32 (&at)[COUNT], u32 format, float4 (&quads)[COUNT]) {
    if (format == WEIGHTS_E4M3) {
        u32 codes[COUNT];
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) codes[i] = read_4(rows[i] + at[i] * 4);
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) quads[i] = quad_of_e4m3(codes[i]);
    } else if (format == WEIGHTS_Q8_0) {
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) quads[i] = quad_of_q8_0(rows[i], at[i]);
    } else {
        u64 places[COUNT];
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) places[i] = rows[i] + at[i] * quad_bytes(format);
        read_quads(places, format, quads);
    }
}
