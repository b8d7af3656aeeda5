// Tiny kernels for the interpreter's own tests. Each does one thing that can go wrong.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using u32 = unsigned;

struct Args {
    const float* in;
    float* out;
    int n;
};

// Each warp writes what the next one reads: a barrier between.
extern "C" __global__ void __launch_bounds__(128) pass_on(const Args a) {
    __shared__ float s[128];
    const int t = threadIdx.x, at = blockIdx.x * 128 + t;
    s[t] = a.in[at];
    __syncthreads();
    a.out[at] = s[(t + 32) % 128];
}

// Two rounds over one buffer: the barrier between them keeps the second from overwriting what the first still reads.
extern "C" __global__ void __launch_bounds__(128) two_rounds(const Args a) {
    __shared__ float s[128];
    const int t = threadIdx.x;
    float sum = 0;
#pragma unroll 1
    for (int round = 0; round < a.n; round++) {
        s[t] = a.in[round * 128 + t];
        __syncthreads();
        sum += s[(t + 32) % 128];
        __syncthreads();
    }
    a.out[t] = sum;
}

// Copies that fly: a wait, then a barrier, before anyone reads.
extern "C" __global__ void __launch_bounds__(128) fly(const Args a) {
    extern __shared__ float dynamic[];
    const int t = threadIdx.x;
    const u32 to = (u32)__cvta_generic_to_shared(dynamic + t * 4);
    for (int i = 0; i < 2; i++) {
        const u32 bytes = t * 4 + i * 512 < a.n ? 16 : 0;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + i * 2048), "l"(a.in + i * 512 + t * 4), "r"(bytes));
        asm volatile("cp.async.commit_group;");
    }
    for (int i = 0; i < 2; i++) {
        if (i == 0) asm volatile("cp.async.wait_group 1;" ::: "memory");
        else asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        for (int j = 0; j < 4; j++) a.out[i * 512 + j * 128 + t] = dynamic[i * 512 + (j * 128 + t + 64) % 512];
    }
}

// Loops of different lengths, early exits, and lanes that part.
extern "C" __global__ void __launch_bounds__(64) part(const Args a) {
    const int t = blockIdx.x * 64 + threadIdx.x;
    if (t >= a.n) return;
    float x = a.in[t];
    for (int i = 0; i < t % 7; i++) x = (i & 1) ? x * 2.f : x + 1.f;
    switch (t % 4) {
        case 0: x = -x; break;
        case 1: x = x * x; break;
        case 2: x = fmaxf(x, 3.f); break;
        default: break;
    }
    a.out[t] = x;
}

// Sums over a warp in four ways.
extern "C" __global__ void __launch_bounds__(64) together(const Args a) {
    const int t = blockIdx.x * 64 + threadIdx.x, lane = threadIdx.x % 32;
    float x = a.in[t], sum = x, prefix = x;
    for (int i = 16; i; i >>= 1) sum += __shfl_xor_sync(~0u, sum, i);
    for (int i = 1; i < 32; i <<= 1) {
        const float up = __shfl_up_sync(~0u, prefix, i);
        if (lane >= i) prefix += up;
    }
    const u32 small = __ballot_sync(~0u, x < 0.5f);
    const u32 most = __reduce_max_sync(~0u, (u32)(x * 1000));
    a.out[t * 4] = sum;
    a.out[t * 4 + 1] = prefix;
    a.out[t * 4 + 2] = __popc(small) + (__any_sync(~0u, x > 2.f) ? 100 : 0) + (__all_sync(~0u, x > -9.f) ? 1000 : 0);
    a.out[t * 4 + 3] = most + __shfl_sync(~0u, x, 5) + __shfl_down_sync(~0u, x, 3, 8);
}

// One tile of a product: A [16, 16] row by row, B [16, 8] from B [16, 8] through a transposing load.
template <class T, bool BRAIN>
__device__ void tile(const Args& a) {
    __shared__ __align__(16) T sa[16 * 16], sb[16 * 8];
    const int t = threadIdx.x;
    for (int i = t; i < 256; i += 32) sa[i] = T(a.in[i]);
    for (int i = t; i < 128; i += 32) sb[i] = T(a.in[256 + i]);
    __syncthreads();
    u32 x[4], y[2];
    float d[4] = {1, 1, 1, 1};
    const u32 pa = (u32)__cvta_generic_to_shared(sa + (t % 16) * 16 + t / 16 * 8), pb = (u32)__cvta_generic_to_shared(sb + (t % 16) * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(pa));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(y[0]), "=r"(y[1]) : "r"(pb));
