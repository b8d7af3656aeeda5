// Statistics of new tokens for choosing an e4m3 cache's k_scale: amax, and counts of saturating, non-finite and all elements.
//
//   for x in kv_c[tokens] ++ k_pe[tokens]:
//     amax = max(amax, |x|) if x is finite; saturated += |x| > 448 * k_scale; non_finite += x is inf or NaN; elements += 1
//
// The results are added to `stats`, so calls accumulate. Comparisons are on bit patterns, whose order for x >= 0 is that of the numbers.
//
// Tile: one quad (4 consecutive elements) of TOKENS_PER_THREAD tokens a thread; reduced by warp, by block, then one thread adds to `stats`.
//
// The grid covers max_tokens, so that a captured launch serves every range that fits.

// limits: kv_calibrate_* registers=64 threads=256

#include "lib/divisor.cuh"
#include "lib/global.cuh"
#include "lib/round.cuh"

#define THREADS 256u
#define TOKENS_PER_THREAD 8u
#define ALL_LANES 0xFFFFFFFFu

struct Args {
    u64 kv_c;  // [max_tokens, L], strided
    u64 k_pe;  // [max_tokens, R], strided
    u64 table; // u32 [2] num_tokens, first token
    u64 stats; // u32 [8] amax, unused, then 3 counts of 64 bits, low word first
    u64 kv_c_stride; // bytes, as the other stride
    u64 k_pe_stride;
    u32 max_tokens; // tokens that the inputs hold
    u32 latent_quads;
    u32 row_quads;
    u32 limit_bits; // f32 bits of 448 * k_scale, which may be infinite
    Divisor by_row_quads;
};

struct F32 {
    static const u32 BYTES = 4;
    static __device__ __forceinline__ void load(u64 at, u32 *words) {
        uint4 x = read_16(at);
        words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    }
    static __device__ __forceinline__ u32 magnitude(const u32 *words, u32 i) { return words[i] & 0x7FFFFFFFu; }
};

struct F16 {
    static const u32 BYTES = 2;
    static __device__ __forceinline__ void load(u64 at, u32 *words) {
        uint2 x = read_8(at);
        words[0] = x.x, words[1] = x.y;
    }
    static __device__ __forceinline__ u32 magnitude(const u32 *words, u32 i) {
        return f32_bits_of_f16(words[i / 2] >> 16 * (i % 2) & 0x7FFFu);
    }
};

struct Bf16 {
    static const u32 BYTES = 2;
    static __device__ __forceinline__ void load(u64 at, u32 *words) { F16::load(at, words); }
    static __device__ __forceinline__ u32 magnitude(const u32 *words, u32 i) {
        return (words[i / 2] >> 16 * (i % 2) & 0x7FFFu) << 16;
    }
};

__device__ __forceinline__ u32 global_add(u64 at, u32 n) {
    u32 old;
    asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(at), "r"(n) : "memory");
    return old;
}

// Adds to a 64-bit count, low word first, the carry by an atomic of its own.
__device__ __forceinline__ void add(u64 at, u32 n) {
    if (n > 0 && global_add(at, n) > 0xFFFFFFFFu - n) {
        global_add(at + 4, 1);
    }
}

template <class In>
__device__ __forceinline__ void calibrate(const Args &args) {
    __shared__ u32 sums[4]; // [4] amax, saturated, non-finite, elements
    if (threadIdx.x < 4) {
        sums[threadIdx.x] = 0;
    }
    __syncthreads();

    u32 item = blockIdx.x * THREADS + threadIdx.x;
    u32 block = divide(item, args.by_row_quads);
    u32 quad = item - block * args.row_quads;
    u32 first = block * TOKENS_PER_THREAD;
    u32 begin = min(read_4(args.table + 4), args.max_tokens);
    u32 num_tokens = min(read_4(args.table), args.max_tokens - begin);
    u32 amax = 0, saturated = 0, non_finite = 0, elements = 0;
    if (first < num_tokens) {
        u32 count = min(num_tokens - first, TOKENS_PER_THREAD);
        bool is_latent = quad < args.latent_quads;
        u64 stride = is_latent ? args.kv_c_stride : args.k_pe_stride;
        u32 column = is_latent ? quad : quad - args.latent_quads;
        u64 from = (is_latent ? args.kv_c : args.k_pe) + (begin + first) * stride + column * (4 * In::BYTES);
        // Tokens past the end read the last one and are not counted.
        u32 words[TOKENS_PER_THREAD][In::BYTES];
#pragma unroll
        for (u32 i = 0; i < TOKENS_PER_THREAD; i++) {
            In::load(from + min(i, count - 1) * stride, words[i]);
        }
#pragma unroll
        for (u32 i = 0; i < TOKENS_PER_THREAD; i++) {
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 magnitude = In::magnitude(words[i], j);
                bool is_finite = magnitude < F32_INF;
                amax = max(amax, is_finite ? magnitude : 0u);
                saturated += is_finite && i < count && magnitude > args.limit_bits;
                non_finite += !is_finite && i < count;
            }
        }
        elements = 4 * count;
    }
    amax = __reduce_max_sync(ALL_LANES, amax);
    saturated = __reduce_add_sync(ALL_LANES, saturated);
    non_finite = __reduce_add_sync(ALL_LANES, non_finite);
    elements = __reduce_add_sync(ALL_LANES, elements);
    if (threadIdx.x % 32 == 0) {
        atomicMax(&sums[0], amax);
        atomicAdd(&sums[1], saturated);
        atomicAdd(&sums[2], non_finite);
        atomicAdd(&sums[3], elements);
    }
    __syncthreads();
    if (threadIdx.x == 0 && sums[3] > 0) {
        asm volatile("red.global.max.u32 [%0], %1;" ::"l"(args.stats), "r"(sums[0]) : "memory");
        add(args.stats + 8, sums[1]);
        add(args.stats + 16, sums[2]);
        add(args.stats + 24, sums[3]);
    }
}

#define KV_CALIBRATE(NAME, IN) \
    extern "C" __global__ void __launch_bounds__(THREADS) kv_calibrate_##NAME(const Args args) { calibrate<IN>(args); }

KV_CALIBRATE(f32, F32)
KV_CALIBRATE(f16, F16)
KV_CALIBRATE(bf16, Bf16)
