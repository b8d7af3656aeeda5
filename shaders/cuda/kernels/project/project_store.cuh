// The epilogue of head_project on tensor cores.
#pragma once

#include "lib/ptx.cuh"
#include "project.cuh"

// Stores a warp's sums, in the layout of mma.sync and wgmma, of a tile that has so many tokens and columns. A quad of lanes exchanges
// words of two elements, so that each lane has 8 columns.
// `IS_FAR`: some product may be past the limit.
template <bool IS_FAR, int ROW_TILES, int COLUMN_TILES>
DEVICE void store_sums(const Args &args, const Tile &tile, u32 tokens, u32 columns, u32 first_row, u32 first_column, const float (&sums)[ROW_TILES][COLUMN_TILES][4]) {
    const auto value = [&args](float sum) { return IS_FAR ? scaled(args, sum) : sum * args.scale; };
    const u32 lane = threadIdx.x % LANES, quad = lane % 4;
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
        const u32 row = first_row + i * 16 + lane / 4;
        const u64 at = row_of(args.y, tile.first + tile.begin + row, tile.head);
        if (args.y_dtype == DTYPE_F32) {
#pragma unroll
            for (int j = 0; j < 2 * COLUMN_TILES; j++) {
                const u32 h = j / COLUMN_TILES, c = j % COLUMN_TILES, column = first_column + c * 8;
                const uint2 words = make_uint2(__float_as_uint(value(sums[i][c][2 * h])), __float_as_uint(value(sums[i][c][2 * h + 1])));
                if (row + h * 8 < tokens && column < columns) {
                    store_8(at + h * 8 * args.y.token_stride + (tile.first_column + column + quad * 2) * 4, words);
                }
            }
        } else {
#pragma unroll
            for (int group = 0; group < COLUMN_TILES / 2; group++) {
                u32 words[4];
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    const int j = group * 4 + w, h = j / COLUMN_TILES, c = j % COLUMN_TILES;
                    const float first = value(sums[i][c][2 * h]), second = value(sums[i][c][2 * h + 1]);
                    if (args.y_dtype == DTYPE_E4M3) {
                        words[w] = e4m3_code(first, args.out_scale) | e4m3_code(second, args.out_scale) << 8;
                    } else {
                        words[w] = args.y_dtype == DTYPE_F16 ? pack_f16(first, second) : pack_bf16(first, second);
                    }
                }
                transpose_in_quads(words);
                const u32 j = group * 4 + quad, h = j / COLUMN_TILES, column = first_column + j % COLUMN_TILES * 8;
                if (row + h * 8 < tokens && column < columns) {
                    const u64 row = at + h * 8 * args.y.token_stride;
                    if (args.y_dtype == DTYPE_E4M3) {
                        store_8(row + tile.first_column + column, make_uint2(words[0] | words[1] << 16, words[2] | words[3] << 16));
                    } else {
                        store_16(row + (tile.first_column + column) * 2, make_uint4(words[0], words[1], words[2], words[3]));
                    }
                }
            }
        }
    }
}

// Counts what rounding a warp's products loses, those that store_sums stores.
template <int ROW_TILES, int COLUMN_TILES>
DEVICE Lost count_sums(const Args &args, u32 tokens, u32 columns, u32 first_row, u32 first_column, const float (&sums)[ROW_TILES][COLUMN_TILES][4]) {
    const u32 first = first_row + threadIdx.x % LANES / 4;
    Lost lost;
    // The extent is that of sums: products are in their order.
    bool loses = first_column + COLUMN_TILES * 8 > columns;
    Extent extent;
#pragma unroll
    for (int j = 0; j < 2 * ROW_TILES; j++) {
        if (first + j * 8 < tokens) {
#pragma unroll
            for (int i = 0; i < 2 * COLUMN_TILES; i++) extent.note(__float_as_uint(sums[j / 2][i / 2][j % 2 * 2 + i % 2]) & 0x7FFFFFFFu);
        }
    }
    const u32 largest = product_magnitude(args, __uint_as_float(extent.largest)), least = extent.least + 1;
    loses |= largest > args.guard.top;
    // The product of a sum other than 0 may be 0, where that of a larger sum is not.
    loses |= least != 0 && product_magnitude(args, __uint_as_float(least)) <= args.guard.flushed;
    if (!loses) {
        lost.amax = largest;
        return lost;
    }
#pragma unroll
    for (int j = 0; j < 2 * ROW_TILES; j++) {
#pragma unroll
        for (int i = 0; i < 2 * COLUMN_TILES; i++) {
            if (first + j * 8 < tokens && first_column + i / 2 * 8 < columns) {
                lost.count(product_magnitude(args, sums[j / 2][i / 2][j % 2 * 2 + i % 2]), args.guard);
            }
        }
    }
    return lost;
}

// Does what store_sums does. One comparison a sum tells whether the warp has a product past the limit, which is rare.
template <int ROW_TILES, int COLUMN_TILES>
DEVICE void store_tile(const Args &args, const Tile &tile, u32 tokens, u32 columns, u32 first_row, u32 first_column, const float (&sums)[ROW_TILES][COLUMN_TILES][4]) {
    bool is_far = false;
    if (args.limit < MOST_F32) {
        const float most = args.limit / args.scale;
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
            for (int j = 0; j < COLUMN_TILES * 4; j++) is_far |= fabsf(sums[i][j / 4][j % 4]) > most;
        }
    }
    if (__any_sync(~0u, is_far)) {
        store_sums<true>(args, tile, tokens, columns, first_row, first_column, sums);
    } else {
        store_sums<false>(args, tile, tokens, columns, first_row, first_column, sums);
    }
}
