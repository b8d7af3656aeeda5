// The loader warpgroup of mla_decode_swap_fp8.cuh: codes to shared memory, STAGES tiles ahead.
#pragma once

#include "swap_fp8_tile.cuh"

// A warp loads 16 tokens of each tile, by a TMA box. By cp.async, two threads a token, where pages are no multiple of a box or not aligned
// for TMA, where the item begins inside of a box (SplitPolicy::FixedTokens), where it ends within the tile, and where tokens are listed.
// Records are loaded by bulk copies. The tokens past the item's end, and entries that are no slot, become zeros: they weigh 0, and 0 x NaN
// would be NaN. All threads arrive at each stage's barrier.
template <class T>
struct SwapFp8Loader {
    using Order = typename T::CodesOrder;
    static_assert(T::TOKENS == T::LOADERS * Order::ROWS, "a box for each warp");
    const Args& args;
    const TensorMap& map;
    const WorkItem& item;
    const u32 base, warp; // `warp` counts within the warpgroup

    DEVICE void run() const {
        const bool boxes = !T::IS_RECORD && args.copies == BOXES && item.kv_begin % Order::ROWS == 0;
        if (boxes) prefetch_map(map);
        u32 stage = 0, parity = 1;
#pragma unroll 1
        for (u32 begin = item.kv_begin; begin < item.kv_end; begin += T::TOKENS) {
            const u32 to = base + T::STAGES_AT + stage * T::STAGE_BYTES + Order::at(warp * Order::ROWS, 0), full = base + T::FULL_AT + stage * 8, empty = base + T::EMPTY_AT + stage * 8;
            if constexpr (T::IS_RECORD) {
                by_records(begin + warp * Order::ROWS, stage, to, full, empty, parity);
            } else if (boxes && begin + T::TOKENS <= item.kv_end) {
                by_box(begin + warp * Order::ROWS, to, full, empty, parity);
            } else {
                by_chunks(begin + warp * Order::ROWS, stage, to, full, empty, parity);
            }
            if (++stage == T::STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
    }

    // The page id is loaded before the stage is empty, which hides its latency.
    DEVICE void by_box(u32 token, u32 to, u32 full, u32 empty, u32 parity) const {
        const u32 page = token / args.page_size, id = page_id(args, item, page), line = (token - page * args.page_size) / Order::TOGETHER;
        mbarrier_wait(empty, parity);
        if (threadIdx.x % LANES > 0) {
            arrive(full);
        } else {
            mbarrier_arrive_expect_tx(full, Order::BYTES);
            if constexpr (T::IS_READ_ONCE) {
                copy_box_once(to, map, line, id, full);
            } else {
                copy_box(to, map, line, id, full);
            }
        }
        __syncwarp();
    }

    // By bulk copies: KvView::check refuses records that do not begin at multiples of 16 bytes. A lane finds the place of a record, and the
    // first of those that follow each other in the cache copies all of them.
    DEVICE void by_records(u32 first, u32 stage, u32 to, u32 full, u32 empty, u32 parity) const {
        constexpr u32 BYTES = T::Layout::ELEMENTS;
        static_assert(BYTES % 16 == 0 && Order::rows(0, 1) == BYTES, "bulk copies of several records");
        const u32 lane = threadIdx.x % LANES, token = first + lane;
        const bool is_in_tile = lane < Order::ROWS;
        u64 place = NOWHERE;
        if (is_in_tile && token < item.kv_end) place = row_of_token<BYTES>(args, item, token);
        const bool is_there = place != NOWHERE;
        const u64 before = __shfl_up_sync(~0u, place, 1);
        const u32 there = __ballot_sync(~0u, is_there), follow = __ballot_sync(~0u, lane > 0 && is_there && before != NOWHERE && place == before + BYTES);
        mbarrier_wait(empty, parity);
        fence_proxy_async(); // zeros may have been written where bulk copies write now
        if (lane == 0) mbarrier_expect_tx(full, __popc(there) * BYTES);
        __syncwarp();
        const u32 row = to + Order::at(lane, 0);
        if (is_there && !(follow >> lane & 1)) {
            const u32 bytes = __ffs(~(follow >> lane >> 1)) * BYTES;
            if constexpr (T::IS_READ_ONCE) {
                copy_bytes_once(row, args.kv + place, bytes, full);
            } else {
                copy_bytes(row, args.kv + place, bytes, full);
            }
        }
        if (is_in_tile && !is_there) {
#pragma unroll 1
            for (u32 i = 0; i < BYTES; i += 16) copy_16(row + i, args.kv, false);
        }
        __syncwarp();
        if (is_in_tile) copy_entry(stage, lane, token);
        cp_async_mbarrier_arrive(full);
    }

    // Where tokens are listed: the entry of one of the warp's tokens, which the softmax looks at.
    DEVICE void copy_entry(u32 stage, u32 row, u32 token) const {
        if (!args.is_listed) return;
        copy_4(base + T::ENTRIES_AT + (stage * T::TOKENS + warp * Order::ROWS + row) * 4, args.pages + item.page_begin + token, token < item.kv_end);
    }

    DEVICE void by_chunks(u32 first, u32 stage, u32 to, u32 full, u32 empty, u32 parity) const {
        const u32 row = threadIdx.x % LANES / 2, token = first + row;
        u64 element = NOWHERE;
        if (token < item.kv_end) element = row_of_token<T::DIM>(args, item, token);
        const bool is_there = element != NOWHERE;
        const u8* from = args.kv + (is_there ? element : 0);
        mbarrier_wait(empty, parity);
        if (threadIdx.x % 2 == 0) copy_entry(stage, row, token);
#pragma unroll 1
        for (u32 chunk = threadIdx.x % 2; chunk < T::DIM / 16; chunk += 2) {
            const u32 place = to + Order::at(row, chunk);
            if (args.copies == CHUNKS_8) {
                copy_8(place, from + chunk * 16, is_there, true);
                copy_8(place + 8, from + chunk * 16 + 8, is_there, true);
            } else {
                copy_16(place, from + chunk * 16, is_there, true);
            }
        }
        cp_async_mbarrier_arrive(full);
    }
};
