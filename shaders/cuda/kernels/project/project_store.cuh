// The epilogue of head_project on tensor cores.
//
// 16-bit outputs, of which no guard counts and none saturates, are stored from registers, with an exchange in quads of lanes. All other
// sums go through a warp's own part of shared memory, 16 rows and up to 32 columns at a time, in a loop that is not unrolled: so what
// saturates, counts and converts them is there once, although the sums are in registers. Either way a lane stores 8 columns of a row.
#pragma once

#include "lib/ptx.cuh"
#include "project.cuh"

// Where a warp's sums lie in shared memory: rows of TILES times 8 columns. Tiles of a row are permuted, so that the lanes of a half-warp
// that store fragments use all banks.
template <int COLUMN_TILES>
struct SumOrder {
    static constexpr int TILES = COLUMN_TILES < 4 ? COLUMN_TILES : 4, BYTES = 16 * TILES * 32;
    static_assert(COLUMN_TILES % TILES == 0 && (TILES == 2 || TILES == 4), "whole groups");

    static DEVICE u32 at(u32 row, u32 tile) { return (row * TILES + (tile ^ row * TILES / 4 % TILES)) * 32; }
};

// Stores 16-bit products. A quad of lanes exchanges words of two elements.
template <int ROW_TILES, int COLUMN_TILES>
DEVICE void store_16_bit(const Args &args, const Tile &tile, u32 tokens, u32 columns, u32 first_row, u32 first_column, const float (&products)[ROW_TILES][COLUMN_TILES][4]) {
    const u32 lane = threadIdx.x % LANES, quad = lane % 4;
    u64 at = row_of(args.y, tile.first + tile.begin + first_row + lane / 4, tile.head);
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
        for (int group = 0; group < COLUMN_TILES / 2; group++) {
            u32 words[4];
#pragma unroll
            for (int w = 0; w < 4; w++) {
                const int j = group * 4 + w, h = j / COLUMN_TILES, c = j % COLUMN_TILES;
                const float first = products[i][c][2 * h], second = products[i][c][2 * h + 1];
                words[w] = args.y_dtype == DTYPE_F16 ? pack_f16(first, second) : pack_bf16(first, second);
            }
            transpose_in_quads(words);
            const u32 j = group * 4 + quad, h = j / COLUMN_TILES, column = first_column + j % COLUMN_TILES * 8;
            if (first_row + i * 16 + lane / 4 + h * 8 < tokens && column < columns) {
                store_16(at + h * 8 * args.y.token_stride + (tile.first_column + column) * 2, make_uint4(words[0], words[1], words[2], words[3]));
            }
        }
        // One address after the other: all at once take registers that hold products.
        at += 16 * args.y.token_stride;
        asm volatile("" : "+l"(at));
    }
}

// Saturates, counts and stores 8 products of a row.
DEVICE void store_8_products(const Args &args, u64 to, float (&products)[8], Lost &lost) {
    if (args.guard.row) {
        u32 magnitudes[8];
#pragma unroll
        for (int i = 0; i < 8; i++) magnitudes[i] = __float_as_uint(products[i]) & 0x7FFFFFFFu;
        lost.note(magnitudes, args.guard);
    }
    bool is_far = false;
#pragma unroll
    for (int i = 0; i < 8; i++) is_far |= fabsf(products[i]) > args.limit;
    if (is_far) {
#pragma unroll
        for (int i = 0; i < 8; i++) products[i] = saturated(args, products[i]);
    }
    if (args.y_dtype == DTYPE_F32) {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            store_16(to + i * 4, make_uint4(__float_as_uint(products[i]), __float_as_uint(products[i + 1]), __float_as_uint(products[i + 2]), __float_as_uint(products[i + 3])));
        }
    } else if (args.y_dtype == DTYPE_E4M3) {
        u32 words[2];
        e4m3_codes(products, args.out_scale, words);
        store_8(to, make_uint2(words[0], words[1]));
    } else {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            words[i] = args.y_dtype == DTYPE_F16 ? pack_f16(products[2 * i], products[2 * i + 1]) : pack_bf16(products[2 * i], products[2 * i + 1]);
        }
        store_16(to, make_uint4(words[0], words[1], words[2], words[3]));
    }
}

