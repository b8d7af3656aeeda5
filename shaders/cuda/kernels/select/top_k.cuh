// The positions of the k largest logits of each row, exactly, as shaders/top_k.wgsl: by value, then by lower index; written as ascending
// indices, or as the slots of these tokens, and -1 behind them.
//
// A key is an unsigned integer that is greater the earlier a logit is chosen: by value, the two zeros alike, NaN last with the key 1; 0 is
// no logit. The key of the last that is chosen, the threshold, is found digit by digit, 11 bits, 11 and 10: the digit's value at which
// counts from above reach what is left to choose. Logits above the threshold are chosen, and those at it, ties, by index up to how many are
// left.
//
// Tile: a row a cluster of BLOCKS blocks, a slice a block. Of each chunk of a slice a warp has neighbours, LANES at a time, so that ballots
// give places in the order of indices. A slice of one chunk is read once, and its keys stay in registers; a longer one is read again for
// each digit. Each block counts a digit in its shared memory, twice, by even and by odd lanes, so that fewer lanes of a warp add to one
// word, and adds what is not 0 to the totals of every block of its cluster.
// The grid covers the capacity of step or binding: clusters past a step's rows leave early.
#pragma once

#include "lib/divisor.cuh"
#include "lib/global.cuh"
#include "lib/ptx.cuh"

#define TOP_K_THREADS 512

constexpr u32 WARPS = TOP_K_THREADS / LANES;
constexpr u32 STEPS = 32; // keys that a thread holds
constexpr u32 CHUNK = STEPS * TOP_K_THREADS; // keys that a block holds
constexpr u32 BINS = 2048;
constexpr u32 MOST_BLOCKS = 8;
constexpr u32 UNKNOWN = 0xFFFFFFFFu;
constexpr u32 MINUS_INFINITY = 0xFF800000u;
constexpr u32 EVERY_LANE = 0xFFFFFFFFu;

struct Args {
    u64 logits; // f32 [max_rows, columns], rows strided
    u64 lengths; // i32 [max_rows]
    u64 indices; // i32 [out_rows, k], rows strided
    u64 values; // f32 [out_rows, k], rows strided; 0: not written
    u64 table; // u32 [1 + table_words] num_rows, the row of `indices` of row 0, then [num_rows, row_words], then pages: see src/ops/top_k.rs
    u64 logits_stride; // bytes, as the other strides
    u64 indices_stride;
    u64 values_stride;
    u32 columns;
    u32 max_rows; // rows that step and binding have room for
    u32 out_rows;
    u32 k;
    u32 row_words; // 1: indices; 3: slots
    u32 table_words; // that the table has room for behind its count
    u32 page_size;
    u32 reserved;
    Divisor by_page_size;
};

struct Shared {
    u32 counts[BINS][2]; // of this block's slice, by even and by odd lanes
    u32 totals[3][BINS]; // of the row, for each digit
    u32 scanned[WARPS];
    u32 found[2]; // the value of a digit, and how many that have it are left to choose
    u32 of_warps[WARPS][2]; // logits above the threshold, and at it
    u32 of_blocks[MOST_BLOCKS][2];
};

DEVICE u32 key_of(u32 bits) {
    const u32 key = bits > 0x80000000u ? ~bits : bits | 0x80000000u;
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? 1u : key;
}

// Loads a word, if it is there.
DEVICE u32 read_4_if(u64 at, bool is_there) {
    u32 x;
    asm("{.reg .pred p; setp.ne.u32 p, %2, 0; mov.u32 %0, 0; @p ld.global.nc.u32 %0, [%1];}" : "=r"(x) : "l"(at), "r"(static_cast<u32>(is_there)));
    return x;
}

