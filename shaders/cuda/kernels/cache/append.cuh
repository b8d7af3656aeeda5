// Shared by kv_append and rope_append: arguments, the address of a cache slot, and conversions to the cache's dtype.
//
// An oct is 8 consecutive elements. L, R, and the cache's offset and strides are multiples of 8 elements; the inputs' are multiples of 4.
#pragma once

#include "lib/divisor.cuh"
#include "lib/global.cuh"
#include "lib/guard.cuh"
#include "lib/round.cuh"

// AppendArgs of src/cuda/ops/kv_append.rs.
struct AppendArgs {
    u64 kv_c;  // [max_tokens, L], strided
    u64 k_pe;  // [max_tokens, R], strided
    u64 kv;    // [num_pages, page_size, L + R], the layer's first page, pages strided
    u64 table; // u32 [1 + max_tokens] num_tokens, then slots
    u64 kv_c_stride; // bytes, as the other strides
    u64 k_pe_stride;
    u64 block_stride;
    u32 max_tokens; // tokens that table and inputs hold
    u32 num_slots; // of the slab that is written
    u32 first_slot; // of that slab; 0 where it is the whole pool
    u32 reserved_0;
    u32 page_size;
    u32 latent_octs;
    u32 row_octs;
    u32 is_wide; // the inputs' tokens are aligned to 16 bytes
    Divisor by_row_octs;
    Divisor by_page_size;
    E4m3Scale scale;
    Guard guard; // of the rotary part of a record, else of all
};

// For each dtype: conversion of an oct to f32 bits (`widen`) and from them (`narrow`). For e4m3 caches: |x| of 8 elements, any NaN for a
// NaN (`magnitudes`), and the signs of 4 elements at the sign bits of a word of codes (`signs`).
struct F32 {
    static const u32 BYTES = 4;
    static __device__ __forceinline__ u32 element(u64 at) { return read_4(at); }
    static __device__ __forceinline__ void widen(const u32 *words, u32 *bits) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            bits[i] = words[i];
        }
    }
    static __device__ __forceinline__ void narrow(const u32 *bits, u32 *words) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            words[i] = f32_quiet(bits[i]);
        }
    }
    static __device__ __forceinline__ void magnitudes(const u32 *words, u32 *bits) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            bits[i] = words[i] & 0x7FFFFFFFu;
        }
    }
    static __device__ __forceinline__ u32 signs(const u32 *words, u32 half) {
        const u32 *x = words + 4 * half;
        u32 bytes = __byte_perm(__byte_perm(x[0], x[1], 0x0073), __byte_perm(x[2], x[3], 0x0073), 0x5410);
        return bytes & 0x80808080u;
    }
};

struct F16 {
    static const u32 BYTES = 2;
    static __device__ __forceinline__ u32 element(u64 at) { return f32_bits_of_f16(read_2(at)); }
    static __device__ __forceinline__ void widen(const u32 *words, u32 *bits) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            bits[2 * i] = f32_bits_of_f16(words[i] & 0xFFFFu);
            bits[2 * i + 1] = f32_bits_of_f16(words[i] >> 16);
        }
    }
    static __device__ __forceinline__ void narrow(const u32 *bits, u32 *words) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            words[i] = f16_bits(bits[2 * i]) | f16_bits(bits[2 * i + 1]) << 16;
        }
    }
    static __device__ __forceinline__ void magnitudes(const u32 *words, u32 *bits) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            bits[2 * i] = __float_as_uint(f32_of_f16(words[i] & 0x7FFFu));
            bits[2 * i + 1] = __float_as_uint(f32_of_f16(words[i] >> 16 & 0x7FFFu));
        }
    }
    static __device__ __forceinline__ u32 signs(const u32 *words, u32 half) {
        return __byte_perm(words[2 * half], words[2 * half + 1], 0x7531) & 0x80808080u;
    }
};

