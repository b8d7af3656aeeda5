// wgmma (compute capability 9.0): a warpgroup of four warps multiplies M = 64 rows, b from shared memory, asynchronously.
#pragma once

#include "ptx.cuh"

// The descriptor of an operand in shared memory in a GroupOrder (128-byte swizzling): its address, the stride between groups for an operand
// of several, and the stride between groups of eight rows, in bytes. Offsets may be added to it, in units of 16 bytes.
DEVICE u64 matrix_at(u32 begin, u32 group_stride = 0, u64 eight_rows = 8 * 128) {
    constexpr u64 SWIZZLE_128 = 1;
    return u64((begin & 0x3FFFF) >> 4) | u64(group_stride >> 4) << 16 | eight_rows >> 4 << 32 | SWIZZLE_128 << 62;
}

// A compiler barrier for these accumulators: nvcc does not know that a wgmma still writes them after its instruction.
template <int TILES>
DEVICE void pin(float (&sums)[TILES][4]) {
#pragma unroll
    for (int i = 0; i < TILES; i++) asm volatile("" : "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])::"memory");
}

// wgmma.fence: needed before the first wgmma after registers of accumulators were touched. Pin them before it.
DEVICE void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// wgmma.commit_group: the wgmma issued since the last call form a group. Pin their accumulators after it.
DEVICE void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int TILES>
DEVICE void begin_multiplications(float (&sums)[TILES][4]) {
    pin(sums);
    wgmma_fence();
}

template <int TILES>
DEVICE void end_of_multiplications(float (&sums)[TILES][4]) {
    wgmma_commit();
    pin(sums);
}

// wgmma.wait_group: waits until at most the LEFT latest groups are in flight. `pin` the accumulators of the groups that ended before use,
// so that the compiler does not move their reads above the wait.
template <int LEFT>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// setmaxnreg.dec: lowers the registers of each thread of this warpgroup to REGISTERS. Loader warps release registers so that the warps that
// multiply can have more.
template <int REGISTERS>
DEVICE void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS) : "memory");
}

// setmaxnreg.inc: raises the registers of each thread of this warpgroup to REGISTERS. Waits until other warpgroups of the block have
// released enough.
template <int REGISTERS>
DEVICE void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS) : "memory");
}

#define SUMS_8(s, i) "+f"(s[(i) / 4][0]), "+f"(s[(i) / 4][1]), "+f"(s[(i) / 4][2]), "+f"(s[(i) / 4][3]), "+f"(s[(i) / 4 + 1][0]), "+f"(s[(i) / 4 + 1][1]), "+f"(s[(i) / 4 + 1][2]), "+f"(s[(i) / 4 + 1][3])
#define SUMS_32(s, i) SUMS_8(s, i), SUMS_8(s, (i) + 8), SUMS_8(s, (i) + 16), SUMS_8(s, (i) + 24)

#define PLACES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PLACES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define PLACES_32 PLACES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PLACES_40 PLACES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define PLACES_64 \
    PLACES_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
    "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PLACES_128 \
    PLACES_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, " \
    "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, " \
    "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define OF_TYPE(multiply) \
    if constexpr (IS_BF16) { \
        multiply("bf16"); \
    } else { \
        multiply("f16"); \
    }

// m64n32k16: sums [64, 32] = or += a [64, 16] x b^T, b [32, 16], both in shared memory.
#define MULTIPLY_32(type) \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " {" PLACES_16 "}, %16, %17, p, 1, 1, 0, 0;}" \
                 : SUMS_8(sums, 0), SUMS_8(sums, 8) \
                 : "l"(a), "l"(b), "r"(static_cast<u32>(adds)))

template <bool IS_BF16>
DEVICE void multiply_32(float (&sums)[4][4], u64 a, u64 b, bool adds) {
    OF_TYPE(MULTIPLY_32)
}

// m64n64k16: sums [64, 64] = or += a [64, 16] x b^T, b [64, 16], both in shared memory; the same with a in registers, in the layout of
// mma.sync.
#define MULTIPLY_64(type) \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" PLACES_32 "}, %32, %33, p, 1, 1, 0, 0;}" \
                 : SUMS_32(sums, 0) \
                 : "l"(a), "l"(b), "r"(static_cast<u32>(adds)))
#define MULTIPLY_64_KEPT(type) \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" PLACES_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}" \
                 : SUMS_32(sums, 0) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)))

template <bool IS_BF16>
DEVICE void multiply_64(float (&sums)[8][4], u64 a, u64 b, bool adds) {
    OF_TYPE(MULTIPLY_64)
}

template <bool IS_BF16>
DEVICE void multiply_64(float (&sums)[8][4], const u32 (&a)[4], u64 b, bool adds) {
    OF_TYPE(MULTIPLY_64_KEPT)
}

// m64n16k16 or m64n32k16: sums [64, N] = or += a [64, 16] x b^T, b [N, 16], both in shared memory.
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

// The same and m64n64k16, with a in registers.
#define MULTIPLY_16_KEPT(type) \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type " {" PLACES_8 "}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;}" \
                 : SUMS_8(sums, 0) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)))
