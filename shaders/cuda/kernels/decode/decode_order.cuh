// Where the 16-byte chunks of a row of the cache lie in shared memory: the rows of a matrix are in different banks.
#pragma once

#include "lib/ptx.cuh"

// The order of a row's 16-byte chunks: neighbouring rows use other banks.
template <int ROW_BYTES>
struct Swizzle {
    // Chunks that change places, and rows that share an order.
    static constexpr int GROUP = ROW_BYTES % 128 == 0 ? 8 : ROW_BYTES % 64 == 0 ? 4 : ROW_BYTES % 32 == 0 ? 2 : 1;
    static constexpr int SHIFT = GROUP == 8 ? 0 : GROUP == 4 ? 1 : 2;
    static_assert(ROW_BYTES % (GROUP * 16) == 0, "whole groups");
    // Rows that are a multiple of 8 apart share it.
    DEVICE static u32 of(u32 row) { return (row >> SHIFT) & (GROUP - 1); }
    DEVICE static u32 at(u32 row, u32 chunk) {
        return row * ROW_BYTES + chunk / GROUP * (GROUP * 16) + ((chunk % GROUP ^ of(row)) << 4);
    }
    // The place `further` chunks on from an `at`, whose chunk has none of its bits: a constant costs an instruction, or none.
    DEVICE static u32 from(u32 place, u32 further) { return (place ^ (further % GROUP << 4)) + further / GROUP * (GROUP * 16); }
    // So many rows on, a multiple of 8.
    DEVICE static constexpr u32 rows(u32 place, u32 further) { return place + further * ROW_BYTES; }
    DEVICE static constexpr u32 groups(u32 further) { return further * GROUP * 16; }
};

// The order in which tensor copies put them, 16 rows in a box: [lines, rows, 128 bytes], the chunks of a line swizzled as the hardware does it. Rows that
// are no multiple of 128 bytes are copied by twos, as one.
template <int ROW_BYTES>
struct BoxOrder {
    static constexpr int ROWS = 16, BYTES = ROWS * ROW_BYTES;
    static constexpr int TOGETHER = ROW_BYTES % 128 == 0 ? 1 : 2, LINES = ROWS / TOGETHER, LINE_BYTES = LINES * 128;
    static constexpr int GROUP = 8 / TOGETHER; // chunks that change places
    static_assert(TOGETHER * ROW_BYTES % 128 == 0, "whole lines");
    DEVICE static u32 at(u32 row, u32 chunk) {
        const u32 line = row % ROWS / TOGETHER;
        chunk += row % TOGETHER * (ROW_BYTES / 16);
        return row / ROWS * BYTES + chunk / 8 * LINE_BYTES + line * 128 + ((chunk % 8 ^ line % 8) << 4);
    }
    // `place` is in an even group.
    DEVICE static u32 from(u32 place, u32 further) {
        const u32 groups = further / GROUP;
        place ^= further % GROUP << 4;
        if (TOGETHER == 1) return place + groups * LINE_BYTES;
        if (groups % 2 == 0) return place + groups / 2 * LINE_BYTES;
        // The other half of a line: of the same one in even rows, of the next one in odd rows, whose groups begin in the second half.
        return (place ^ 64) + (groups / 2 + (place >> 6 ^ place >> 9) % 2) * LINE_BYTES;
    }
    DEVICE static u32 rows(u32 place, u32 further) {
        const u32 on = place + further / ROWS * BYTES + further % ROWS / TOGETHER * 128;
        return TOGETHER == 2 && further % ROWS / 8 == 1 ? on ^ 64 : on;
    }
};

// The order in which matrices of a warpgroup take ROWS rows: [groups, rows, 128 bytes], a group's chunks swizzled as the hardware does it. A tensor
// copy of ROWS rows puts them so.
template <int ROWS>
struct GroupOrder {
    static constexpr int GROUP = 8, GROUP_BYTES = ROWS * 128;
    DEVICE static u32 at(u32 row, u32 chunk) { return chunk / GROUP * GROUP_BYTES + row * 128 + ((chunk % GROUP ^ row % 8) << 4); }
    DEVICE static constexpr u32 groups(u32 further) { return further * GROUP_BYTES; }
};