// Makes products of a warp's sums. Whether all of its 32 lanes may store them as they are, in 16 bits.
template <int ROW_TILES, int COLUMN_TILES>
DEVICE bool make_products(const Args &args, float of_head, float (&sums)[ROW_TILES][COLUMN_TILES][4]) {
    bool is_far = args.guard.row || args.y_dtype == DTYPE_F32 || args.y_dtype == DTYPE_E4M3;
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
        for (int j = 0; j < COLUMN_TILES * 4; j++) sums[i][j / 4][j % 4] = sums[i][j / 4][j % 4] * of_head * args.scale;
    }
    if (!is_far && args.limit < MOST_F32) {
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
            for (int j = 0; j < COLUMN_TILES * 4; j++) is_far |= fabsf(sums[i][j / 4][j % 4]) > args.limit;
        }
    }
    return !__any_sync(~0u, is_far);
}

// Stores what a warp's sums give, in the layout of mma.sync and wgmma, of a tile that has so many tokens and columns, and counts what
// rounding loses of it. `of_head` is the scale of the head's weights, and `shared` SumOrder::BYTES of the warp's own.
template <int ROW_TILES, int COLUMN_TILES>
DEVICE Lost store_products(const Args &args, const Tile &tile, u32 tokens, u32 columns, u32 first_row, u32 first_column, float of_head, float (&sums)[ROW_TILES][COLUMN_TILES][4], u32 shared) {
    using Order = SumOrder<COLUMN_TILES>;
    constexpr int TILES = Order::TILES, ROW_GROUPS = COLUMN_TILES / TILES;
    Lost lost;
    if (make_products(args, of_head, sums)) {
        store_16_bit(args, tile, tokens, columns, first_row, first_column, sums);
        return lost;
    }
    const u32 lane = threadIdx.x % LANES, to = shared + lane % 4 * 8;
    const u64 y = row_of(args.y, tile.first + tile.begin, tile.head);
    const u32 element_bytes = args.y_dtype == DTYPE_F32 ? 4 : args.y_dtype == DTYPE_E4M3 ? 1 : 2;
#pragma unroll 1
    for (u32 group = 0; group < ROW_TILES * ROW_GROUPS; group++) {
        // Registers have no addresses, so each group has its own stores.
#pragma unroll
        for (int own = 0; own < ROW_TILES * ROW_GROUPS; own++) {
            if (group != own) continue;
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                const float (&sum)[4] = sums[own / ROW_GROUPS][own % ROW_GROUPS * TILES + j];
                store_8(to + Order::at(lane / 4, j), sum[0], sum[1]);
                store_8(to + Order::at(lane / 4 + 8, j), sum[2], sum[3]);
            }
        }
        __syncwarp();
#pragma unroll 1
        for (u32 at = lane; at < 16 * TILES; at += LANES) {
            const u32 row = first_row + group / ROW_GROUPS * 16 + at / TILES;
            const u32 column = first_column + (group % ROW_GROUPS * TILES + at % TILES) * 8;
            if (row < tokens && column < columns) {
                u32 words[8];
                const u32 from = shared + Order::at(at / TILES, at % TILES);
                load_16(reinterpret_cast<u32 (&)[4]>(words[0]), from);
                load_16(reinterpret_cast<u32 (&)[4]>(words[4]), from + 16);
                float products[8];
#pragma unroll
                for (int i = 0; i < 8; i++) products[i] = __uint_as_float(words[i]);
                store_8_products(args, y + row * args.y.token_stride + (tile.first_column + column) * element_bytes, products, lost);
            }
        }
        __syncwarp();
    }
    return lost;
}
