// The loader warpgroup of mla_decode_wgmma.cuh.
#pragma once

#include "wgmma_tile.cuh"

// Loads tiles group by group of 64 columns, each as soon as its part of a stage is empty, by TMA boxes of up to 64 tokens. By cp.async
// where the item's begin or the page size is no multiple of a box, where the item ends within the tile, or where tokens are listed.
template <class T>
struct GroupLoader {
    using Order = typename T::Order;
    const Args& args;
    const TensorMap& map;
    const WorkItem& item;
    const u32 stages, entries, full, empty, warp; // `warp` counts within the warpgroup

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
                const u64 row = by_box ? NOWHERE : find_row(tile_begin);
#pragma unroll 1
                for (int i = 0; i < T::EMPTIES; i++) mbarrier_wait(emptied + i * 8, parity);
                // Registers are short: addresses are computed where they are used.
                if (!by_box) by_chunks(row, tile_begin, in_a_register(stage));
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

    // A warp copies 16 rows of a tile, four at a time, which are PASS_ROWS apart: eight lanes a row.
    static constexpr int PASS_ROWS = T::LOADERS * LANES / Order::GROUP, PASSES = T::TOKENS / PASS_ROWS, TOGETHER = LANES / Order::GROUP;
    DEVICE u32 row_of(u32 pass, u32 row) const { return pass * PASS_ROWS + warp * TOGETHER + row; }

    // Each lane finds one of its warp's rows, before the stage is empty, which hides the latency of page ids and entries.
    DEVICE u64 find_row(u32 tile_begin) const {
        const u32 lane = threadIdx.x % LANES, token = tile_begin + row_of(lane / TOGETHER % PASSES, lane % TOGETHER);
        return token < item.kv_end ? row_of_token<T::DIM>(args, item, token) : NOWHERE;
    }

    DEVICE void by_chunks(u64 own_row, u32 tile_begin, u32 stage) const {
        const u32 lane = threadIdx.x % LANES, chunk = lane % Order::GROUP;
#pragma unroll 1
        for (int pass = 0; pass < PASSES; pass++) {
            const u64 element = __shfl_sync(~0u, own_row, pass * TOGETHER + lane / Order::GROUP);
            const bool is_there = element != NOWHERE;
            const u8* from = args.kv + (is_there ? element * 2 : 0) + chunk * 16;
            const u32 place = stages + stage * T::STAGE_BYTES + Order::at(row_of(pass, lane / Order::GROUP), chunk);
#pragma unroll
            for (int i = 0; i < T::GROUPS; i++) copy_16(place + Order::groups(i), from + i * 128, is_there);
        }
        if (const u32 row = warp * LANES + lane; args.is_listed && row < T::TOKENS) {
            copy_4(entries + (stage * T::TOKENS + row) * 4, args.pages + item.page_begin + tile_begin + row, tile_begin + row < item.kv_end);
        }
        cp_async_commit();
        cp_async_wait<0>();
        fence_proxy_async(); // wgmma reads it
        bar_sync<T::LOADERS>(2);
        if (warp == 0 && lane == 0) {
            for (int i = 0; i < T::GROUPS; i++) arrive(full + (stage * T::GROUPS + i) * 8);
        }
    }
};