// The address of this block's shared memory in another block of the cluster.
DEVICE u32 in_block(u32 address, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

DEVICE void add_in_cluster(u32 address, u32 value) {
    asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

DEVICE void store_in_cluster(u32 address, u32 value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

DEVICE u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

DEVICE void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}

DEVICE void cluster_wait() {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// One row, as a block sees it.
template <u32 BLOCKS>
struct Row {
    const Args& args;
    Shared& shared;
    u32 row, rank, out_row, length;
    u64 logits;
    u32 begin, end; // this block's slice
    bool is_several; // chunks
    u32 lane, warp;
    u32 keys[STEPS];

    DEVICE Row(const Args& args, Shared& shared) : args(args), shared(shared) {
        rank = BLOCKS == 1 ? 0 : rank_in_cluster();
        row = blockIdx.x / BLOCKS;
        lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    }

    // Whether there is such a row.
    DEVICE bool find() {
        if (row >= min(read_4(args.table), args.max_rows)) return false;
        out_row = read_4(args.table + 4) + row;
        if (out_row >= args.out_rows) return false;
        // What the host has was checked, and what the device has is clamped.
        const u32 known = read_4(args.table + 8 + 4ull * args.row_words * row);
        const u32 asked = known != UNKNOWN ? known : static_cast<u32>(max(static_cast<int>(read_4(args.lengths + 4ull * row)), 0));
        length = min(asked, args.columns);
        logits = args.logits + row * args.logits_stride;
        const u32 slice = (length + BLOCKS - 1) / BLOCKS;
        begin = min(rank * slice, length), end = min(begin + slice, length);
        is_several = slice > CHUNK;
        return true;
    }

    // The index of this thread's first key of the chunk at `at`; the others follow by LANES.
    DEVICE u32 first_of(u32 at) const { return at + warp * (STEPS * LANES) + lane; }

    // Loads the keys of a chunk.
    DEVICE void load(u32 at) {
        const u32 first = first_of(at);
        // How far the end is from the first key; below 1 for none.
        const int left = static_cast<int>(end) - static_cast<int>(first);
        const u64 from = logits + 4ull * first;
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) keys[step] = read_4_if(from + 4 * LANES * step, left > static_cast<int>(LANES * step));
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) keys[step] = left > static_cast<int>(LANES * step) ? key_of(keys[step]) : 0;
    }

    // Counts a digit of the keys whose bits under `mask` are `known`, in all blocks: that of the other bits, from SHIFT on.
    template <u32 DIGIT, u32 SHIFT>
    DEVICE void count(u32 known, u32 mask) {
#pragma unroll 1
        for (u32 at = begin; at < end; at += CHUNK) {
            if (DIGIT == 0 || is_several) load(at);
#pragma unroll
            for (u32 step = 0; step < STEPS; step++) {
                const u32 key = keys[step];
                if (key != 0 && (key & mask) == known) atomicAdd(&shared.counts[(key & ~mask) >> SHIFT][lane % 2], 1u);
            }
        }
        __syncthreads();
        // Every block of the cluster has cleared its totals.
        if (BLOCKS > 1 && DIGIT == 0) cluster_wait();
#pragma unroll 1
        for (u32 bin = threadIdx.x; bin < BINS; bin += TOP_K_THREADS) {
            const u32 count = shared.counts[bin][0] + shared.counts[bin][1];
            if (count == 0) continue;
            shared.counts[bin][0] = 0, shared.counts[bin][1] = 0;
            if (BLOCKS == 1) {
                shared.totals[DIGIT][bin] = count;
            } else {
                const u32 total = shared_address(&shared.totals[DIGIT][bin]);
#pragma unroll 2
                for (u32 other = 0; other < BLOCKS; other++) add_in_cluster(in_block(total, other), count);
            }
        }
        sync();
    }

    // A barrier of the cluster.
    DEVICE void sync() {
        if (BLOCKS == 1) {
            __syncthreads();
        } else {
            cluster_arrive(), cluster_wait();
        }
    }

    // The value of a digit of PER * THREADS values at which the totals reach `left` from above; `left` becomes how many with it are left.
    template <u32 DIGIT, u32 PER>
    DEVICE u32 value_of(u32& left) {
        const u32 top = (TOP_K_THREADS - threadIdx.x) * PER - 1;
        u32 counts[PER], sum = 0;
#pragma unroll
        for (u32 i = 0; i < PER; i++) sum += counts[i] = shared.totals[DIGIT][top - i];
        u32 scanned = sum;
#pragma unroll
        for (u32 by = 1; by < LANES; by *= 2) {
            const u32 before = __shfl_up_sync(EVERY_LANE, scanned, by);
            if (lane >= by) scanned += before;
        }
        if (lane == LANES - 1) shared.scanned[warp] = scanned;
        __syncthreads();
        u32 before = scanned - sum;
#pragma unroll
        for (u32 other = 0; other < WARPS; other++) {
            if (other < warp) before += shared.scanned[other];
        }
        if (before < left && left <= before + sum) {
            u32 rest = left - before, value = top;
#pragma unroll
            for (u32 i = 0; i + 1 < PER; i++) {
                if (value == top - i && rest > counts[i]) rest -= counts[i], value--;
            }
            shared.found[0] = value, shared.found[1] = rest;
        }
        __syncthreads();
        left = shared.found[1];
        return shared.found[0];
    }

    // Logits above the threshold and at it: those of the chunk in warps before this one, and in the chunk.
    DEVICE void count_chosen(u32 threshold, u32 (&before)[2], u32 (&all)[2]) {
        u32 above = 0, ties = 0;
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) above += keys[step] > threshold, ties += keys[step] == threshold;
        above = __reduce_add_sync(EVERY_LANE, above), ties = __reduce_add_sync(EVERY_LANE, ties);
        __syncthreads();
        if (lane == 0) shared.of_warps[warp][0] = above, shared.of_warps[warp][1] = ties;
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            before[i] = 0, all[i] = 0;
#pragma unroll
            for (u32 other = 0; other < WARPS; other++) {
                const u32 count = shared.of_warps[other][i];
                all[i] += count;
                if (other < warp) before[i] += count;
            }
        }
    }

    // What is written for an index of the row.
    DEVICE u32 entry_of(u32 index) const {
        if (args.row_words == 1) return index;
        const u64 at = args.table + 8 + 4ull * args.row_words * row;
        const u32 block = divide(index, args.by_page_size), first = read_4(at + 4);
        // The host made the words of the pages; the bounds also cover a table that holds anything.
        if (block >= read_4(at + 8) || static_cast<u64>(first) + block >= args.table_words) return UNKNOWN;
        const u32 page = read_4(args.table + 4 + 4 * (static_cast<u64>(first) + block));
        return page == UNKNOWN ? UNKNOWN : page * args.page_size + (index - block * args.page_size);
    }

    DEVICE void put(u32 place, u32 entry, u32 bits_at) const {
        // Counts of one row agree, so a place is below k; memory is safe without that.
        if (place >= args.k) return;
        store_4(args.indices + out_row * args.indices_stride + 4ull * place, entry);
        if (args.values != 0) {
            const u32 bits = bits_at == UNKNOWN ? MINUS_INFINITY : read_4(logits + 4ull * bits_at);
            store_4(args.values + out_row * args.values_stride + 4ull * place, bits);
        }
    }

    // Writes what is chosen of the chunk at `at`: before this warp's keys so many of the row are above the threshold and at it.
    DEVICE void write_chosen(u32 at, u32 threshold, u32 left, u32 above, u32 ties) const {
        const u32 lower = (1u << lane) - 1;
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) {
            const bool is_above = keys[step] > threshold, is_tie = keys[step] == threshold;
            const u32 all_above = __ballot_sync(EVERY_LANE, is_above), all_ties = __ballot_sync(EVERY_LANE, is_tie);
            if ((all_above | all_ties) != 0) {
                const u32 ties_before = ties + __popc(all_ties & lower);
                if (is_above || (is_tie && ties_before < left)) {
                    const u32 index = first_of(at) + LANES * step;
                    put(above + __popc(all_above & lower) + min(ties_before, left), entry_of(index), index);
                }
                above += __popc(all_above), ties += __popc(all_ties);
            }
        }
    }
};

