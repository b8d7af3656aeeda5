// The scales of records in mla_decode_swap_fp8.cuh.
#pragma once

#include "swap_fp8_operands.cuh"

// Keys' scales are read from the records. Values are multiplied by theirs in f16, times BIAS: with what a scale and a product are rounded
// by, a value is off by 2^-10 of itself, and where it is that small by 2^-12 of its token's largest in the group. A scale that f16 does
// not hold so well, and a ratio of two scales of a token that is out of range, become NaN, which shows in the output, so that the item is
// done again in f32 (decode_f32.cuh).
template <class T>
struct RecordScales {
    static constexpr float BIAS = 16.0f, UNBIAS = T::IS_RECORD ? 1.0f / BIAS : 1.0f, LEAST = 0x1p-18f, MOST_RATIO = 0x1p60f;
    const u32 base; // of shared memory

    DEVICE u32 of_token(u32 stage, u32 token) const { return base + T::STAGES_AT + stage * T::STAGE_BYTES + token * T::Layout::ELEMENTS + T::Layout::SCALES_AT; }

    DEVICE static u32 first_token(u32 warp) { return warp % 4 * 16 + threadIdx.x % LANES / 4; }

    // The lane's two tokens: a scale over that of the next group, or where there is none before, 1 over the first.
    DEVICE void ratios(float (&to)[2], u32 stage, u32 warp, int next) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 at = of_token(stage, first_token(warp) + h * 8);
            const float before = next == 0 ? 1.0f : __uint_as_float(load_4(at + (next - 1) * 4));
            to[h] = __fdividef(before, __uint_as_float(load_4(at + next * 4)));
            // NaN shows in the output, unless the token is masked, whose scales may be 0.
            if (!(to[h] <= MOST_RATIO && to[h] >= 1.0f / MOST_RATIO)) to[h] = NOT_A_NUMBER;
        }
    }

    DEVICE void last(float (&to)[2], u32 stage, u32 warp) const {
#pragma unroll
        for (int h = 0; h < 2; h++) to[h] = __uint_as_float(load_4(of_token(stage, first_token(warp) + h * 8) + (T::LATENT / T::Layout::GROUP - 1) * 4));
    }

    DEVICE u32 table(u32 tile, u32 group) const { return base + T::TABLES_AT + (group * 2 + tile % 2) * T::TABLE_BYTES; }

    // Makes the warpgroup's table of a tile whose codes have arrived. `barrier` is the warpgroup's.
    DEVICE void make_table(u32 tile, u32 warp, u32 barrier) const {
        // Not computed before the loop over tiles, where its products would take registers.
        const u32 thread = in_a_register(threadIdx.x) % (4 * LANES), token = thread % T::TOKENS, of = thread / T::TOKENS, group = warp / 4;
        if (T::SCALE_GROUPS * T::TOKENS == 4 * LANES || of < T::SCALE_GROUPS) {
            const float scale = __uint_as_float(load_4(of_token(tile % T::STAGES, token) + (group * T::SCALE_GROUPS + of) * 4));
            const u32 place = (token % 8 / 2 * 8 + token / 8) * 4 + token % 2 * 2;
            store_2(table(tile, group) + of * (T::TOKENS * 2) + place, static_cast<u16>(pack_f16(scale < LEAST && scale != 0.0f ? NOT_A_NUMBER : scale * BIAS, 0.0f)));
        }
        bar_sync<4>(barrier);
    }

    // Multiplies the values of 64 columns by those of their tokens. A word has the scales of two tokens.
    DEVICE void multiply(Operands& values, u32 tile, u32 group, int columns) const {
        const u32 at = table(tile, group) + columns / 2 * (T::TOKENS * 2) + threadIdx.x % 4 * 32;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 by[4];
            load_16(by, at + half * 16);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                u32& pair = values[half * 2 + i / 4][i % 4];
                pair = multiply_f16_pairs(pair, by[i / 4 * 2 + i % 4 / 2]);
            }
        }
    }
};
