// Masks and sums of weights where A and B are swapped: a lane has two rows of each eight, over its warp's tokens.
#pragma once

#include "decode/decode_tile.cuh"

// Masks the tokens of a lane, the one whose entry of the list is at `entries` and the eighth after it, where that is no slot.
template <class T>
DEVICE void mask_entries_turned(const Args& args, float (&logits)[T::ROW_TILES][4], u32 entries, float masked) {
    asm volatile(""); // keeps the caller's branch
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (is_slot(args, load_4(entries + h * (8 * 4)))) continue;
#pragma unroll
        for (int j = 0; j < T::ROW_TILES; j++) logits[j][2 * h] = logits[j][2 * h + 1] = masked;
    }
}

// Row sums of a warp, for all warps.
template <class T>
DEVICE void share_sums_turned(float (&sum)[T::ROW_TILES][2], float* maxima, u32 warp, u32 lane, u32 first_row) {
#pragma unroll
    for (int j = 0; j < T::ROW_TILES; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
#pragma unroll
            for (int lanes = 4; lanes < LANES; lanes *= 2) sum[j][e] += __shfl_xor_sync(~0u, sum[j][e], lanes);
            if (lane < 4) maxima[warp * T::ROWS + first_row + j * 8 + e] = sum[j][e];
        }
}
