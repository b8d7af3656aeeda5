// The rotary rotation of four pairs, shared by rope and rope_append so that both give the same bits.
//
// A quad is 4 consecutive elements. Unit u of a head is the two quads that hold its pairs 4u to 4u + 3: adjacent in the interleaved layout,
// half a head apart in the half-split one. Offsets and strides are multiples of a quad.
#pragma once

#include "cache/append.cuh"

// Input, output and angles: RopeArgs of src/cuda/ops/rope.rs.
struct RopeArgs {
    u64 x;              // [max_tokens, heads, 8 * units], strided
    u64 y;              // the same shape; may be x
    u64 x_token_stride; // bytes, as the others
    u64 x_head_stride;
    u64 y_token_stride;
    u64 y_head_stride;
    u64 positions; // i32 [max_tokens]
    u64 cos_sin;   // f32 [max_position, 8 * units], cosines, then sines
    u32 max_position;
    u32 units;      // of a head: R / 8
    u32 head_units; // of all heads of a token
    u32 is_interleaved;
    float scale; // of what is rotated
    u32 reserved;
    Divisor by_units;
};

struct Angles {
    uint4 cos, sin;
};

// Positions are the device's, which no host check sees: they are clamped to the table's 0 to max_position - 1.
__device__ __forceinline__ u32 position_of(const RopeArgs &args, u32 token) {
    int position = max((int)load_4(args.positions + 4ull * token), 0);
    return min((u32)position, args.max_position - 1);
}

__device__ __forceinline__ Angles angles_of(const RopeArgs &args, u32 position, u32 unit) {
    u64 at = args.cos_sin + ((u64)position * (2 * args.units) + unit) * 16;
    return Angles{read_16(at), read_16(at + 16ull * args.units)};
}

__device__ __forceinline__ u32 times(u32 bits, float scale) { return __float_as_uint(__fmul_rn(__uint_as_float(bits), scale)); }

__device__ __forceinline__ Angles scaled(const Angles &angles, float scale) {
    const uint4 cos = angles.cos, sin = angles.sin;
    return Angles{make_uint4(times(cos.x, scale), times(cos.y, scale), times(cos.z, scale), times(cos.w, scale)),
                  make_uint4(times(sin.x, scale), times(sin.y, scale), times(sin.z, scale), times(sin.w, scale))};
}

// The two quads of a unit.
__device__ __forceinline__ u32 first_quad(const RopeArgs &args, u32 unit) { return args.is_interleaved ? 2 * unit : unit; }
__device__ __forceinline__ u32 second_quad(const RopeArgs &args, u32 unit) { return args.is_interleaved ? 2 * unit + 1 : args.units + unit; }

// By loads that are not .nc: in place, the kernel writes the memory that it reads.
template <class T>
__device__ __forceinline__ void load_quad(u64 row, u32 quad, u32 *words) {
    u64 at = row + quad * (4 * T::BYTES);
    if constexpr (T::BYTES == 4) {
        uint4 x = load_16(at);
        words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    } else {
        uint2 x = load_8(at);
        words[0] = x.x, words[1] = x.y;
    }
}

template <class T>
__device__ __forceinline__ void store_quad(u64 row, u32 quad, const u32 *words) {
    u64 at = row + quad * (4 * T::BYTES);
    if constexpr (T::BYTES == 4) {
        store_16(at, make_uint4(words[0], words[1], words[2], words[3]));
    } else if constexpr (T::BYTES == 2) {
        store_8(at, make_uint2(words[0], words[1]));
    } else {
        store_4(at, words[0]);
    }
}

__device__ __forceinline__ bool is_number(u32 bits) { return (bits & F32_INF) != F32_INF; }

