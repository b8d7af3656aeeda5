// Division by a number known to the host at launch, as a multiplication and a shift.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

// For d >= 1: magic = ceil(2^shift / d), shift = 31 + ceil(log2 d).
struct Divisor {
    u32 magic;
    u32 shift;
};

// n / d, exact for n < 2^31.
__device__ __forceinline__ u32 divide(u32 n, Divisor by) {
    return (u32)((u64)n * by.magic >> by.shift);
}
