// Logits of a lightning indexer, variant `simple`: queries of any dtype, in f32. A thread has a key, and reads it once for each HEADS
// heads, whose queries are in shared memory.

// limits: indexer_logits_simple_* registers=96 threads=128

#include "indexer_logits.cuh"

#define THREADS 128u
#define HEADS 8u

// Codes of src/cuda/formats.rs.
#define F32_ELEMENTS 0u
#define F16_ELEMENTS 1u
#define BF16_ELEMENTS 2u
#define CODES 3u

__device__ __forceinline__ u32 bytes_of(u32 dtype) {
    return dtype == F32_ELEMENTS ? 4 : dtype == CODES ? 1 : 2;
}

// 4 consecutive elements.
__device__ __forceinline__ void read_quad(u64 at, u32 dtype, float (&x)[4]) {
    if (dtype == F32_ELEMENTS) {
        const uint4 words = read_16(at);
        x[0] = __uint_as_float(words.x), x[1] = __uint_as_float(words.y), x[2] = __uint_as_float(words.z), x[3] = __uint_as_float(words.w);
    } else if (dtype == CODES) {
        const u32 word = read_4(at);
#pragma unroll
        for (u32 i = 0; i < 4; i++) x[i] = e4m3_to_float(static_cast<u8>(word >> 8 * i));
    } else {
        const uint2 words = read_8(at);
        const u16 halves[4] = {static_cast<u16>(words.x), static_cast<u16>(words.x >> 16), static_cast<u16>(words.y), static_cast<u16>(words.y >> 16)};
#pragma unroll
        for (u32 i = 0; i < 4; i++) x[i] = dtype == F16_ELEMENTS ? f16_to_float(halves[i]) : bf16_to_float(halves[i]);
    }
}

template <u32 KEY>
DEVICE void score(const Args& args) {
    __shared__ float queries[HEADS][DIM];
    __shared__ float weights[HEADS];
    Run run;
    griddep_wait();
    if (!run_of_block(args, run)) {
        return;
    }
    const u32 key_bytes = bytes_of(KEY), query_bytes = bytes_of(args.query);
#pragma unroll 1
    for (u32 block = run.begin; block < run.end; block += THREADS) {
        const u32 key = block + threadIdx.x;
        const KeyPlace place = place_on(args, run, key, page_of(args, run, key));
        const u64 at = place.page + (u64)place.token * DIM * key_bytes;
        float sum = 0.0f;
#pragma unroll 1
        for (u32 first = 0; first < args.num_heads; first += HEADS) {
            __syncthreads();
#pragma unroll 1
            for (u32 quad = threadIdx.x; quad < HEADS * DIM / 4; quad += THREADS) {
                const u32 head = first + quad / (DIM / 4), column = quad % (DIM / 4) * 4;
                float x[4];
                // Heads past the last repeat it.
                const u32 there = min(head, args.num_heads - 1);
                read_quad(args.q + run.token * args.q_token_stride + there * args.q_head_stride + (u64)column * query_bytes, args.query, x);
#pragma unroll
                for (u32 i = 0; i < 4; i++) queries[quad / (DIM / 4)][column + i] = x[i];
            }
            if (threadIdx.x < HEADS) {
                weights[threadIdx.x] = weight_of(args, run.token, first + threadIdx.x);
            }
            __syncthreads();
            // A key that is not there has an address all the same; its logit is not stored.
            float scores[HEADS] = {};
#pragma unroll 1
            for (u32 column = 0; column < DIM; column += 4) {
                float k[4];
                read_quad(at + (u64)column * key_bytes, KEY, k);
#pragma unroll
                for (u32 h = 0; h < HEADS; h++) {
#pragma unroll
                    for (u32 i = 0; i < 4; i++) scores[h] = fmaf(k[i], queries[h][column + i], scores[h]);
                }
            }
#pragma unroll
            for (u32 h = 0; h < HEADS; h++) {
                // Not by a weight of 0: the product of that and an infinity is NaN.
                sum = first + h < args.num_heads ? fmaf(weights[h], relu(scores[h]), sum) : sum;
            }
        }
        if (place.is_there) {
            float scale = 1.0f;
            if (KEY == CODES) {
                scale = __uint_as_float(read_4(place.page + (u64)args.page_size * DIM + 4 * place.token));
            }
            store_logit(args, run, key, __float_as_uint(scale * sum));
        }
    }
    fill<THREADS>(args, run);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) indexer_logits_simple_f32(const Args args) { score<F32_ELEMENTS>(args); }

extern "C" __global__ void __launch_bounds__(THREADS, 4) indexer_logits_simple_f16(const Args args) { score<F16_ELEMENTS>(args); }

extern "C" __global__ void __launch_bounds__(THREADS, 4) indexer_logits_simple_bf16(const Args args) { score<BF16_ELEMENTS>(args); }

extern "C" __global__ void __launch_bounds__(THREADS, 4) indexer_logits_simple_e4m3(const Args args) { score<CODES>(args); }