template <u32 BLOCKS>
DEVICE void top_k(const Args& args) {
    __shared__ Shared shared;
    griddep_launch();
    griddep_wait();
    Row<BLOCKS> row(args, shared);
    if (!row.find()) return;
    if (row.length <= args.k) {
        for (u32 index = row.rank * TOP_K_THREADS + threadIdx.x; index < args.k; index += BLOCKS * TOP_K_THREADS) {
            const bool is_there = index < row.length;
            row.put(index, is_there ? row.entry_of(index) : UNKNOWN, is_there ? index : UNKNOWN);
        }
        return;
    }

    u32* const words = &shared.counts[0][0];
#pragma unroll 1
    for (u32 i = threadIdx.x; i < 5 * BINS; i += TOP_K_THREADS) words[i] = 0;
    if (BLOCKS > 1) cluster_arrive();
    __syncthreads();
    u32 left = args.k;
    row.template count<0, 21>(0, 0);
    u32 threshold = row.template value_of<0, 4>(left) << 21;
    row.template count<1, 10>(threshold, 0xFFE00000u);
    threshold |= row.template value_of<1, 4>(left) << 10;
    row.template count<2, 0>(threshold, 0xFFFFFC00u);
    threshold |= row.template value_of<2, 2>(left);

    u32 before[2], all[2], of_block[2] = {0, 0}, above = 0, ties = 0;
#pragma unroll 1
    for (u32 at = row.begin; at < row.end; at += CHUNK) {
        if (row.is_several) row.load(at);
        row.count_chosen(threshold, before, all);
        of_block[0] += all[0], of_block[1] += all[1];
    }
    if (BLOCKS > 1) {
        if (threadIdx.x < BLOCKS) {
            const u32 there = in_block(shared_address(&shared.of_blocks[row.rank][0]), threadIdx.x);
            store_in_cluster(there, of_block[0]);
            store_in_cluster(there + 4, of_block[1]);
        }
        row.sync();
#pragma unroll
        for (u32 other = 0; other < BLOCKS; other++) {
            if (other < row.rank) above += shared.of_blocks[other][0], ties += shared.of_blocks[other][1];
        }
    }
#pragma unroll 1
    for (u32 at = row.begin; at < row.end; at += CHUNK) {
        if (row.is_several) {
            row.load(at);
            row.count_chosen(threshold, before, all);
        }
        row.write_chosen(at, threshold, left, above + before[0], ties + before[1]);
        above += all[0], ties += all[1];
    }
}
