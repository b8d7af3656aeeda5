// The loader warpgroup of mla_decode_swap_fp8.cuh: codes to shared memory, STAGES tiles ahead.
#pragma once

#include "swap_fp8_tile.cuh"

// A warp loads 16 tokens of each tile, by a TMA box. By cp.async, two threads a token, where pages are no multiple of a box or not aligned
// for TMA, where the item begins inside of a box (SplitPolicy::FixedTokens), where it ends within the tile, and where tokens are listed:
// the tokens past its end, and entries that are no slot, become zeros, as they weigh 0 and 0 x NaN would be NaN. All threads arrive at each
// stage's barrier.
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

    // By cp.async, eight lanes a record. A lane finds the place of one.
    DEVICE void by_records(u32 first, u32 stage, u32 to, u32 full, u32 empty, u32 parity) const {
        constexpr u32 CHUNKS = T::Layout::ELEMENTS / 16;
        const u32 lane = threadIdx.x % LANES, own = first + lane % Order::ROWS, chunk = lane % 8;
        u64 place = NOWHERE;
        if (own < item.kv_end) place = row_of_token<T::Layout::ELEMENTS>(args, item, own);
        mbarrier_wait(empty, parity);
        if (args.is_listed && lane < Order::ROWS) {
            copy_4(base + T::ENTRIES_AT + (stage * T::TOKENS + warp * Order::ROWS + lane) * 4, args.pages + item.page_begin + own, own < item.kv_end);
        }
        if (args.copies == CHUNKS_8) {
            constexpr u32 EIGHTS = CHUNKS * 2;
            static_assert(Order::ROWS * EIGHTS % LANES == 0, "all lanes take part");
#pragma unroll 1
            for (u32 i = lane; i < Order::ROWS * EIGHTS; i += LANES) {
                const u64 element = __shfl_sync(~0u, place, i / EIGHTS);
                copy_8(to + i * 8, args.kv + (element == NOWHERE ? 0 : element + i % EIGHTS * 8), element != NOWHERE);
            }
        } else {
#pragma unroll 1
            for (u32 row = lane / 8; row < Order::ROWS; row += LANES / 8) {
                const u64 element = __shfl_sync(~0u, place, row);
                const bool is_there = element != NOWHERE;
                const u8* from = args.kv + (is_there ? element : 0) + chunk * 16;
                const u32 at = to + Order::at(row, chunk);
#pragma unroll
                for (u32 i = 0; i < CHUNKS / 8; i++) copy_16(at + i * 128, from + i * 128, is_there);
                if (chunk < CHUNKS % 8) copy_16(at + CHUNKS / 8 * 128, from + CHUNKS / 8 * 128, is_there);
            }
        }
        cp_async_mbarrier_arrive(full);
    }

    DEVICE void by_chunks(u32 first, u32 stage, u32 to, u32 full, u32 empty, u32 parity) const {
        const u32 row = threadIdx.x % LANES / 2, token = first + row;
        u64 element = NOWHERE;
        if (token < item.kv_end) element = row_of_token<T::DIM>(args, item, token);
        const bool is_there = element != NOWHERE;
        const u8* from = args.kv + (is_there ? element : 0);
        mbarrier_wait(empty, parity);
        if (args.is_listed && threadIdx.x % 2 == 0) {
            copy_4(base + T::ENTRIES_AT + (stage * T::TOKENS + warp * Order::ROWS + row) * 4, args.pages + item.page_begin + token, token < item.kv_end);
        }
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
