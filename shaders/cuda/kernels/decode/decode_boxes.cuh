// Loads of the variant `mma_tma_m16`: TMA boxes of 16 tokens. Needs a page size that is a multiple of 16; items begin at such multiples
// too, but for splits that a caller fixes (SplitPolicy::FixedTokens).
#pragma once

#include "decode_tile.cuh"

// Zeroes the tokens past the item's end: they weigh 0, and 0 x NaN of stale memory would be NaN.
template <class T>
DEVICE void clear_rest(const WorkItem& item, u32 tile_begin, u32 to) {
    constexpr int CHUNKS = T::ROW_BYTES / 16;
    for (u32 i = (item.kv_end - tile_begin) * CHUNKS + threadIdx.x; i < T::TOKENS * CHUNKS; i += T::THREADS) store_16(to + T::Order::at(i / CHUNKS, i % CHUNKS), {0, 0, 0, 0});
    __syncthreads();
}

// Loads a tile of an item that begins inside a box, synchronously and slowly; only splits fixed by a caller do that. Starting the tile at
// the box's beginning instead would change the order of additions, and so bits. The stage is free: every warp has voted on the tile after
// the one that used it.
template <class T>
DEVICE void load_inside_boxes(const Args& args, const WorkItem& item, u32 tile_begin, u32 to) {
    constexpr int CHUNKS = T::ROW_BYTES / 16;
    for (u32 i = threadIdx.x; i < T::TOKENS * CHUNKS; i += T::THREADS) {
        const u32 token = tile_begin + i / CHUNKS;
        if (token >= item.kv_end) break;
        const u64 element = row_of_token<T::DIM>(args, item, token);
        const uint4 chunk = reinterpret_cast<const uint4*>(args.kv + element * T::ELEMENT_BYTES)[i % CHUNKS];
        store_16(to + T::Order::at(i / CHUNKS, i % CHUNKS), {chunk.x, chunk.y, chunk.z, chunk.w});
    }
    __syncthreads();
}

// Issues the TMA boxes of the next tile: lane 0 of one warp a box.
template <class T>
struct BoxLoader {
    static constexpr int BOXES = T::TOKENS / 16, BYTES = T::Order::BYTES;
    static_assert(BOXES <= T::WARPS, "one for a warp");

    const Args& args;
    const TensorMap& map;
    const u32 barriers; // [STAGES] mbarriers
    const bool asks; // whether this thread issues boxes
    int left; // tokens of the item from this box on
    u32 page, offset, id;

    DEVICE BoxLoader(const Args& args, const TensorMap& map, const WorkItem& item, u32 barriers)
        : args(args), map(map), barriers(barriers), asks(item.kv_begin % 16 == 0 && threadIdx.x % LANES == 0 && threadIdx.x / LANES < BOXES) {
        const u32 token = item.kv_begin + threadIdx.x / LANES * 16;
        left = item.kv_end - token;
        find_token(args, item, token, page, offset);
        look_up();
        if (asks) prefetch_map(map);
    }

    // The page id is loaded a tile ahead, to hide its latency.
    DEVICE void look_up() {
        id = 0;
        if (asks && left > 0) id = args.pages[page];
    }

    DEVICE void load(u32 to, u32 stage) {
        if (!asks) return;
        const u32 known = bound_page(args, id), barrier = barriers + stage * 8;
        mbarrier_arrive_expect_tx(barrier, left > 0 ? BYTES : 0);
        if (left > 0) copy_box_once(to + threadIdx.x / LANES * BYTES, map, offset / T::Order::TOGETHER, known, barrier);
        left -= T::TOKENS;
        advance_by_tile(args, page, offset);
        look_up();
    }
};

template <class T>
DEVICE auto loader_of(const Args& args, const TensorMap* map, const WorkItem& item, u32 barriers) {
    if constexpr (T::BOXED) {
        return BoxLoader<T>(args, *map, item, barriers);
    } else {
        return Loader<T>(args, item);
    }
}