// f32 bits of both quads. Explicit fma and mul: one product is rounded and the other is not. The compiler may contract as it likes
// otherwise, and two kernels could differ in some bits.
__device__ __forceinline__ void rotate(u32 *bits, const Angles &angles, bool is_interleaved) {
    const u32 cos[4] = {angles.cos.x, angles.cos.y, angles.cos.z, angles.cos.w};
    const u32 sin[4] = {angles.sin.x, angles.sin.y, angles.sin.z, angles.sin.w};
    u32 turned[8];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 x_bits = is_interleaved ? bits[2 * i] : bits[i];
        u32 y_bits = is_interleaved ? bits[2 * i + 1] : bits[4 + i];
        float x = __uint_as_float(x_bits), y = __uint_as_float(y_bits);
        float c = __uint_as_float(cos[i]), s = __uint_as_float(sin[i]);
        bool both = is_number(x_bits) && is_number(y_bits);
        u32 x_new = __float_as_uint(__fmaf_rn(x, c, -__fmul_rn(y, s)));
        u32 y_new = __float_as_uint(__fmaf_rn(y, c, __fmul_rn(x, s)));
        turned[2 * i] = both ? x_new : 0x7FC00000u;
        turned[2 * i + 1] = both ? y_new : 0x7FC00000u;
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        bits[i] = is_interleaved ? turned[i] : turned[2 * i];
        bits[4 + i] = is_interleaved ? turned[4 + i] : turned[2 * i + 1];
    }
}

// The words of both quads, rotated and rounded to T.
template <class T>
__device__ __forceinline__ void rotated(const RopeArgs &args, u64 row, u32 unit, const Angles &angles, u32 *words) {
    u32 bits[8];
    load_quad<T>(row, first_quad(args, unit), words);
    load_quad<T>(row, second_quad(args, unit), words + T::BYTES);
    T::widen(words, bits);
    rotate(bits, angles, args.is_interleaved);
    T::narrow(bits, words);
}

// Calls `body` with what `dtype` names: F32, F16 or Bf16.
template <class Body>
__device__ __forceinline__ void with_dtype(u32 dtype, const Body &body) {
    switch (dtype) {
        case 0: body(F32()); break;
        case 1: body(F16()); break;
        default: body(Bf16()); break;
    }
}

// Rotates one unit; `unit` counts the units of all heads of the token. The dtype is looked at before and after the rotation, whose code is
// there once. `store` is given the row of y, both quads and their f32 bits.
template <class Store>
__device__ __forceinline__ void rotate_unit_into(const RopeArgs &args, u32 dtype, u32 token, u32 position, u32 unit, const Store &store) {
    u32 head = divide(unit, args.by_units);
    unit -= head * args.units;
    u64 x_row = args.x + token * args.x_token_stride + head * args.x_head_stride;
    u64 y_row = args.y + token * args.y_token_stride + head * args.y_head_stride;
    Angles angles = scaled(angles_of(args, position, unit), args.scale);
    u32 bits[8], first = first_quad(args, unit), second = second_quad(args, unit);
    with_dtype(dtype, [&](auto x) {
        using T = decltype(x);
        u32 words[2 * T::BYTES];
        load_quad<T>(x_row, first, words);
        load_quad<T>(x_row, second, words + T::BYTES);
        T::widen(words, bits);
    });
    rotate(bits, angles, args.is_interleaved);
    store(y_row, first, second, bits);
}

// Stores both quads of a unit in the dtype of the input.
__device__ __forceinline__ void store_unit(u32 dtype, u64 row, u32 first, u32 second, const u32 *bits) {
    with_dtype(dtype, [&](auto x) {
        using T = decltype(x);
        u32 words[2 * T::BYTES];
        T::narrow(bits, words);
        store_quad<T>(row, first, words);
        store_quad<T>(row, second, words + T::BYTES);
    });
}

__device__ __forceinline__ void rotate_unit(const RopeArgs &args, u32 dtype, u32 token, u32 position, u32 unit) {
    rotate_unit_into(args, dtype, token, position, unit,
                     [&](u64 row, u32 first, u32 second, const u32 *bits) { store_unit(dtype, row, first, second, bits); });
}
