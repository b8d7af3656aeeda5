// e4m3 weights of head_project on tensor cores: codes are copied by cp.async, half the bytes, and widened to the dtype of x in shared
// memory.
#pragma once

#include "lib/ptx.cuh"

constexpr u32 TWO_TO_120_BF16_PAIR = 0x7B807B80u, TWO_TO_8_F16_PAIR = 0x5C005C00u, MINUS_ZERO_PAIR = 0x80008000u;

// Two codes, in bits 8 to 15 and 24 to 31, as two elements: exact, subnormals included. NaN codes become 480.
//
// Exponent and mantissa moved to where the wider dtype has them are the code's value but for the exponent's bias: 2^-8 times it in f16,
// 2^-120 in bf16. A product with the power of two is exact.
template <bool IS_BF16>
DEVICE u32 widen_pair(u32 codes) {
    const u32 signs = codes & 0x80008000u;
    if constexpr (IS_BF16) {
        // mul.bf16x2 is for compute capability 9.0; this is for 8.0.
        u32 pair;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(signs | (codes >> 4 & 0x07F007F0u)), "r"(TWO_TO_120_BF16_PAIR), "r"(MINUS_ZERO_PAIR));
        return pair;
    } else {
        return multiply_f16_pairs(signs | (codes >> 1 & 0x3F803F80u), TWO_TO_8_F16_PAIR);
    }
}

// A pair from widen_pair with a NaN for each NaN code: adding 1 to its seven bits, all ones, carries into the bit above.
DEVICE u32 with_nans(u32 pair, u32 codes) {
    const u32 nans = ((codes & 0x7F007F00u) + 0x01000100u) & 0x80008000u;
    return pair | nans - (nans >> 15);
}

// Not 0 if some of four codes is NaN, 0x7F or 0xFF. Adding 1 to a byte flips its top bit only then, or where a NaN code below it carries.
DEVICE u32 nan_bits(u32 codes) {
    return ((codes + 0x01010101u) ^ codes) & 0x80808080u;
}

// 16 codes as 16 elements, in order.
template <bool IS_BF16>
DEVICE void widen_chunk(const u32 (&codes)[4], u32 (&wide)[2][4]) {
    const bool has_nan = nan_bits(codes[0]) | nan_bits(codes[1]) | nan_bits(codes[2]) | nan_bits(codes[3]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        // Codes 0 and 1 of a word, or 2 and 3, in the upper bytes of its halves.
        const u32 pair = __byte_perm(codes[i / 2], 0, i % 2 ? 0x3424 : 0x1404);
        wide[i / 4][i % 4] = widen_pair<IS_BF16>(pair);
        if (has_nan) wide[i / 4][i % 4] = with_nans(wide[i / 4][i % 4], pair);
    }
}

// Which chunks of 16 codes of a slice of weights a thread of tile T has. It widens those that it copied, so no barrier is between.
template <class T>
struct CodeChunks {
    static constexpr int ROW_CHUNKS = T::WEIGHT_COLUMNS / 16, PASS_ROWS = T::THREADS / ROW_CHUNKS, PASSES = T::WEIGHT_ROWS / PASS_ROWS;
    static_assert(T::WEIGHT_ROWS % PASS_ROWS == 0, "whole passes");
    DEVICE static u32 row(int pass) { return pass * PASS_ROWS + threadIdx.x / ROW_CHUNKS; }
    DEVICE static u32 chunk() { return threadIdx.x % ROW_CHUNKS; }
    DEVICE static u32 place(int pass) { return (pass * T::THREADS + threadIdx.x) * 16; }
};

// Issues cp.async of the codes of a slice. Zeros from row `rows` and from chunk `chunks` on.
template <class T>
DEVICE void copy_codes(u32 to, u64 from, u64 stride, u32 rows, u32 chunks) {
    using Chunks = CodeChunks<T>;
#pragma unroll
    for (int pass = 0; pass < Chunks::PASSES; pass++) {
        const u32 row = Chunks::row(pass), chunk = Chunks::chunk();
        copy_16(to + Chunks::place(pass), reinterpret_cast<const void *>(from + row * stride + chunk * 16), row < rows && chunk < chunks, true);
    }
}

// Widens the codes of a slice that has been copied.
template <class T>
DEVICE void widen_codes(u32 from, u32 to) {
    using Chunks = CodeChunks<T>;
#pragma unroll
    for (int pass = 0; pass < Chunks::PASSES; pass++) {
        u32 codes[4], wide[2][4];
        load_16(codes, from + Chunks::place(pass));
        widen_chunk<T::IS_BF16>(codes, wide);
#pragma unroll
        for (int half = 0; half < 2; half++) store_16(to + T::WeightOrder::at(Chunks::row(pass), Chunks::chunk() * 2 + half), wide[half]);
    }
}