#define MULTIPLY_32_KEPT(type) \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " {" PLACES_16 "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;}" \
                 : SUMS_8(sums, 0), SUMS_8(sums, 8) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)))

template <bool IS_BF16>
DEVICE void multiply_columns(float (&sums)[2][4], const u32 (&a)[4], u64 b, bool adds) {
    OF_TYPE(MULTIPLY_16_KEPT)
}

template <bool IS_BF16>
DEVICE void multiply_columns(float (&sums)[4][4], const u32 (&a)[4], u64 b, bool adds) {
    OF_TYPE(MULTIPLY_32_KEPT)
}

template <bool IS_BF16>
DEVICE void multiply_columns(float (&sums)[8][4], const u32 (&a)[4], u64 b, bool adds) {
    multiply_64<IS_BF16>(sums, a, b, adds);
}

// m64n16k16 or m64n32k16, += only, with both operands transposed: a [16, 64], b [16, N], sums += a^T x b.
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

// m64n80k16 or m64n128k16: sums [64, N] = or += a [64, 16] x b^T, b [N, 16], both in shared memory.
#define MULTIPLY_KEYS_80(type) \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %42, 0; wgmma.mma_async.sync.aligned.m64n80k16.f32." type "." type " {" PLACES_40 "}, %40, %41, p, 1, 1, 0, 0;}" \
                 : SUMS_32(sums, 0), SUMS_8(sums, 32) : "l"(a), "l"(b), "r"(static_cast<u32>(adds)))
#define MULTIPLY_KEYS_128(type) \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" PLACES_64 "}, %64, %65, p, 1, 1, 0, 0;}" \
                 : SUMS_32(sums, 0), SUMS_32(sums, 32) : "l"(a), "l"(b), "r"(static_cast<u32>(adds)))

template <bool IS_BF16, int TILES>
DEVICE void multiply_keys(float (&sums)[TILES][4], u64 a, u64 b, bool adds) {
    if constexpr (TILES == 10) {
        OF_TYPE(MULTIPLY_KEYS_80)
    } else {
        OF_TYPE(MULTIPLY_KEYS_128)
    }
}

// m64n256k16: sums [64, 256] = or += a [64, 16] x b, b [16, 256], both in shared memory.
#define MULTIPLY_COLUMNS_256(type) \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" PLACES_128 "}, %128, %129, p, 1, 1, 0, 1;}" \
                 : SUMS_32(sums, 0), SUMS_32(sums, 32), SUMS_32(sums, 64), SUMS_32(sums, 96) \
                 : "l"(a), "l"(b), "r"(static_cast<u32>(adds)))

template <bool IS_BF16>
DEVICE void multiply_columns(float (&sums)[32][4], u64 a, u64 b, bool adds) {
    OF_TYPE(MULTIPLY_COLUMNS_256)
}

// m64n128k16 with a in registers.
#define MULTIPLY_KEYS_128_KEPT(type) \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" PLACES_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;}" \
                 : SUMS_32(sums, 0), SUMS_32(sums, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)))

template <bool IS_BF16>
DEVICE void multiply_keys(float (&sums)[16][4], const u32 (&a)[4], u64 b, bool adds) {
    OF_TYPE(MULTIPLY_KEYS_128_KEPT)
}

// m64n16k16 to m64n256k16: sums [64, N] += a [64, 16] x b, a in registers, b [16, N] in shared memory.
#define MULTIPLY_VALUES_16(type) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type " {" PLACES_8 "}, {%8, %9, %10, %11}, %12, 1, 1, 1, 1;" \
                 : SUMS_8(sums, 0) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define MULTIPLY_VALUES_32(type) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " {" PLACES_16 "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 1;" \
                 : SUMS_8(sums, 0), SUMS_8(sums, 8) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define MULTIPLY_VALUES_64(type) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" PLACES_32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;" \
                 : SUMS_32(sums, 0) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

#define MULTIPLY_VALUES_128(type) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" PLACES_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;" \
                 : SUMS_32(sums, 0), SUMS_32(sums, 32) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

#define MULTIPLY_VALUES_256(type) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" PLACES_128 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;" \
                 : SUMS_32(sums, 0), SUMS_32(sums, 32), SUMS_32(sums, 64), SUMS_32(sums, 96) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <bool IS_BF16>
DEVICE void multiply_values(float (&sums)[2][4], const u32 (&a)[4], u64 b) {
    OF_TYPE(MULTIPLY_VALUES_16)
}

template <bool IS_BF16>
DEVICE void multiply_values(float (&sums)[4][4], const u32 (&a)[4], u64 b) {
    OF_TYPE(MULTIPLY_VALUES_32)
}

template <bool IS_BF16>
DEVICE void multiply_values(float (&sums)[8][4], const u32 (&a)[4], u64 b) {
    OF_TYPE(MULTIPLY_VALUES_64)
}

template <bool IS_BF16>
DEVICE void multiply_values(float (&sums)[16][4], const u32 (&a)[4], u64 b) {
    OF_TYPE(MULTIPLY_VALUES_128)
}

template <bool IS_BF16>
DEVICE void multiply_values(float (&sums)[32][4], const u32 (&a)[4], u64 b) {
    OF_TYPE(MULTIPLY_VALUES_256)
}
