// A row of an indexer, a key or a head's query: 128 elements that are rotated and quantised by a warp, a quad (4 consecutive elements) a
// lane.
//
//   x[0..64] = RoPE(x[0..64]); x = x H_128 / 128^1/2; scale = max(amax, 1e-4) / 448, or the power of two from there on
//
// All 32 lanes call these functions. A row of which an element is not finite becomes NaN.
#pragma once

#include "lib/divisor.cuh"
#include "lib/global.cuh"
#include "lib/quads.cuh"
#include "lib/round.cuh"

#define ALL_LANES 0xFFFFFFFFu
#define LEAST_AMAX 0x38D1B717u // bits of 1e-4
#define NAN_BITS 0x7FC00000u

// The format, and where the angles are: Index of src/cuda/ops/index_row.rs.
struct IndexArgs {
    u64 positions; // i32 [max_tokens]; unread without RoPE, as the next
    u64 cos_sin;   // f32 [max_position, 64]: 32 cosines, 32 sines
    u32 max_position;
    u32 rope; // 0: none, 1: pairs (2i, 2i + 1), 2: pairs (i, i + 32)
    u32 hadamard;
    u32 ue8m0;
    u32 input;  // dtypes: 0 f32, 1 f16, 2 bf16
    u32 output; // the same; unread where it is codes
};

__device__ __forceinline__ float4 float4_at(u64 at) {
    uint4 x = read_16(at);
    return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
}

__device__ __forceinline__ float4 quad_of(u64 row, u32 lane, u32 dtype) {
    const u64 at[1] = {row + lane * quad_bytes(dtype)};
    float4 quad[1];
    read_quads<1>(at, dtype, quad);
    return quad[0];
}

__device__ __forceinline__ u32 magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

__device__ __forceinline__ u32 largest_of(float4 x) { return max(max(magnitude(x.x), magnitude(x.y)), max(magnitude(x.z), magnitude(x.w))); }

__device__ __forceinline__ bool row_is_finite(float4 x) { return __all_sync(ALL_LANES, largest_of(x) < F32_INF); }

__device__ __forceinline__ float4 from_lane(float4 x, u32 apart) {
    return make_float4(__shfl_xor_sync(ALL_LANES, x.x, apart), __shfl_xor_sync(ALL_LANES, x.y, apart), __shfl_xor_sync(ALL_LANES, x.z, apart),
                       __shfl_xor_sync(ALL_LANES, x.w, apart));
}

__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
    for (u32 apart = 16; apart > 0; apart /= 2) {
        x += __shfl_xor_sync(ALL_LANES, x, apart);
    }
    return x;
}

// The angles of a lane's elements: of a pair (2i, 2i + 1) two cosines and two sines, of a pair (i, i + 32) four.
struct Angles {
    float4 cos, sin;
};

// Positions are the device's, which no host check sees: they are clamped to the table's 0 to max_position - 1.
__device__ __forceinline__ Angles angles_at(const IndexArgs &args, u64 position_at, u32 lane) {
    u32 position = min((u32)max((int)load_4(position_at), 0), args.max_position - 1);
    u64 row = args.cos_sin + position * 256ull;
    if (args.rope == 2) {
        u64 at = row + lane % 8 * 16;
        return Angles{float4_at(at), float4_at(at + 128)};
    }
    u64 at = row + lane % 16 * 8;
    uint2 cos = read_8(at), sin = read_8(at + 128);
    float c = __uint_as_float(cos.x), d = __uint_as_float(cos.y), s = __uint_as_float(sin.x), t = __uint_as_float(sin.y);
    return Angles{make_float4(c, c, d, d), make_float4(s, s, t, t)};
}

// RoPE of the elements of lanes 0 to 15.
__device__ __forceinline__ float4 rotary(const IndexArgs &args, float4 x, const Angles &angles, u32 lane) {
    const float4 c = angles.cos, s = angles.sin;
    // Lanes 0 to 7 have the first elements of pairs (i, i + 32), and lanes 8 to 15 the second.
    float4 other = from_lane(x, 8);
    float sign = lane < 8 ? -1.0f : 1.0f;
    float4 half = make_float4(x.x * c.x + sign * (other.x * s.x), x.y * c.y + sign * (other.y * s.y), x.z * c.z + sign * (other.z * s.z),
                              x.w * c.w + sign * (other.w * s.w));
    float4 pairs = make_float4(x.x * c.x - x.y * s.x, x.y * c.x + x.x * s.x, x.z * c.z - x.w * s.z, x.w * c.z + x.z * s.z);
    return lane >= 16 ? x : args.rope == 2 ? half : pairs;
}

// x H_128 / 128^1/2 in Sylvester's order: the sign of element i in result j is the parity of i & j. The lowest two bits are a lane's.
__device__ __forceinline__ float4 hadamard(float4 x, u32 lane) {
    float a = x.x + x.y, b = x.x - x.y, c = x.z + x.w, d = x.z - x.w;
    x = make_float4(a + c, b + d, a - c, b - d);
#pragma unroll
    for (u32 bit = 1; bit < 32; bit *= 2) {
        float4 y = from_lane(x, bit);
        float sign = lane & bit ? -1.0f : 1.0f;
        x = make_float4(y.x + sign * x.x, y.y + sign * x.y, y.z + sign * x.z, y.w + sign * x.w);
    }
    const float factor = 0.08838834764831845f;
    return make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
}

// RoPE and the Hadamard rotation, as the format has them.
__device__ __forceinline__ float4 rotated(const IndexArgs &args, float4 x, const Angles &angles, u32 lane) {
    if (args.rope != 0) {
        x = rotary(args, x, angles, lane);
    }
    return args.hadamard ? hadamard(x, lane) : x;
}

// The scale of a row's codes. 448 is 1.75 * 2^8: the exponent of amax is 8 more than that of the power of two from amax / 448 on, or 7
// where its mantissa is past 1.75.
__device__ __forceinline__ float scale_of(const IndexArgs &args, float4 x) {
    u32 amax = max(__reduce_max_sync(ALL_LANES, largest_of(x)), LEAST_AMAX);
    return args.ue8m0 ? __uint_as_float(((amax + 0x1FFFFFu >> 23) - 8u) << 23) : __fdiv_rn(__uint_as_float(amax), 448.0f);
}

// The code of x / scale, which is not past 456, in the lowest byte, and its sign in the highest bit.
__device__ __forceinline__ u32 code_of(float x, float scale) {
    const E4m3Scale unscaled = {1.0f, 128.0f, 128.0f, 0u};
    u32 bits = __float_as_uint(__fdiv_rn(x, scale)), doubt = 0;
    return e4m3_fast(bits & 0x7FFFFFFFu, unscaled, doubt) & 0xFFu | bits >> 24 & 0x80u;
}

// Stores a lane's quad of a row: codes of x / scale, or elements of the output's dtype.
template <bool CODES>
__device__ __forceinline__ void store_part(const IndexArgs &args, u64 row, u32 lane, float4 x, float scale, bool is_finite) {
    if constexpr (CODES) {
        u32 codes = code_of(x.x, scale) | code_of(x.y, scale) << 8 | code_of(x.z, scale) << 16 | code_of(x.w, scale) << 24;
        store_4(row + lane * 4, is_finite ? codes : 0x7F7F7F7Fu);
    } else {
        float nan = __uint_as_float(NAN_BITS);
        store_quad(row + lane * quad_bytes(args.output), args.output, is_finite ? x : make_float4(nan, nan, nan, nan));
    }
}
