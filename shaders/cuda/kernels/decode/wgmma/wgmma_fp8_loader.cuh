// The loader warpgroup of mla_decode_wgmma_fp8.cuh: codes to shared memory, and their values in f16 beside them.
#pragma once

#include "wgmma_fp8_tile.cuh"

// Codes arrive by TMA boxes of up to 64 tokens, STAGES tiles ahead. All warps convert a tile's latent quarter by quarter, each as soon as the last
// tile's values are multiplied. Where the item's begin is no multiple of a box, codes are loaded chunk by chunk: SplitPolicy::FixedTokens may
// begin items there.
template <class T>
struct Fp8Loader {
    const Args& args;
    const TensorMap& map;
    const WorkItem& item;
    const u32 base, warp; // `warp` counts within the warpgroup

    DEVICE void run() const {
        const u32 box = min(u32(T::TOKENS), args.page_size & -args.page_size); // tokens of a box, which lies in one page
        const bool boxes = args.copies == BOXES && item.kv_begin % box == 0;
        const u32 num_tiles = (item.kv_end - item.kv_begin + T::TOKENS - 1) / T::TOKENS;
        if (boxes) prefetch_map(map);
#pragma unroll 1
        for (u32 tile = 0; tile < min(u32(T::STAGES), num_tiles); tile++) load(tile, box, boxes);
#pragma unroll 1
        for (u32 tile = 0; tile < num_tiles; tile++) {
            wait_for_arrivals(base + T::FULL_AT + tile % T::STAGES * 8, tile / T::STAGES % 2);
#pragma unroll 1
            for (u32 turn = 0; turn < T::QUARTERS; turn++) convert(tile, quarter_at(tile, turn));
            __syncwarp();
            if (threadIdx.x % LANES == 0) arrive(base + T::EMPTY_AT + tile % T::STAGES * 8);
            if (tile + T::STAGES < num_tiles) load(tile + T::STAGES, box, boxes);
        }
    }

    // The other warpgroup, which owns the last tile, begins with its values first, and the tile's owner is the first to need the next.
    DEVICE static u32 quarter_at(u32 tile, u32 turn) {
        const bool of_owner = turn == 1 || turn == 2;
        return (tile + !of_owner) % 2 * 2 + turn / 2;
    }

    // A thread has four chunks of 16 codes of a quarter. Tokens past the item's end are zeros: they weigh 0, and 0 x NaN would be NaN.
    DEVICE void convert(u32 tile, u32 quarter) const {
        constexpr int GROUPS = 2, TURNS = 2, TURN_TOKENS = T::TOKENS / TURNS;
        const u32 thread = warp * LANES + threadIdx.x % LANES, token = thread / 4, chunk = thread % 4;
        const int left = item.kv_end - item.kv_begin - tile * T::TOKENS;
        const u32 from = base + T::STAGES_AT + T::CodesOrder::at(token, chunk) + tile % T::STAGES * T::STAGE_BYTES + quarter * (GROUPS * T::CodesOrder::GROUP_BYTES);
        const u32 to = base + T::VALUES_AT + T::Order::at(token, chunk * 2) + quarter * (GROUPS * T::Order::GROUP_BYTES);
        u32 codes[TURNS][GROUPS][4];
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++)
#pragma unroll
            for (int group = 0; group < GROUPS; group++) load_16(codes[turn][group], from + group * T::CodesOrder::GROUP_BYTES + turn * (TURN_TOKENS * 64));
        wait_for_arrivals(base + T::FREED_AT + quarter * 8, tile % 2);
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            const bool is_there = static_cast<int>(token) < left - turn * TURN_TOKENS;
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 words[4];
#pragma unroll
                    for (int i = 0; i < 2; i++) e4m3_to_f16(is_there ? codes[turn][group][half * 2 + i] : 0, words[2 * i], words[2 * i + 1]);
                    store_16((half ? to ^ 16 : to) + group * T::Order::GROUP_BYTES + turn * (TURN_TOKENS * 128), words);
                }
        }
        before_tensor_copies(); // wgmma reads them
        __syncwarp();
        if (threadIdx.x % LANES == 0) arrive(base + T::FILLED_AT + quarter * 8);
    }

    // Loads a tile's codes once its stage is empty.
    DEVICE void load(u32 tile, u32 box, bool boxes) const {
        const u32 stage = tile % T::STAGES, full = base + T::FULL_AT + stage * 8, to = base + T::STAGES_AT + stage * T::STAGE_BYTES;
        if (boxes && warp > 0) return;
        wait_for_arrivals(base + T::EMPTY_AT + stage * 8, tile / T::STAGES % 2 ^ 1);
        const u32 begin = item.kv_begin + tile * T::TOKENS, tokens = min(u32(T::TOKENS), item.kv_end - begin);
        if (boxes) {
            by_boxes(begin, tokens, box, to, full);
        } else {
            by_chunks(begin, tokens, to, full);
        }
    }

    // By one warp, a lane a box of each group.
    DEVICE void by_boxes(u32 begin, u32 tokens, u32 box, u32 to, u32 full) const {
        const u32 first = threadIdx.x % LANES * box;
        if (first < tokens) {
            const u32 page = (begin + first) / args.page_size, id = page_id(args, item, page);
            if (first == 0) arrive_and_expect(full, (tokens + box - 1) / box * box * T::DIM);
#pragma unroll 1
            for (int group = 0; group < T::GROUPS; group++)
                copy_lines(to + group * T::CodesOrder::GROUP_BYTES + first * 64, map, begin + first - page * args.page_size, group, id, full);
        }
        __syncwarp();
    }

    // By all warps, 8 codes at a time, to which tokens are aligned. What lies past the item's end is left: those scores are masked.
    DEVICE void by_chunks(u32 begin, u32 tokens, u32 to, u32 full) const {
        constexpr u32 CHUNKS = T::DIM / 8;
#pragma unroll 1
        for (u32 i = warp * LANES + threadIdx.x % LANES; i < tokens * CHUNKS; i += T::LOADERS * LANES) {
            const u32 row = i / CHUNKS, chunk = i % CHUNKS;
            const float2 codes = reinterpret_cast<const float2*>(args.kv + row_of_token<T::DIM>(args, item, begin + row))[chunk];
            store_8(to + T::CodesOrder::at(row, chunk / 2) + chunk % 2 * 8, codes.x, codes.y);
        }
        before_tensor_copies();
        wait_for_warps<T::LOADERS>(2);
        if (warp == 0 && threadIdx.x % LANES == 0) arrive(full);
    }
};
