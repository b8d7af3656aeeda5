// The epilogue of head_project on tensor cores.
#pragma once

#include "lib/ptx.cuh"
#include "project.cuh"

// Scales a warp's sums as `scaled` does. One comparison tells whether the warp has a product past the limit, which is rare.
template <int ROW_TILES, int COLUMN_TILES>
DEVICE void scale_sums(const Args &args, float (&sums)[ROW_TILES][COLUMN_TILES][4]) {
    constexpr int COUNT = ROW_TILES * COLUMN_TILES * 4;
    float(&all)[COUNT] = reinterpret_cast<float(&)[COUNT]>(sums);
    float largest = 0.0f;
    if (args.limit < MOST_F32) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) largest = fmaxf(largest, fabsf(all[i]));
    }
    if (__any_sync(~0u, largest > args.limit / args.scale)) {
        rolled(all, [&args](int, float sum) { return scaled(args, sum); });
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++) all[i] *= args.scale;
    }
}

// Stores a warp's sums, in the layout of mma.sync and wgmma, of a tile that has so many tokens and columns. For outputs of 16 bits, the lanes of a
// quad exchange words, so that each has 8 columns.
template <int ROW_TILES, int COLUMN_TILES>
DEVICE void store_tile(const Args &args, const Tile &tile, u32 tokens, u32 columns, u32 first_row, u32 first_column, float (&sums)[ROW_TILES][COLUMN_TILES][4]) {
    scale_sums(args, sums);
    const u32 lane = threadIdx.x % LANES, quad = lane % 4;
    const u32 first = first_row + lane / 4;
    const u64 at = row_of(args.y, tile.first + tile.begin + first, tile.head);
    if (args.y_dtype == DTYPE_F32) {
        const u64 to = at + (tile.first_column + first_column + quad * 2) * 4;
#pragma unroll
        for (int h = 0; h < 2 * ROW_TILES; h++) {
            if (first + h * 8 >= tokens) break;
            float2 *row = global_pointer<float2>(to + h * 8 * args.y.token_stride);
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; c++) {
                const float(&sum)[4] = sums[h / 2][c];
                if (first_column + c * 8 < columns) row[c * 4] = make_float2(sum[h % 2 * 2], sum[h % 2 * 2 + 1]);
            }
        }
        return;
    }
    // Each row tile's words: those of its row lane / 4, then those of lane / 4 + 8.
    u32 words[ROW_TILES][2 * COLUMN_TILES];
    const auto pack_all = [&](auto pack) {
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
            for (int j = 0; j < 2 * COLUMN_TILES; j++) {
                const int h = j / COLUMN_TILES, c = j % COLUMN_TILES;
                words[i][j] = pack(sums[i][c][2 * h], sums[i][c][2 * h + 1]);
            }
        }
    };
    if (args.y_dtype == DTYPE_F16) {
        pack_all(pack_f16);
    } else {
        pack_all(pack_bf16);
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
        for (int group = 0; group < 2 * COLUMN_TILES; group += 4) {
            u32(&four)[4] = reinterpret_cast<u32(&)[4]>(words[i][group]);
            transpose_in_quads(four);
            const u32 j = group + quad, row = i * 16 + j / COLUMN_TILES * 8, column = first_column + j % COLUMN_TILES * 8;
            if (first + row < tokens && column < columns) {
                store_16(at + row * args.y.token_stride + (tile.first_column + column) * 2, make_uint4(four[0], four[1], four[2], four[3]));
            }
        }
    }
}
