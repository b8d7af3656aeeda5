// Hopper's matrices of a warpgroup (`wgmma`): four warps multiply 64 rows at once, out of shared memory, while they go on.
#pragma once

#include "ptx.cuh"

// What lies in shared memory in a GroupOrder: where it begins, and for a matrix of several groups how far apart they are, in bytes; how far apart each
// eight rows are. Constants may be added to it, in units of 16 bytes.
DEVICE u64 matrix_at(u32 begin, u32 group_stride = 0, u64 eight_rows = 8 * 128) {
    constexpr u64 SWIZZLE_128 = 1;
    return u64(begin >> 4) | u64(group_stride >> 4) << 16 | eight_rows >> 4 << 32 | SWIZZLE_128 << 62;
}

// What comes before stays before and what comes after stays after, as far as these sums are concerned: the compiler does not know that a
// multiplication goes on after its instruction.
template <int TILES>
DEVICE void pin(float (&sums)[TILES][4]) {
#pragma unroll
    for (int i = 0; i < TILES; i++) asm volatile("" : "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])::"memory");
}

// Before the first multiplication after sums were touched, which are pinned before it.
DEVICE void before_multiplications() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Those since the last time are a group. Their sums are pinned then.
DEVICE void commit_multiplications() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int TILES>
DEVICE void begin_multiplications(float (&sums)[TILES][4]) {
    pin(sums);
    before_multiplications();
}

template <int TILES>
DEVICE void end_of_multiplications(float (&sums)[TILES][4]) {
    commit_multiplications();
    pin(sums);
}

// For all but so many that were asked for last. What they summed is to be pinned then.
template <int LEFT>
DEVICE void wait_for_multiplications() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// A warpgroup's registers, so many a thread from here on: those that one gives up another may take.
template <int REGISTERS>
DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS) : "memory");
}

template <int REGISTERS>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS) : "memory");
}

#define SUMS_8(s, i) "+f"(s[(i) / 4][0]), "+f"(s[(i) / 4][1]), "+f"(s[(i) / 4][2]), "+f"(s[(i) / 4][3]), "+f"(s[(i) / 4 + 1][0]), "+f"(s[(i) / 4 + 1][1]), "+f"(s[(i) / 4 + 1][2]), "+f"(s[(i) / 4 + 1][3])
#define SUMS_32(s, i) SUMS_8(s, i), SUMS_8(s, (i) + 8), SUMS_8(s, (i) + 16), SUMS_8(s, (i) + 24)

#define PLACES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PLACES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define PLACES_128 \
    PLACES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
    "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, " \
    "%68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, " \
    "%120, %121, %122, %123, %124, %125, %126, %127"

#define OF_TYPE(multiply) \
    if constexpr (IS_BF16) { \
        multiply("bf16"); \
    } else { \
        multiply("f16"); \
    }

// sums [64, 32] = or += a [64, 16] x b, whose 32 rows have 16 columns each.
#define MULTIPLY_32(type) \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " {" PLACES_16 "}, %16, %17, p, 1, 1, 0, 0;}" \
                 : SUMS_8(sums, 0), SUMS_8(sums, 8) \
                 : "l"(a), "l"(b), "r"(static_cast<u32>(adds)))

template <bool IS_BF16>
DEVICE void multiply_32(float (&sums)[4][4], u64 a, u64 b, bool adds) {
    OF_TYPE(MULTIPLY_32)
}

// The same with a in registers, as `mma` takes it.
#define MULTIPLY_32_KEPT(type) \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " {" PLACES_16 "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;}" \
                 : SUMS_8(sums, 0), SUMS_8(sums, 8) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)))

template <bool IS_BF16>
DEVICE void multiply_32(float (&sums)[4][4], const u32 (&a)[4], u64 b, bool adds) {
    OF_TYPE(MULTIPLY_32_KEPT)
}

// sums [64, 256] += a [64, 16], in registers, x b, whose 16 rows have 256 columns each.
#define MULTIPLY_256(type) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" PLACES_128 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;" \
                 : SUMS_32(sums, 0), SUMS_32(sums, 32), SUMS_32(sums, 64), SUMS_32(sums, 96) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <bool IS_BF16>
DEVICE void multiply_256(float (&sums)[32][4], const u32 (&a)[4], u64 b) {
    OF_TYPE(MULTIPLY_256)
}

// sums [64, 16 or 32] = or += a [64, 16] x b, which has a row for each of their columns.
#define MULTIPLY_16(type) \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %10, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type " {" PLACES_8 "}, %8, %9, p, 1, 1, 0, 0;}" \
                 : SUMS_8(sums, 0) \
                 : "l"(a), "l"(b), "r"(static_cast<u32>(adds)))

template <bool IS_BF16>
DEVICE void multiply_columns(float (&sums)[2][4], u64 a, u64 b, bool adds) {
    OF_TYPE(MULTIPLY_16)
}

template <bool IS_BF16>
DEVICE void multiply_columns(float (&sums)[4][4], u64 a, u64 b, bool adds) {
    multiply_32<IS_BF16>(sums, a, b, adds);
}

// sums [64, 16 or 32] += a x b, both turned: their 16 rows have 64 columns, and 16 or 32.
#define MULTIPLY_TURNED_16(type) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type " {" PLACES_8 "}, %8, %9, 1, 1, 1, 1, 1;" : SUMS_8(sums, 0) : "l"(a), "l"(b))
#define MULTIPLY_TURNED_32(type) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " {" PLACES_16 "}, %16, %17, 1, 1, 1, 1, 1;" : SUMS_8(sums, 0), SUMS_8(sums, 8) : "l"(a), "l"(b))

template <bool IS_BF16>
DEVICE void multiply_turned(float (&sums)[2][4], u64 a, u64 b) {
    OF_TYPE(MULTIPLY_TURNED_16)
}

template <bool IS_BF16>
DEVICE void multiply_turned(float (&sums)[4][4], u64 a, u64 b) {
    OF_TYPE(MULTIPLY_TURNED_32)
}