#define MMA(NAME)                                                                                                         \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]))
    if constexpr (BRAIN) MMA("bf16");
    else MMA("f16");
    for (int i = 0; i < 4; i++) a.out[(t / 4 + i / 2 * 8) * 8 + t % 4 * 2 + i % 2] = d[i];
}
extern "C" __global__ void __launch_bounds__(32) tile_f16(const Args a) { tile<__half, false>(a); }
extern "C" __global__ void __launch_bounds__(32) tile_bf16(const Args a) { tile<__nv_bfloat16, true>(a); }

// The same of FP8: A [16, 32] row by row, and B [8, 32] column by column.
extern "C" __global__ void __launch_bounds__(32) tile_e4m3(const Args a) {
#if __CUDA_ARCH__ >= 890
    __shared__ __align__(16) unsigned short sa[16 * 16], sb[8 * 16];
    const int t = threadIdx.x;
    auto pair = [&](int i) {
        unsigned short codes;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(a.in[2 * i + 1]), "f"(a.in[2 * i]));
        return codes;
    };
    for (int i = t; i < 256; i += 32) sa[i] = pair(i);
    for (int i = t; i < 128; i += 32) sb[i] = pair(256 + i);
    __syncthreads();
    u32 x[4], y[2];
    float d[4] = {1, 1, 1, 1};
    const u32 pa = (u32)__cvta_generic_to_shared(sa + t % 16 * 16 + t / 16 * 8), pb = (u32)__cvta_generic_to_shared(sb + t % 8 * 16 + t / 8 % 2 * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(pa));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(y[0]), "=r"(y[1]) : "r"(pb));
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
    for (int i = 0; i < 4; i++) a.out[(t / 4 + i / 2 * 8) * 8 + t % 4 * 2 + i % 2] = d[i];
#endif
}

// The last block to come adds up what all have written.
extern "C" __global__ void __launch_bounds__(64) last_block(const Args a, u32* counter) {
    __shared__ u32 mine;
    if (threadIdx.x == 0) {
        a.out[1 + blockIdx.x] = a.in[blockIdx.x];
        __threadfence();
        mine = atomicAdd(counter, 1);
    }
    __syncthreads();
    if (mine == gridDim.x - 1 && threadIdx.x == 0) {
        float sum = 0;
        for (u32 i = 0; i < gridDim.x; i++) sum += ((volatile float*)a.out)[1 + i];
        a.out[0] = sum;
    }
}

// Integers and bits as C has them.
extern "C" __global__ void __launch_bounds__(32) integers(const int* in, long long* out, int by) {
    const int t = threadIdx.x, x = in[t];
    out[t * 8] = x / by;
    out[t * 8 + 1] = x % by;
    out[t * 8 + 2] = (u32)x / 7u + ((u32)x % 10u) * 1000000000ll;
    out[t * 8 + 3] = x >> (t % 32) | (u32)x << 3;
    out[t * 8 + 4] = __popc(x) + 100 * __clz(x) + 10000 * __ffs(x);
    out[t * 8 + 5] = (long long)x * by / 3 + __mulhi(x, by);
    out[t * 8 + 6] = __byte_perm(x, by, 0x3715) ^ __funnelshift_l(x, by, 9) ^ __brev(x);
    out[t * 8 + 7] = (signed char)x + (short)(x >> 8) * 1000ll + min(x, by) + max((u32)x, (u32)by);
}

// Roundings between formats; e4m3 has instructions from compute_89 on.
extern "C" __global__ void __launch_bounds__(32) formats(const Args a, u32* bits) {
    const int t = threadIdx.x;
    const float x = a.in[t * 2], y = a.in[t * 2 + 1];
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
    bits[t * 4] = r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
    bits[t * 4 + 1] = r;
    bits[t * 4 + 2] = __float2int_rn(x) ^ __float2uint_rz(y);
#if __CUDA_ARCH__ >= 890
    unsigned short codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(y), "f"(x));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(codes));
    bits[t * 4 + 3] = codes;
    a.out[t] = __low2float(*(__half2*)&r) + __high2float(*(__half2*)&r);
#endif
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(a.out[32 + t]) : "f"(x));
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(a.out[64 + t]) : "f"(y));
    a.out[96 + t] = fmaf(x, y, __hadd2(__floats2half2_rn(x, y), __floats2half2_rn(y, y)).x);
}
