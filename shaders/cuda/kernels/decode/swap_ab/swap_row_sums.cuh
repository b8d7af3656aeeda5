// Sums of weights where A and B are swapped: a lane has two rows of each eight, over its warp's tokens.
#pragma once

#include "decode/decode_tile.cuh"

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
