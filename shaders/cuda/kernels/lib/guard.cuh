// Counts what rounding loses: see the ops' guard. A kernel without counters has an address of 0, and skips all of it by branches that are
// the same for all threads.
//
// A thread first takes the extent of what it rounds, three integer instructions an element, and counts one by one only where that says that
// something is lost. A warp sums what its lanes counted, a block what its warps did, and four threads add it to the row: one `red` for
// each count that is not 0, and one for a magnitude above the one that was there before the block counted, which is loaded early. So a
// block that loses nothing issues none.
#pragma once

#include "global.cuh"
#include "round.cuh"

// Guard of src/cuda/ops/guard.rs.
struct Guard {
    u64 row; // u32 [4] saturated, NaN, flushed, bits of the largest finite magnitude; 0: nothing is counted
    u32 flushed; // f32 bits of the largest magnitude that becomes 0
    u32 top; // f32 bits of the largest that does not saturate
};

// The largest magnitude that a row holds already, for threads that count. Rows only grow, so one that is old costs a `red` at most.
__device__ __forceinline__ u32 seen_by(u64 row) { return row ? load_4(row + 12) : 0; }

// The ends of some magnitudes, f32 bits, whose order is that of the numbers.
struct Extent {
    u32 largest, least; // least: of those other than 0, less 1; all ones where there are none

    __device__ __forceinline__ Extent() : largest(0), least(~0u) {}

    __device__ __forceinline__ void note(u32 x) {
        largest = max(largest, x);
        least = min(least, x - 1); // 0 wraps, and is above all others
    }

    __device__ __forceinline__ bool loses(const Guard &guard) const { return largest > guard.top || least < guard.flushed; }
};

// What a warp of a block has counted, in shared memory.
struct WarpLost {
    u64 row; // to be added to; 0: nothing
    u32 counts[4]; // as a row
};

struct Lost {
    u32 saturated, nan, flushed, amax;

    __device__ __forceinline__ Lost() : saturated(0), nan(0), flushed(0), amax(0) {}

    // Counts a magnitude.
    __device__ __forceinline__ void count(u32 x, const Guard &guard) {
        nan += x > F32_INF;
        saturated += x > guard.top && x <= F32_INF;
        flushed += x - 1 < guard.flushed;
        amax = max(amax, x < F32_INF ? x : 0u);
    }

    // Counts COUNT magnitudes.
    template <u32 COUNT>
    __device__ __forceinline__ void note(const u32 (&x)[COUNT], const Guard &guard) {
        Extent extent;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            extent.note(x[i]);
        }
        if (!extent.loses(guard)) {
            amax = max(amax, extent.largest);
            return;
        }
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            count(x[i], guard);
        }
    }

    // Adds to a row what the lanes of a warp have counted; to be called by all of them.
    __device__ __forceinline__ void add_of_warp(u64 row, u32 seen) {
        sum_warp(seen);
        if (threadIdx.x % 32 == 0) {
            add(row, saturated);
            add(row + 4, nan);
            add(row + 8, flushed);
            raise(row + 12, amax);
        }
    }

    // Adds what the threads of a block have counted; to be called by all of them. `row` and `seen` are those of the warp. Nothing else is
    // in `warps` until the block ends.
    template <u32 WARPS>
    __device__ __forceinline__ void add_of_block(u64 row, u32 seen, WarpLost *warps) {
        sum_warp(seen);
        if (threadIdx.x % 32 == 0) {
            warps[threadIdx.x / 32] = WarpLost{row, {saturated, nan, flushed, amax}};
        }
        __syncthreads();
        // Four threads a warp: those of the first warp of a row add for all that have it.
        const u32 own = threadIdx.x / 4, at = threadIdx.x % 4;
        if (own >= WARPS || warps[own].row == 0) {
            return;
        }
        const u64 to = warps[own].row;
        u32 total = 0;
        bool is_first = true;
#pragma unroll
        for (u32 i = 0; i < WARPS; i++) {
            if (warps[i].row == to) {
                is_first = is_first && i >= own;
                const u32 count = warps[i].counts[at];
                total = at == 3 ? max(total, count) : total + count;
            }
        }
        if (is_first && at == 3) {
            raise(to + 12, total);
        } else if (is_first) {
            add(to + 4 * at, total);
        }
    }

  private:
    // All lanes get the sums, and the largest magnitude if it is above the one that was seen, else 0.
    __device__ __forceinline__ void sum_warp(u32 seen) {
        amax = __reduce_max_sync(~0u, amax);
        amax = amax > seen ? amax : 0;
        if (__any_sync(~0u, (saturated | nan | flushed) != 0)) {
            saturated = __reduce_add_sync(~0u, saturated);
            nan = __reduce_add_sync(~0u, nan);
            flushed = __reduce_add_sync(~0u, flushed);
        }
    }

    static __device__ __forceinline__ void add(u64 at, u32 count) {
        if (count > 0) {
            asm volatile("red.global.add.u32 [%0], %1;" ::"l"(at), "r"(count) : "memory");
        }
    }

    static __device__ __forceinline__ void raise(u64 at, u32 amax) {
        if (amax > 0) {
            asm volatile("red.global.max.u32 [%0], %1;" ::"l"(at), "r"(amax) : "memory");
        }
    }
};
