// The loader warpgroup of mla_decode_swap_fp8.cuh: codes to shared memory, STAGES tiles ahead.
#pragma once

#include "swap_fp8_tile.cuh"

// A warp loads 16 tokens of each tile, by a TMA box. By cp.async, two threads a token, where pages are no multiple of a box or not aligned
// for TMA, where the item begins inside of a box (SplitPolicy::FixedTokens), where it ends within the tile, and where tokens are listed: the
// tokens past its end, and entries that are no slot, become zeros, as they weigh 0 and 0 x NaN would be NaN. All threads arrive at each stage's barrier.
template <class T>
struct SwapFp8Loader {
    using Order = typename T::CodesOrder;
    static_assert(T::TOKENS == T::LOADERS * Order::ROWS, "a box for each warp");
    const Args& args;
    const TensorMap& map;
    const WorkItem& item;
    const u32 base, warp; // `warp` counts within the warpgroup

    DEVICE void run() const {
        const bool boxes = args.copies == BOXES && item.kv_begin % Order::ROWS == 0;
        if (boxes) prefetch_map(map);
        u32 stage = 0, parity = 1;
#pragma unroll 1
        for (u32 begin = item.kv_begin; begin < item.kv_end; begin += T::TOKENS) {
            const u32 to = base + T::STAGES_AT + stage * T::STAGE_BYTES + warp * Order::BYTES, full = base + T::FULL_AT + stage * 8, empty = base + T::EMPTY_AT + stage * 8;
            if (boxes && begin + T::TOKENS <= item.kv_end) {
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
