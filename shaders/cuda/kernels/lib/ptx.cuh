// Wrappers of PTX instructions that CUDA C++ has no intrinsic for (cp.async, mbarrier, ldmatrix, mma.sync), and small helpers.
#pragma once

#include "order.cuh"

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define DEVICE __device__ __forceinline__

constexpr int LANES = 32;

template <bool FIRST, class A, class B>
struct Either {
    using Type = A;
};

template <class A, class B>
struct Either<false, A, B> {
    using Type = B;
};

template <int VALUE>
struct Constant {
    static constexpr int value = VALUE;
};

// Calls `body` with Constant<0> to Constant<COUNT - 1>: a loop that is always unrolled.
template <int COUNT, int FROM = 0, class Body>
DEVICE void unrolled(const Body& body) {
    if constexpr (FROM < COUNT) {
        body(Constant<FROM>());
        unrolled<COUNT, FROM + 1>(body);
    }
}

// Replaces each element by `body(index, element)`, in a loop that is not unrolled although the array is in registers: the elements pass
// through the first one's place. It is for code that runs once and is long.
template <class X, int COUNT, class Body>
DEVICE void rolled(X (&xs)[COUNT], const Body& body) {
#pragma unroll 1
    for (int i = 0; i < COUNT; i++) {
        const X x = body(i, xs[0]);
#pragma unroll
        for (int j = 0; j + 1 < COUNT; j++) xs[j] = xs[j + 1];
        xs[COUNT - 1] = x;
    }
}

// The same value, which the compiler keeps in one register: it does not keep what it was computed from instead.
DEVICE u32 in_a_register(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

DEVICE u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// A barrier of WARPS warps, by one of the block's 16 named barriers; __syncthreads is barrier 0.
template <int WARPS>
DEVICE void bar_sync(u32 barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(WARPS * LANES) : "memory");
}

// bar.arrive: arrives at a named barrier of WARPS warps without waiting.
template <int WARPS>
DEVICE void bar_arrive(u32 barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(WARPS * LANES) : "memory");
}

// __syncthreads_or: a barrier of the block, and whether `value` is true for any thread.
DEVICE bool any_of_block(bool value) {
    u32 any;
    asm volatile("{.reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, 0, p; selp.u32 %0, 1, 0, q;}" : "=r"(any) : "r"(static_cast<u32>(value)) : "memory");
    return any != 0;
}

// bar.red.or: a named barrier of WARPS warps, which also tells whether `value` is true for any of their threads.
template <int WARPS>
DEVICE bool any_of_warps(u32 barrier, bool value) {
    u32 any;
    asm volatile("{.reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, %2, %3, p; selp.u32 %0, 1, 0, q;}"
                 : "=r"(any)
                 : "r"(static_cast<u32>(value)), "r"(barrier), "n"(WARPS * LANES)
                 : "memory");
    return any != 0;
}

// cp.async of 16 bytes from global to shared memory; the bytes are there after `cp_async_wait`. If `is_there` is false, it reads nothing
// and writes zeros.
DEVICE void copy_16(u32 to, const void* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}

// cp.async of 4 bytes, otherwise like copy_16.
DEVICE void copy_4(u32 to, const void* from, bool is_there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(is_there ? 4 : 0) : "memory");
}

// cp.async of 8 bytes, otherwise like copy_16.
DEVICE void copy_8(u32 to, const void* from, bool is_there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(is_there ? 8 : 0) : "memory");
}

// Like copy_16 above, but does nothing at all if `wanted` is false.
DEVICE void copy_16(u32 to, const void* from, bool is_there, bool wanted) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p cp.async.cg.shared.global [%0], [%1], 16, %2;}" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0), "r"(static_cast<u32>(wanted))
                 : "memory");
}

DEVICE void copy_8(u32 to, const void* from, bool is_there, bool wanted) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p cp.async.ca.shared.global [%0], [%1], 8, %2;}" ::"r"(to), "l"(from), "r"(is_there ? 8 : 0), "r"(static_cast<u32>(wanted))
                 : "memory");
}

// prefetch.global.L2 since compute capability 9.0, else nothing: fetches the line at a global address into the L2. It is a hint, so the
// address need not be readable.
DEVICE void prefetch_to_l2(u64 at) {
    asm volatile("// sm_90: prefetch.global.L2 [%0];" ::"l"(at));
}