// A signalling NaN stays one in f32; `narrow` of the cache's dtype makes it quiet.
struct Bf16 {
    static const u32 BYTES = 2;
    static __device__ __forceinline__ u32 element(u64 at) { return read_2(at) << 16; }
    static __device__ __forceinline__ void widen(const u32 *words, u32 *bits) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            bits[2 * i] = words[i] << 16;
            bits[2 * i + 1] = words[i] & 0xFFFF0000u;
        }
    }
    static __device__ __forceinline__ void narrow(const u32 *bits, u32 *words) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            words[i] = bf16_bits(bits[2 * i]) | bf16_bits(bits[2 * i + 1]) << 16;
        }
    }
    static __device__ __forceinline__ void magnitudes(const u32 *words, u32 *bits) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            bits[2 * i] = words[i] << 16 & 0x7FFF0000u;
            bits[2 * i + 1] = words[i] & 0x7FFF0000u;
        }
    }
    static __device__ __forceinline__ u32 signs(const u32 *words, u32 half) { return F16::signs(words, half); }
};

struct E4m3 {
    static const u32 BYTES = 1;
};

template <class A, class B> struct Same { static const bool VALUE = false; };
template <class A> struct Same<A, A> { static const bool VALUE = true; };

template <class In, bool IS_WIDE>
__device__ __forceinline__ void load_oct(u64 at, u32 *words) {
#pragma unroll
    for (u32 i = 0; i < 2 * In::BYTES; i += 4) {
        uint4 x;
        if (IS_WIDE) {
            x = read_16(at + 4 * i);
        } else {
            uint2 low = read_8(at + 4 * i), high = read_8(at + 4 * i + 8);
            x = make_uint4(low.x, low.y, high.x, high.y);
        }
        words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
    }
}

template <class Out>
__device__ __forceinline__ void store_oct(u64 at, const u32 *words) {
#pragma unroll
    for (u32 i = 0; i < 2 * Out::BYTES; i += 4) {
        store_16(at + 4 * i, make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]));
    }
}

// Takes an oct into an extent.
template <class In>
__device__ __forceinline__ void extend_by_oct(Extent &extent, const u32 *words) {
    u32 x[8];
    In::magnitudes(words, x);
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        extent.note(x[i]);
    }
}

// Counts what rounding an oct loses.
template <class In>
__device__ __forceinline__ void note_oct(Lost &lost, const u32 *words, const Guard &guard) {
    u32 x[8];
    In::magnitudes(words, x);
    lost.note(x, guard);
}

// 8 codes by the fast path; false where some code needs e4m3_oct_exact.
template <class In>
__device__ __forceinline__ bool e4m3_oct(const u32 *words, const E4m3Scale &scale, uint2 &codes) {
    u32 x[8], code[8], doubt = 0, largest = 0;
    In::magnitudes(words, x);
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        code[i] = e4m3_fast(x[i], scale, doubt);
        largest = max(largest, x[i]);
    }
    // Gathers the lowest bytes.
    codes.x = __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040), 0x5410);
    codes.y = __byte_perm(__byte_perm(code[4], code[5], 0x0040), __byte_perm(code[6], code[7], 0x0040), 0x5410);
    codes.x |= In::signs(words, 0);
    codes.y |= In::signs(words, 1);
    return doubt == 0 && largest <= scale.max_bits;
}

// 8 codes of the elements at an address, exact for every input; the slow path.
template <class In>
__device__ __forceinline__ uint2 e4m3_oct_exact(u64 at, float k_scale) {
    u64 codes = 0;
#pragma unroll 1
    for (u32 i = 0; i < 8; i++) {
        codes |= (u64)e4m3_quotient(In::element(at + i * In::BYTES), k_scale) << 8 * i;
    }
    return make_uint2((u32)codes, (u32)(codes >> 32));
}

// The slot of a token in the slab; num_slots or more for one that is elsewhere, or nowhere (NO_SLOT).
__device__ __forceinline__ u32 slot_of(const AppendArgs &args, u32 token) {
    return read_4(args.table + 4ull + 4ull * token) - args.first_slot;
}

// Address of an oct of the token in a slot of the slab.
template <class Out>
__device__ __forceinline__ u64 target(const AppendArgs &args, u32 slot, u32 oct) {
    u32 page = divide(slot, args.by_page_size);
    u32 row = slot - page * args.page_size;
    return args.kv + page * args.block_stride + (u64)(row * args.row_octs + oct) * (8 * Out::BYTES);
}
