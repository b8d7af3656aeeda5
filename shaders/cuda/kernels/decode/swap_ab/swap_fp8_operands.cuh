// FP8 codes of a stage as the operand A of wgmma: by ldmatrix to registers, and to f16 there.
#pragma once

#include "swap_fp8_tile.cuh"

// Codes of 64 columns and 16 tokens, or of 16 columns and 64 tokens, as ldmatrix gives them: four a word.
using Codes = u32[2][4];
// Operands A of four wgmma of k = 16.
using Operands = u32[4][4];

// Keys, tokens by columns. A lane's word has four consecutive columns of a token; QueryRows permutes those of the queries so.
DEVICE void keys_to_f16(Operands& to, const Codes& codes) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        e4m3_to_f16(codes[i / 2][i % 2 * 2], to[i][0], to[i][2]);
        e4m3_to_f16(codes[i / 2][i % 2 * 2 + 1], to[i][1], to[i][3]);
    }
}

// Values, latent columns by tokens. A lane's word has two columns of two tokens: the even column becomes row lane / 4, the odd one row lane
// / 4 + 8.
DEVICE void values_to_f16(Operands& to, const Codes& codes) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) e4m3_to_f16(__byte_perm(codes[i / 2][i % 2 * 2 + h], 0, 0x3120), to[i][2 * h], to[i][2 * h + 1]);
}

// The same of records, of which a load gives two operands.
DEVICE void keys_to_f16(u32 (&first)[4], u32 (&second)[4], const u32 (&codes)[4]) {
    e4m3_to_f16(codes[0], first[0], first[2]);
    e4m3_to_f16(codes[1], first[1], first[3]);
    e4m3_to_f16(codes[2], second[0], second[2]);
    e4m3_to_f16(codes[3], second[1], second[3]);
}

DEVICE void values_to_f16(u32 (&first)[4], u32 (&second)[4], const u32 (&codes)[4]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        e4m3_to_f16(__byte_perm(codes[h], 0, 0x3120), first[2 * h], first[2 * h + 1]);
        e4m3_to_f16(__byte_perm(codes[2 + h], 0, 0x3120), second[2 * h], second[2 * h + 1]);
    }
}

// Where a lane reads codes of records by ldmatrix.
template <class T>
struct RecordReader {
    using Order = typename T::CodesOrder;
    u32 keys, values; // as those of CodesReader

    DEVICE RecordReader(u32 stages, u32 group, u32 warp) {
        const u32 lane = threadIdx.x % LANES;
        keys = in_a_register(stages + Order::at(warp * 16 + lane % 16, lane / 16));
        values = in_a_register(stages + Order::at(lane, warp) + group * (T::LATENT / T::WARPGROUPS));
    }

    // 32 columns of the warp's tokens.
    DEVICE void load_keys(u32 (&to)[4], u32 stage, int columns) const { load_matrices(to, keys + stage * T::STAGE_BYTES + columns * 32); }

    // A step of the rotary part of the warp's tokens, as an operand.
    DEVICE void load_rope(u32 (&to)[4], u32 stage, int step) const { load_matrices(to, keys + stage * T::STAGE_BYTES + T::Layout::ROPE_AT + step * 32); }

    // The warp's 16 of 64 columns, of half of the tokens.
    DEVICE void load_values(u32 (&to)[4], u32 stage, int columns, int half) const {
        load_matrices_transposed(to, values + stage * T::STAGE_BYTES + columns * 64 + Order::at(half * 32, 0));
    }
};

// Where a lane reads codes by ldmatrix.
template <class T>
struct CodesReader {
    using Order = typename T::CodesOrder;
    u32 keys; // of the warp's 16 tokens: of the first columns of token lane % 16
    u32 values; // of all tokens: of the warp's 16 of the warpgroup's first 64 columns of token `lane`
    u32 odd; // from an even group of 64 codes to the odd one after it: half a line, which for odd tokens ends in the next line

    // `warp` counts within the warpgroup `group`.
    DEVICE CodesReader(u32 stages, u32 group, u32 warp) {
        const u32 lane = threadIdx.x % LANES;
        keys = in_a_register(stages + Order::at(warp * 16 + lane % 16, lane / 16));
        values = in_a_register(stages + Order::at(lane, warp) + group * (T::COLUMN_TILES / 2 * Order::LINE_BYTES));
        odd = in_a_register(Order::at(lane % 16, 4) - Order::at(lane % 16, 0));
    }

    // A group of 64 columns of the warp's tokens.
    DEVICE void load_keys(Codes& to, u32 stage, int columns) const {
        const u32 at = keys + stage * T::STAGE_BYTES + columns % 2 * odd + columns / 2 * Order::LINE_BYTES;
        load_matrices(to[0], at);
        load_matrices(to[1], at ^ 32);
    }

    // The warp's 16 of 64 columns.
    DEVICE void load_values(Codes& to, u32 stage, int columns) const {
        const u32 at = values + stage * T::STAGE_BYTES + columns % 2 * odd + columns / 2 * Order::LINE_BYTES;
        load_matrices_transposed(to[0], at);
        load_matrices_transposed(to[1], at + 32 / Order::ROWS * Order::BYTES);
    }
};