// cp.async.commit_group: the thread's cp.async since the last commit become a group.
DEVICE void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// cp.async.wait_group: waits until at most the GROUPS latest of the thread's groups are still in flight.
template <int GROUPS>
DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// mbarrier.init: initialises an mbarrier, 8 bytes of shared memory, whose phases end after `arrivals` arrivals each. The phases' parities
// are 0, 1, 0, 1 and so on.
DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// mbarrier.arrive: one arrival.
DEVICE void arrive(u32 barrier) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(barrier) : "memory");
}

// cp.async.mbarrier.arrive.noinc: an arrival that happens when this thread's earlier cp.async are complete.
DEVICE void cp_async_mbarrier_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase of this parity has ended. Before the first phase has ended, parity 1 counts as ended. try_wait, since sm_90,
// suspends the thread meanwhile.
DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{.reg .pred p;\n"
        "AGAIN:\n"
        "// sm_90: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
        "// sm_90: @p bra DONE;\n"
        "mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n"
        "@!p bra AGAIN;\n"
        "DONE:\n"
        "}" ::"r"(barrier), "r"(parity) : "memory");
}

// Whether the phase of this parity has ended.
DEVICE bool mbarrier_test(u32 barrier, u32 parity) {
    u32 ended;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(ended) : "r"(barrier), "r"(parity) : "memory");
    return ended != 0;
}

DEVICE u32 load_4(u32 from) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}

DEVICE void store_2(u32 to, u16 half) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(half) : "memory");
}

DEVICE void store_4(u32 to, u32 word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

DEVICE void store_8(u32 to, float first, float second) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(first), "f"(second) : "memory");
}

DEVICE void store_16(u32 to, const u32 (&words)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

DEVICE void load_16(u32 (&to)[4], u32 from) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

// ldmatrix.x4: four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void load_matrices(u32 (&to)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

DEVICE void load_matrices_transposed(u32 (&to)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// sum += a x b by mma.sync, m16n8k16.
DEVICE void multiply_bf16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void multiply_f16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same for FP8 codes, m16n8k32: compute capability 8.9, PTX 8.4.
DEVICE void multiply_e4m3(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same for either dtype of 16 bits.
template <bool IS_BF16>
DEVICE void multiply_16_bit(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (IS_BF16) {
        multiply_bf16(sum, a, b0, b1);
    } else {
        multiply_f16(sum, a, b0, b1);
    }
}

// Transposes 4 x 4 words of the lanes of a quad: lane i gets word i of each lane, in the order of the lanes.
DEVICE void transpose_in_quads(u32 (&words)[4]) {
#pragma unroll
    for (int by = 1; by < 4; by *= 2) {
        const bool is_upper = threadIdx.x & by;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & by) continue;
            u32 &low = words[i], &high = words[i | by];
            const u32 got = __shfl_xor_sync(~0u, is_upper ? low : high, by);
            (is_upper ? low : high) = got;
        }
    }
}

// Two elements in a word, the first one low, rounded to nearest even.
DEVICE u32 pack_bf16(float first, float second) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}

DEVICE u32 pack_f16(float first, float second) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}

// The products of two elements each.
DEVICE u32 multiply_f16_pairs(u32 a, u32 b) {
    u32 product;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

DEVICE float f16_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

DEVICE float bf16_to_float(u16 bits) {
    return __uint_as_float(static_cast<u32>(bits) << 16);
}

// Converts without a conversion instruction, so that every architecture takes it: exact, NaN codes included.
DEVICE float e4m3_to_float(u8 code) {
    const u32 magnitude = code & 0x7F;
    if (magnitude == 0x7F) return __uint_as_float(0x7FC00000u);
    const float value = __uint_as_float(magnitude << 20) * 0x1p120f;
    return code & 0x80 ? -value : value;
}

// Whether an instruction converts FP8 codes.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr bool CONVERTS_E4M3 = true;
#else
constexpr bool CONVERTS_E4M3 = false;
#endif

// Two codes, the first one low: exact, and a NaN for a NaN.
DEVICE float2 e4m3_pair_to_float(u16 codes) {
    if constexpr (CONVERTS_E4M3) {
        u32 pair;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(codes));
        return make_float2(f16_to_float(static_cast<u16>(pair)), f16_to_float(static_cast<u16>(pair >> 16)));
    } else {
        return make_float2(e4m3_to_float(static_cast<u8>(codes)), e4m3_to_float(static_cast<u8>(codes >> 8)));
    }
}

DEVICE float exp2_fast(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

DEVICE float log2_fast(float x) {
    float value;
    asm("lg2.approx.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}
