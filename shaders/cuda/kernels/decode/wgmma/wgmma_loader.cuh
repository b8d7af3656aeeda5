// The loader warpgroup of mla_decode_wgmma.cuh.
#pragma once

#include "wgmma_tile.cuh"

// Loads tiles group by group of 64 columns, each as soon as its part of a stage is empty, by TMA boxes of up to 64 tokens. By cp.async
// where the item's begin or the page size is no multiple of a box, or where the item ends within the tile.
template <class T>
struct GroupLoader {
    using Order = typename T::Order;
    const Args& args;
    const TensorMap& map;
    const WorkItem& item;
    const u32 stages, full, empty, warp; // `warp` counts within the warpgroup

    DEVICE void run() const {
        const u32 box = min(u32(T::TOKENS), args.page_size & -args.page_size); // tokens of a box, which lies in one page
        const bool boxes = args.copies == BOXES && item.kv_begin % box == 0;
        if (boxes) prefetch_map(map);
        u32 stage = 0, parity = 1;
        for (u32 tile_begin = item.kv_begin; tile_begin < item.kv_end; tile_begin += T::TOKENS) {
            const u32 to = stages + stage * T::STAGE_BYTES, filled = full + stage * (T::GROUPS * 8), emptied = empty + stage * (T::EMPTIES * 8);
            const bool by_box = boxes && tile_begin + T::TOKENS <= item.kv_end;
            if (by_box && warp == 0) {
                by_boxes(tile_begin, box, to, filled, emptied, parity);
            } else {
                // All warps follow all phases, as an mbarrier tells only the last two apart.
                for (int i = 0; i < T::EMPTIES; i++) mbarrier_wait(emptied + i * 8, parity);
                if (!by_box) by_chunks(tile_begin, to, filled);
            }
            if (++stage == T::STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
    }

    // By one warp, a lane a box.
    DEVICE void by_boxes(u32 tile_begin, u32 box, u32 to, u32 filled, u32 emptied, u32 parity) const {
        const u32 first = threadIdx.x % LANES * box, token = tile_begin + first, page = token / args.page_size, offset = token - page * args.page_size;
        const bool asks = first < T::TOKENS;
        u32 id = 0;
        if (asks) id = page_id(args, item, page);
#pragma unroll
        for (int i = 0; i < T::GROUPS; i++) {
            const int group = T::group_at(i);
            const u32 barrier = filled + group * 8;
            if (group % 2 == 0) mbarrier_wait(emptied + group / 2 * 8, parity);
            if (first == 0) mbarrier_arrive_expect_tx(barrier, Order::GROUP_BYTES);
            if (asks) copy_lines(to + Order::groups(group) + first * 128, map, offset, group, id, barrier);
        }
        __syncwarp();
    }

    DEVICE void by_chunks(u32 tile_begin, u32 to, u32 filled) const {
        constexpr int PASS_ROWS = T::LOADERS * LANES / Order::GROUP;
        const u32 lane = threadIdx.x % LANES, first = warp * (LANES / Order::GROUP) + lane / Order::GROUP;
#pragma unroll 1
        for (u32 row = first; row < T::TOKENS; row += PASS_ROWS) {
            const u32 token = tile_begin + row;
            const bool is_there = token < item.kv_end;
            u64 element = 0;
            if (is_there) element = row_of_token<T::DIM>(args, item, token);
            const u8* from = args.kv + element * 2 + lane % Order::GROUP * 16;
            const u32 place = to + Order::at(row, lane % Order::GROUP);
#pragma unroll
            for (int i = 0; i < T::GROUPS; i++) copy_16(place + Order::groups(i), from + i * 128, is_there, true);
        }
        cp_async_commit();
        cp_async_wait<0>();
        fence_proxy_async(); // wgmma reads it
        bar_sync<T::LOADERS>(2);
        if (warp == 0 && lane == 0) {
            for (int i = 0; i < T::GROUPS; i++) arrive(filled + i * 8);
        }
    }
};
