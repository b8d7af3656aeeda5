// The loader warps of mla_decode_swap.cuh.
#pragma once

#include "decode/decode_tile.cuh"

// A loader warp: the same 16 tokens of every second tile. By two TMA boxes of 8 tokens; by cp.async where the page size or the item's begin
// is no multiple of 8, where the item ends within the 16 tokens, or where tokens are listed.
template <class T>
struct PartLoader {
    static constexpr int PASS_ROWS = LANES / 8, PASSES = 16 / PASS_ROWS;
    const Args& args;
    const TensorMap& map;
    const WorkItem& item;
    const u32 place, entries, full, empty; // shared addresses of the 16 tokens, and of their entries of a list; mbarriers

    // Loads tiles `tile`, `tile` + 2, .. from their token `first` on.
    DEVICE void run(u32 tile, u32 first) const {
        const u32 lane = threadIdx.x % LANES;
        const bool boxes = args.copies == BOXES && item.kv_begin % 8 == 0, asks = lane < 2;
        u32 parity = 1;
        if (boxes) prefetch_map(map);
        for (u32 tile_begin = item.kv_begin + tile * T::TOKENS; tile_begin < item.kv_end; tile_begin += 2 * T::TOKENS) {
            const u32 begin = tile_begin + first;
            // The page id, or the addresses, are loaded before the wait for an empty place.
            if (boxes && begin + 16 <= item.kv_end) {
                const u32 token = begin + lane * 8, page = token / args.page_size;
                u32 id = 0;
                if (asks) id = page_id(args, item, page);
                mbarrier_wait(empty, parity);
                if (lane == 0) mbarrier_arrive_expect_tx(full, T::PLACE_BYTES);
                __syncwarp();
                if (asks) copy_box_once(place + lane * T::BOX_BYTES, map, token - page * args.page_size, id, full);
            } else {
                const u8* from[PASSES];
                const u32 there = find_rows(from, begin);
                mbarrier_wait(empty, parity);
                copy_rows(from, there, begin);
                fence_proxy_async();
                __syncwarp();
                if (lane == 0) arrive(full);
            }
            parity ^= 1;
        }
    }

    DEVICE static u32 row_of(int pass) { return threadIdx.x % LANES / 8 + pass * PASS_ROWS; }

    // Returns which passes have a token, as bits.
    DEVICE u32 find_rows(const u8* (&from)[PASSES], u32 begin) const {
        u32 there = 0;
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const u32 token = begin + row_of(i);
            u64 element = NOWHERE;
            if (token < item.kv_end) element = row_of_token<T::DIM>(args, item, token);
            from[i] = args.kv + (element == NOWHERE ? 0 : element * 2);
            if (element != NOWHERE) there |= 1u << i;
        }
        return there;
    }

    DEVICE void copy_rows(const u8* const (&from)[PASSES], u32 there, u32 begin) const {
        const u32 chunk = threadIdx.x % 8;
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const u32 row = row_of(i), to = place + row / 8 * T::BOX_BYTES + T::Order::at(row % 8, chunk);
#pragma unroll
            for (int group = 0; group < T::DIM / 64; group++) copy_16(to + T::Order::groups(group), from[i] + (group * 8 + chunk) * 16, (there >> i & 1) != 0, true);
        }
        if (args.is_listed && threadIdx.x % LANES < 16) {
            const u32 row = threadIdx.x % LANES;
            copy_4(entries + row * 4, args.pages + item.page_begin + begin + row, begin + row < item.kv_end);
        }
        cp_async_commit();
        cp_async_wait<0>();
    }
};
