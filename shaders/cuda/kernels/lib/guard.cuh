// Counts what rounding loses: see the ops' guard. A kernel without counters has an address of 0, and skips all of it by one branch that is
// the same for all threads.
//
// A thread counts what it rounds and adds to the row: counts that are not 0, and a magnitude that is above the one that is there. Where
// nothing is lost that is one load.
#pragma once

#include "global.cuh"
#include "round.cuh"

// Guard of src/cuda/ops/guard.rs.
struct Guard {
    u64 row; // u32 [4] saturated, NaN, flushed, bits of the largest finite magnitude; 0: nothing is counted
    u32 flushed; // f32 bits of the largest magnitude that becomes 0
    u32 top; // f32 bits of the largest that does not saturate
};

struct Lost {
    u32 saturated, nan, flushed, amax;

    __device__ __forceinline__ Lost() : saturated(0), nan(0), flushed(0), amax(0) {}

    // Counts COUNT magnitudes, f32 bits, whose order is that of the numbers.
    template <u32 COUNT>
    __device__ __forceinline__ void note(const u32 (&x)[COUNT], const Guard &guard) {
        u32 largest = 0, least = ~0u;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            largest = max(largest, x[i]);
            least = min(least, x[i] - 1); // 0 wraps, and is above all others
        }
        if (largest <= guard.top && least >= guard.flushed) {
            amax = max(amax, largest);
            return;
        }
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            nan += x[i] > F32_INF;
            saturated += x[i] > guard.top && x[i] <= F32_INF;
            flushed += x[i] - 1 < guard.flushed;
            amax = max(amax, x[i] < F32_INF ? x[i] : 0u);
        }
    }

    __device__ __forceinline__ void add_to(const Guard &guard) const {
        add(guard.row, saturated);
        add(guard.row + 4, nan);
        add(guard.row + 8, flushed);
        if (amax > load_4(guard.row + 12)) {
            asm volatile("red.global.max.u32 [%0], %1;" ::"l"(guard.row + 12), "r"(amax) : "memory");
        }
    }

  private:
    static __device__ __forceinline__ void add(u64 at, u32 count) {
        if (count > 0) {
            asm volatile("red.global.add.u32 [%0], %1;" ::"l"(at), "r"(count) : "memory");
        }
    }
};
