// Swizzled shared-memory layouts of the cache and of queries, in chunks of 16 bytes: ldmatrix and wgmma read 8 rows without bank conflicts.
#pragma once

#include "lib/ptx.cuh"

// The XOR swizzle of tiles copied by cp.async: [rows, ROW_BYTES], the chunks of a group permuted by the row.
template <int ROW_BYTES>
struct Swizzle {
    // GROUP chunks are permuted among themselves; 2^SHIFT consecutive rows share a permutation.
    static constexpr int GROUP = ROW_BYTES % 128 == 0 ? 8 : ROW_BYTES % 64 == 0 ? 4 : ROW_BYTES % 32 == 0 ? 2 : 1;
    static constexpr int SHIFT = GROUP == 8 ? 0 : GROUP == 4 ? 1 : 2;
    static_assert(ROW_BYTES % (GROUP * 16) == 0, "whole groups");
    // The permutation of a row. Rows a multiple of 8 apart share it.
    DEVICE static u32 of(u32 row) { return (row >> SHIFT) & (GROUP - 1); }
    DEVICE static u32 at(u32 row, u32 chunk) {
        return row * ROW_BYTES + chunk / GROUP * (GROUP * 16) + ((chunk % GROUP ^ of(row)) << 4);
    }
    // The address `further` chunks after one from `at` whose chunk has no bit in common with `further`: for a constant, an XOR or nothing.
    DEVICE static u32 from(u32 place, u32 further) { return (place ^ (further % GROUP << 4)) + further / GROUP * (GROUP * 16); }
    // The address `further` rows on, a multiple of 8.
    DEVICE static constexpr u32 rows(u32 place, u32 further) { return place + further * ROW_BYTES; }
    DEVICE static constexpr u32 groups(u32 further) { return further * GROUP * 16; }
};

// The layout of a TMA box of 16 tokens: [lines, tokens, 128 bytes], swizzled by the hardware (CU_TENSOR_MAP_SWIZZLE_128B). Where a token is
// no multiple of 128 bytes (e4m3), two tokens are copied as one row of the tensor, so that requests are whole lines.
template <int ROW_BYTES>
struct BoxOrder {
    static constexpr int ROWS = 16, BYTES = ROWS * ROW_BYTES;
    static constexpr int TOGETHER = ROW_BYTES % 128 == 0 ? 1 : 2, LINES = ROWS / TOGETHER, LINE_BYTES = LINES * 128;
    static constexpr int GROUP = 8 / TOGETHER; // chunks that are permuted among themselves
    static_assert(TOGETHER * ROW_BYTES % 128 == 0, "whole lines");
    DEVICE static u32 at(u32 row, u32 chunk) {
        const u32 line = row % ROWS / TOGETHER;
        chunk += row % TOGETHER * (ROW_BYTES / 16);
        return row / ROWS * BYTES + chunk / 8 * LINE_BYTES + line * 128 + ((chunk % 8 ^ line % 8) << 4);
    }
    // The same as Swizzle::from; `place` is in an even group.
    DEVICE static u32 from(u32 place, u32 further) {
        const u32 groups = further / GROUP;
        place ^= further % GROUP << 4;
        if (TOGETHER == 1) return place + groups * LINE_BYTES;
        if (groups % 2 == 0) return place + groups / 2 * LINE_BYTES;
        // An odd number of groups is the other half of a line: of the same line for even tokens, of the next one for odd tokens, which
        // begin in a line's second half.
        return (place ^ 64) + (groups / 2 + (place >> 6 ^ place >> 9) % 2) * LINE_BYTES;
    }
    DEVICE static u32 rows(u32 place, u32 further) {
        const u32 on = place + further / ROWS * BYTES + further % ROWS / TOGETHER * 128;
        return TOGETHER == 2 && further % ROWS / 8 == 1 ? on ^ 64 : on;
    }
};

// Records as they are in the cache. Their bytes are 16 more than a multiple of 128, so ldmatrix has no bank conflict.
template <int ROW_BYTES>
struct RecordOrder {
    static_assert(ROW_BYTES % 128 == 16, "eight tokens in different banks");
    static constexpr int ROWS = 16, GROUP = 8;
    DEVICE static u32 at(u32 row, u32 chunk) { return row * ROW_BYTES + chunk * 16; }
    DEVICE static u32 from(u32 place, u32 further) { return place + further * 16; }
    DEVICE static constexpr u32 rows(u32 place, u32 further) { return place + further * ROW_BYTES; }
    DEVICE static constexpr u32 groups(u32 further) { return further * GROUP * 16; }
};

// The layout that wgmma descriptors with 128-byte swizzling describe: [groups, ROWS, 128 bytes]. A TMA box of ROWS rows has it.
template <int ROWS>
struct GroupOrder {
    static constexpr int GROUP = 8, GROUP_BYTES = ROWS * 128;
    DEVICE static u32 at(u32 row, u32 chunk) { return chunk / GROUP * GROUP_BYTES + row * 128 + ((chunk % GROUP ^ row % 8) << 4); }
    DEVICE static constexpr u32 groups(u32 further) { return further * GROUP_BYTES; }
};
