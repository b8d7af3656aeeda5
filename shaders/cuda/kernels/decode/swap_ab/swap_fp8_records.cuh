// The scales of records in mla_decode_swap_fp8.cuh.
#pragma once

#include "swap_fp8_operands.cuh"

// Scores are multiplied by scales as they are in the records, values by those of a table in f16.
template <class T>
struct RecordScales {
    static constexpr float UNBIAS = T::IS_RECORD ? 1.0f / SCALE_BIAS : 1.0f;
    const u32 base; // of shared memory

    DEVICE u32 of_token(u32 stage, u32 token) const { return base + T::STAGES_AT + stage * T::STAGE_BYTES + token * T::Layout::ELEMENTS + T::Layout::SCALES_AT; }

    // Not computed before the loop over tiles, where it would take a register.
    DEVICE static u32 first_token(u32 warp) { return warp % 4 * 16 + in_a_register(threadIdx.x) % LANES / 4; }

    // What the scores of the lane's two tokens are multiplied by after a group.
    DEVICE void after_group(float (&to)[2], u32 stage, u32 warp, int group) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 at = of_token(stage, first_token(warp) + h * 8) + group * 4;
            to[h] = __uint_as_float(load_4(at));
            // The table has checked scales, and tokens whose scales are 0 are masked.
            if (group < T::LATENT / T::Layout::GROUP - 1) to[h] = checked_ratio(to[h], __uint_as_float(load_4(at + 4)));
        }
    }

    DEVICE u32 table(u32 tile, u32 group) const { return base + T::TABLES_AT + (group * 2 + tile % 2) * T::TABLE_BYTES; }

    // Makes the warpgroup's table of a tile whose codes have arrived. `barrier` is the warpgroup's.
    DEVICE void make_table(u32 tile, u32 warp, u32 barrier) const {
        // Not computed before the loop over tiles, where its products would take registers.
        const u32 thread = in_a_register(threadIdx.x) % (4 * LANES), token = thread % T::TOKENS, of = thread / T::TOKENS, group = warp / 4;
        if (T::SCALE_GROUPS * T::TOKENS == 4 * LANES || of < T::SCALE_GROUPS) {
            const float scale = __uint_as_float(load_4(of_token(tile % T::STAGES, token) + (group * T::SCALE_GROUPS + of) * 4));
            const u32 place = (token % 8 / 2 * 8 + token / 8) * 4 + token % 2 * 2;
            store_2(table(tile, group) + of * (T::TOKENS * 2) + place, static_cast<u16>(pack_scales(checked_scale(scale), 0.0f)));
        }
        bar_sync<4>(barrier);
    }

    // Multiplies the values of 64 columns and half of the tokens by those of their tokens. A word has the scales of two tokens.
    DEVICE void multiply(u32 (&first)[4], u32 (&second)[4], u32 tile, u32 group, int columns, int half) const {
        u32 by[4];
        load_16(by, table(tile, group) + columns / 2 * (T::TOKENS * 2) + threadIdx.x % 4 * 32 + half * 16);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            first[i] = multiply_f16_pairs(first[i], by[i / 2]);
            second[i] = multiply_f16_pairs(second[i], by[2 + i / 2]);
        }
    }
};
