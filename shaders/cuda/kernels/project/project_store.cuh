// The epilogue of head_project on tensor cores.
#pragma once

#include "lib/ptx.cuh"
#include "project.cuh"

// Stores a warp's products, in a 16-bit dtype or in f32 and codes, in the layout of mma.sync and wgmma, of a tile that has so many tokens
// and columns. A quad of lanes exchanges words of two elements, so that each lane has 8 columns.
template <bool IS_16_BIT, int ROW_TILES, int COLUMN_TILES>
DEVICE void store_as(const Args &args, const Tile &tile, u32 tokens, u32 columns, u32 first_row, u32 first_column, const float (&products)[ROW_TILES][COLUMN_TILES][4]) {
    const u32 lane = threadIdx.x % LANES, quad = lane % 4;
    u64 at = row_of(args.y, tile.first + tile.begin + first_row + lane / 4, tile.head);
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
        const u32 row = first_row + i * 16 + lane / 4;
        if (!IS_16_BIT && args.y_dtype == DTYPE_F32) {
#pragma unroll
            for (int j = 0; j < 2 * COLUMN_TILES; j++) {
                const u32 h = j / COLUMN_TILES, c = j % COLUMN_TILES, column = first_column + c * 8;
                const uint2 words = make_uint2(__float_as_uint(products[i][c][2 * h]), __float_as_uint(products[i][c][2 * h + 1]));
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
                    const float first = products[i][c][2 * h], second = products[i][c][2 * h + 1];
                    if constexpr (!IS_16_BIT) {
                        words[w] = e4m3_code(first, args.out_scale) | e4m3_code(second, args.out_scale) << 8;
                    } else {
                        words[w] = args.y_dtype == DTYPE_F16 ? pack_f16(first, second) : pack_bf16(first, second);
                    }
                }
                transpose_in_quads(words);
                const u32 j = group * 4 + quad, h = j / COLUMN_TILES, column = first_column + j % COLUMN_TILES * 8;
                if (row + h * 8 < tokens && column < columns) {
                    const u64 to = at + h * 8 * args.y.token_stride + (tile.first_column + column) * (IS_16_BIT ? 2 : 1);
                    if constexpr (!IS_16_BIT) {
                        store_8(to, make_uint2(words[0] | words[1] << 16, words[2] | words[3] << 16));
                    } else {
                        store_16(to, make_uint4(words[0], words[1], words[2], words[3]));
                    }
                }
            }
        }
        // One address after the other: all at once take registers that hold products.
        at += 16 * args.y.token_stride;
        asm volatile("" : "+l"(at));
    }
}

// One branch tells 16-bit outputs from others, so that the many instructions of codes are not fetched for them.
template <int ROW_TILES, int COLUMN_TILES>
DEVICE void store_products(const Args &args, const Tile &tile, u32 tokens, u32 columns, u32 first_row, u32 first_column, const float (&products)[ROW_TILES][COLUMN_TILES][4]) {
    if (args.y_dtype == DTYPE_F16 || args.y_dtype == DTYPE_BF16) {
        store_as<true>(args, tile, tokens, columns, first_row, first_column, products);
    } else {
        store_as<false>(args, tile, tokens, columns, first_row, first_column, products);
    }
}

// Makes products of a warp's sums, as they are stored, and counts what rounding loses of those that `store_products` stores. What is past
// the limit is rare, and so is what a guard counts one by one: both have one loop, behind one comparison a product.
template <int ROW_TILES, int COLUMN_TILES>
DEVICE Lost finish_products(const Args &args, u32 tokens, u32 columns, u32 first_row, u32 first_column, float (&sums)[ROW_TILES][COLUMN_TILES][4]) {
    const u32 first = first_row + threadIdx.x % LANES / 4;
    bool is_far = false;
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
        for (int j = 0; j < COLUMN_TILES * 4; j++) sums[i][j / 4][j % 4] *= args.scale;
    }
    if (args.limit < MOST_F32) {
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
            for (int j = 0; j < COLUMN_TILES * 4; j++) is_far |= fabsf(sums[i][j / 4][j % 4]) > args.limit;
        }
    }
    Lost lost;
    bool loses = false;
    if (args.guard.row) {
        Extent extent;
#pragma unroll
        for (int j = 0; j < 2 * ROW_TILES; j++) {
            if (first + j * 8 < tokens) {
#pragma unroll
                for (int i = 0; i < 2 * COLUMN_TILES; i++) extent.note(__float_as_uint(sums[j / 2][i / 2][j % 2 * 2 + i % 2]) & 0x7FFFFFFFu);
            }
        }
        // Columns past the tile's are zeros or a neighbour's, and are told apart one by one.
        loses = first_column + COLUMN_TILES * 8 > columns || extent.loses(args.guard);
        lost.amax = loses ? 0 : extent.largest;
    }
    if (is_far || loses) {
#pragma unroll
        for (int j = 0; j < 2 * ROW_TILES; j++) {
#pragma unroll
            for (int i = 0; i < 2 * COLUMN_TILES; i++) {
                float &product = sums[j / 2][i / 2][j % 2 * 2 + i % 2];
                if (loses && first + j * 8 < tokens && first_column + i / 2 * 8 < columns) {
                    lost.count(__float_as_uint(product) & 0x7FFFFFFFu, args.guard);
                }
                product = saturated(args, product);
            }
        }
    }
    return lost;
}
