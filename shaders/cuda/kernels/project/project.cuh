// What the kernels of head_project are given, and which tile of it is a block's.
#pragma once

#include "lib/codes.cuh"
#include "lib/divisor.cuh"
#include "lib/guard.cuh"
#include "lib/quads.cuh"

struct Args {
    Place x; // [max_tokens, H, k], strided
    Place weight; // [H, k, n] or [H, n, k] in the weights' format, strided; token_stride is the matrix row's
    Place y; // [max_tokens, H, n], strided
    u64 table; // u32 [2] num_tokens, first token
    u64 scales; // f32 [H], strided, of e4m3 weights; 0: weights have no scales beside them
    u64 scale_stride; // bytes
    u32 max_tokens;
    u32 k_quads;
    u32 n_quads;
    u32 x_dtype;
    u32 weight_format; // see weights.cuh
    u32 y_dtype;
    u32 is_kn; // 1: W is [k, n], 0: [n, k]
    u32 column_tiles;
    u32 token_tiles;
    u32 num_tiles; // column_tiles * token_tiles * H
    u32 prefetches; // 1: blocks fetch their weights into the L2 while the kernel before drains
    float scale; // of the products
    float limit; // the largest magnitude that a finite product is stored with
    u32 reserved;
    Divisor by_column_tiles;
    Divisor by_token_tiles;
    CodeScale out_scale; // of an output in codes
    Guard guard;
};

#define MOST_F32 3.402823466e38f

// A product as it is stored. What is infinite or NaN stays.
__device__ __forceinline__ float saturated(const Args &args, float product) {
    return fabsf(product) <= MOST_F32 ? fminf(fmaxf(product, -args.limit), args.limit) : product;
}

// A sum as it is stored.
__device__ __forceinline__ float scaled(const Args &args, float sum) { return saturated(args, sum * args.scale); }

// The magnitude of a product, as bits, before it saturates.
__device__ __forceinline__ u32 product_magnitude(const Args &args, float sum) { return __float_as_uint(sum * args.scale) & 0x7FFFFFFFu; }

// The scale of a head's weights.
__device__ __forceinline__ float head_scale(const Args &args, u32 head) {
    return args.scales ? __uint_as_float(read_4(args.scales + head * args.scale_stride)) : 1.0f;
}

// The tile of a block: its columns change fastest, its head slowest, so that the blocks of a head run side by side.
struct Tile {
    u32 head, first_column;
    u32 begin; // its first token, counted from the range's
    u32 first, count; // the table's range
};

template <u32 TOKENS, u32 COLUMNS>
__device__ __forceinline__ Tile tile_at(const Args &args, u32 index) {
    u32 rest = divide(index, args.by_column_tiles);
    u32 head = divide(rest, args.by_token_tiles);
    return Tile{head, (index - rest * args.column_tiles) * COLUMNS, (rest - head * args.token_tiles) * TOKENS, 0, 0};
}

template <u32 TOKENS, u32 COLUMNS>
__device__ __forceinline__ Tile tile_of_block(const Args &args) {
    return tile_at<TOKENS, COLUMNS>(args, blockIdx.x);
}

// Reads the table; false for a tile without tokens.
__device__ __forceinline__ bool has_tokens(const Args &args, Tile &tile) {
    uint2 range = read_8(args.table);
    tile.first = min(range.y, args.max_tokens);
    tile.count = min(range.x, args.max_tokens - tile.first);
    return tile.begin < tile.count;
}
