// What the kernels of mla_prefill share: arguments and tiles, whose twins on the host are in src/cuda/ops/mla_prefill.rs and
// src/ops/mla_prefill/tiles.rs, and the bounds that keep every access inside the arrays.
#pragma once

#include "lib/divisor.cuh"
#include "lib/ptx.cuh"
#include "lib/quads.cuh"
#include "lib/row_end.cuh"

// Finite sentinel for the LSE -inf of a row that attends to no key.
#define EMPTY (-1.0e38f)
#define NO_KEY __uint_as_float(0xFF800000u) // -inf: the score of a masked key

struct Args {
    Place q_nope; // [max_tokens, H, P], strided, as the others
    Place q_pe; // [max_tokens, H, R]
    Place k_nope; // [max_keys, H, P]
    Place k_pe; // [max_keys, H, R]
    Place v; // [max_keys, H, V]
    Place out; // [max_rows, H, V]
    Place lse; // f32 [max_rows, H]
    u64 table; // u32 [1 + 6 * max_tiles] num_tiles, then tiles
    float logit_scale; // softmax_scale * log2(e)
    u32 max_tokens;
    u32 max_keys;
    u32 max_rows; // of the output and the LSE
    u32 max_tiles; // for which the table has room
    u32 num_heads;
    u32 nope_quads; // P / 4
    u32 quads; // (P + R) / 4
    u32 value_quads; // V / 4
    u32 dtype;
    u32 out_dtype;
    u32 section_heads; // as many heads take their turn together: L2 holds their keys and values
    float v_scale;
    u32 reserved;
    Divisor by_num_heads;
};

// PrefillTile of src/ops/mla_prefill/tiles.rs, for one head.
struct Tile {
    u32 first_token, num_rows, kv_begin, num_keys;
    int first_visible;
    u32 first_row; // of the output
    u32 head;
};

// A step prepared again after its graph was captured may have more than the binding's buffers hold: the clamps keep accesses inside them.
__device__ __forceinline__ u32 token_of(const Args &args, const Tile &tile, u32 row) {
    return min(tile.first_token + min(row, tile.num_rows - 1), args.max_tokens - 1);
}

__device__ __forceinline__ u32 key_of(const Args &args, const Tile &tile, u32 key) {
    return min(tile.kv_begin + min(key, tile.num_keys - 1), args.max_keys - 1);
}

// How many of the tile's keys a row attends to (the causal mask).
__device__ __forceinline__ u32 visible_to(const Tile &tile, u32 row) {
    return (u32)min(max(tile.first_visible + (int)row, 0), (int)tile.num_keys);
}

// The tile of this block, with no keys if the binding has room for none; false for a block past the tiles of the work list. Blocks run
// through the heads in sections, and in each through the work list, for each of its heads.
__device__ __forceinline__ bool tile_of_block(const Args &args, Tile &tile) {
    const u32 count = min(read_4(args.table), args.max_tiles);
    if (divide(blockIdx.x, args.by_num_heads) >= count) {
        return false;
    }
    const u32 first_head = blockIdx.x / (count * args.section_heads) * args.section_heads;
    const u32 heads = min(args.section_heads, args.num_heads - first_head);
    const u32 rest = blockIdx.x - first_head * count, number = rest / heads;
    const u64 at = args.table + 4 + 24ull * number;
    tile = {read_4(at), read_4(at + 4), read_4(at + 8), read_4(at + 12), (int)read_4(at + 16), read_4(at + 20), first_head + rest - number * heads};
    tile.num_keys = args.max_keys > 0 ? tile.num_keys : 0;
    return true;
}
