// How a block of mla_decode cuts an item, how cache rows lie in its shared memory, and how they get there.
#pragma once

#include "mla.cuh"

// How a block cuts an item.
template <int LATENT_, int ROPE_, Dtype CACHE_, int ROWS_, int TOKENS_, int WARPS_, int STAGES_, int PARTS_, bool KEEPS_QUERIES_>
struct Tile {
    static constexpr int LATENT = LATENT_, DIM = LATENT_ + ROPE_, ROWS = ROWS_, TOKENS = TOKENS_, WARPS = WARPS_, STAGES = STAGES_;
    static constexpr int PARTS = PARTS_; // that a query is split in
    static constexpr Dtype CACHE = CACHE_;
    static constexpr bool KEEPS_QUERIES = KEEPS_QUERIES_; // in registers; else they are read from shared memory for each tile
    static constexpr int THREADS = WARPS * LANES;
    static constexpr int ROW_WARPS = ROWS / 16, TOKEN_WARPS = WARPS / ROW_WARPS;
    static constexpr int TOKEN_TILES = TOKENS / TOKEN_WARPS / 8; // of a warp's scores
    static constexpr int ROW_TILES = ROWS / 16, COLUMN_TILES = LATENT / WARPS / 8; // of a warp's output
    static constexpr int STEPS = DIM / 16; // of a score
    static constexpr int ELEMENT_BYTES = bytes_of(CACHE), ROW_BYTES = DIM * ELEMENT_BYTES, QUERY_BYTES = DIM * 2;
    static constexpr int WEIGHT_PITCH = TOKENS + 8; // 16-bit elements
    static constexpr int STAGE_BYTES = TOKENS * ROW_BYTES, QUERIES_BYTES = PARTS * ROWS * QUERY_BYTES;
    // Queries that stay in registers pass through the last stage.
    static constexpr int STAGES_AT = KEEPS_QUERIES ? 0 : QUERIES_BYTES;
    static constexpr int QUERIES_AT = KEEPS_QUERIES ? (STAGES - 1) * STAGE_BYTES : 0;
    static constexpr int WEIGHTS_AT = STAGES_AT + STAGES * STAGE_BYTES;
    static constexpr int MAXIMA_AT = WEIGHTS_AT + ROWS * WEIGHT_PITCH * 2; // [TOKEN_WARPS, ROWS]
    static constexpr int FACTORS_AT = MAXIMA_AT + TOKEN_WARPS * ROWS * 4; // [ROWS]
    static constexpr int SCALES_AT = FACTORS_AT + ROWS * 4; // [ROWS]
    static constexpr int SHARED_BYTES = SCALES_AT + ROWS * 4;
    static_assert(TOKEN_TILES >= 1 && COLUMN_TILES % 2 == 0 && TOKENS % 16 == 0 && DIM % 32 == 0, "shape");
    static_assert(!KEEPS_QUERIES || QUERIES_BYTES <= STAGE_BYTES, "queries pass through a stage");
    static_assert(STAGES >= 2, "one tile is used, the others are on their way");
};

// Which 16-byte chunk of a row stands in place of chunk `chunk`: neighbouring rows use other banks.
template <int ROW_BYTES>
struct Swizzle {
    // Chunks that change places, and rows that share an order.
    static constexpr int GROUP = ROW_BYTES % 128 == 0 ? 8 : ROW_BYTES % 64 == 0 ? 4 : 2;
    static constexpr int SHIFT = GROUP == 8 ? 0 : GROUP == 4 ? 1 : 2;
    static_assert(ROW_BYTES % (GROUP * 16) == 0, "whole groups");
    DEVICE static u32 of(u32 row) { return (row >> SHIFT) & (GROUP - 1); }
    DEVICE static u32 at(u32 row, u32 chunk) { return row * ROW_BYTES + ((chunk ^ of(row)) << 4); }
};

// Where a thread's rows of the cache are: those of the next tile to load.
template <class T>
struct Loader {
    using Order = Swizzle<T::ROW_BYTES>;
    static constexpr int ROW_LANES = Order::GROUP, PASS_ROWS = T::THREADS / ROW_LANES;
    static constexpr int PASSES = (T::TOKENS + PASS_ROWS - 1) / PASS_ROWS;
    static constexpr int CHUNKS = T::ROW_BYTES / 16 / ROW_LANES; // of a thread's share of a row
    // Passes share the order of their rows' chunks.
    static_assert(PASSES == 1 || PASS_ROWS % 8 == 0, "order");

    const Args& args;
    u32 page_begin, kv_end, page_size, num_pages;
    u32 token; // of the first pass
    u32 page[PASSES], offset[PASSES], id[PASSES];

    DEVICE Loader(const Args& args, const WorkItem& item) : args(args) {
        page_begin = item.page_begin;
        kv_end = item.kv_end;
        page_size = args.header->page_size;
        num_pages = args.header->num_pages;
        token = item.kv_begin + threadIdx.x / ROW_LANES;
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            page[i] = (token + i * PASS_ROWS) / page_size;
            offset[i] = token + i * PASS_ROWS - page[i] * page_size;
        }
        look_up();
    }

    // The page ids are asked for a tile ahead.
    DEVICE void look_up() {
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            id[i] = 0;
            if (token + i * PASS_ROWS < kv_end) id[i] = args.pages[page_begin + page[i]];
        }
    }

    DEVICE void load(u32 stage) {
        const u32 row = threadIdx.x / ROW_LANES, lane = threadIdx.x % ROW_LANES;
        const u32 to = stage + Order::at(row, lane);
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            if (T::TOKENS % PASS_ROWS != 0 && row + i * PASS_ROWS >= T::TOKENS) break;
            const bool is_there = token + i * PASS_ROWS < kv_end;
            const u32 known = args.clamp_pages ? min(id[i], num_pages - 1) : id[i];
            const u64 element = known * args.kv_block_stride + static_cast<u64>(offset[i]) * T::DIM;
            const u8* from = args.kv + element * T::ELEMENT_BYTES + lane * 16;
#pragma unroll
            for (int j = 0; j < CHUNKS; j++) {
                const u32 chunk = to + i * PASS_ROWS * T::ROW_BYTES + j * ROW_LANES * 16;
                if (T::CACHE != E4M3 || args.copies_16) {
                    copy_16(chunk, from + j * ROW_LANES * 16, is_there);
                } else {
                    copy_8(chunk, from + j * ROW_LANES * 16, is_there);
                    copy_8(chunk + 8, from + j * ROW_LANES * 16 + 8, is_there);
                }
            }
        }
        const u32 pages = T::TOKENS / page_size, rest = T::TOKENS - pages * page_size;
        token += T::TOKENS;
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            page[i] += pages;
            offset[i] += rest;
            if (offset[i] >= page_size) {
                offset[i] -= page_size;
                page[i]++;
            }
        }
        look_up();
    }
};
