// Logits of a lightning indexer on tensor cores: keys are the rows of a matrix, heads its columns, so that a logit is a weighted sum over
// a row, most of which a thread has itself. Variants `mma` (mma.sync, compute capability 8.0) and `wgmma` (9.0).
//
// A block takes a run, BLOCK keys at a time, 16 a warp. Nothing is shared but the queries: each lane copies the parts of keys that it
// multiplies by cp.async into places of its own, STAGES blocks ahead, and reads them back; there is no barrier in the loop. Codes become
// f16 in registers, exactly; a key's scale is applied to its sum.
//
//   for each block of keys:  scores[16, 8 * TILES] = keys x queries^T;  logit = scale * sum over columns of weight * relu(score)
//
// Which of the 128 columns a lane multiplies in which step of 16 is free, as long as keys and queries agree: a lane of a quad (4 lanes)
// has 16 consecutive bytes of a key at a time, 16 columns of codes or 8 of 16 bits, of which a step takes 4: `Key::column`.
//
// `mma` keeps queries in registers, 16 a head tile of 8; `wgmma` in shared memory, in the order of its operand, and has 16 warps on a
// multiprocessor instead of 8.
#pragma once

#include "indexer_logits.cuh"
#include "lib/tma.cuh"
#include "lib/wgmma.cuh"

constexpr int WARPS = 8;
constexpr int BLOCK = 16 * WARPS;
constexpr int STEPS = DIM / 16;

// Codes in the upper bytes of halves as f16, 2^-8 of their values, and NaN for NaN: adding 1 in the last place of NaN's seven ones carries
// into the exponent's top bit.
DEVICE u32 halves_of_codes(u32 bytes) {
    const u32 magnitude = bytes >> 1 & 0x3F803F80u;
    return (bytes & 0x80008000u) | magnitude | (magnitude + 0x00800080u & 0x40004000u);
}

// The same as bf16, of their values: the exponent's bias is 120 higher, which a multiplication makes up for.
DEVICE u32 bf16_of_codes(u32 bytes) {
    constexpr u32 TWO_TO_120 = 0x7B807B80, MINUS_ZERO = 0x80008000;
    const u32 magnitude = bytes >> 4 & 0x07F007F0u;
    const u32 nan = magnitude + 0x00100010u & 0x08000800u;
    u32 values;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(values) : "r"((bytes & 0x80008000u) | magnitude), "r"(TWO_TO_120), "r"(MINUS_ZERO));
    return values | (nan >> 4) * 0xFF;
}

// How keys and queries of a dtype are read, and widened to pairs of the 16 bits that are multiplied. `SWAPS`: the pairs of 4 consecutive
// elements are 0 and 2, 1 and 3, else 0 and 1, 2 and 3. `UNIT`: what a product has to be multiplied by.
//
// Codes as f16, or as bf16 beside bf16 queries.
template <bool BF16>
struct Codes {
    static constexpr bool IS_BF16 = BF16, HAS_SCALES = true, SWAPS = BF16 || !CONVERTS_E4M3;
    static constexpr int BYTES = 1, CHUNKS = 2; // of 16 bytes, of a key that a lane has
    static constexpr int STAGES = 4;
    static constexpr float UNIT = SWAPS && !BF16 ? 256.0f : 1.0f;
    using Quad = u32;

    static DEVICE Quad read(u64 at) { return read_4(at); }

    static DEVICE void widen(Quad codes, u32& first, u32& second) {
        if constexpr (BF16) {
            first = bf16_of_codes(codes << 8);
            second = bf16_of_codes(codes);
        } else if constexpr (SWAPS) {
            first = halves_of_codes(codes << 8);
            second = halves_of_codes(codes);
        } else {
            asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(first), "=r"(second) : "r"(codes));
        }
    }

    // The pairs of a step from a lane's chunks of a key.
    static DEVICE void of_step(const u32 (&chunks)[CHUNKS][4], int step, u32& first, u32& second) { widen(chunks[step / 4][step % 4], first, second); }

    // The first of the 4 columns that a lane of a quad multiplies in a step.
    static DEVICE u32 column(int step, u32 lane) { return step / 4 * 64 + lane * 16 + step % 4 * 4; }
};

template <bool BF16>
struct Halves {
    static constexpr bool IS_BF16 = BF16, HAS_SCALES = false, SWAPS = false;
    static constexpr int BYTES = 2, CHUNKS = 4;
    static constexpr int STAGES = 3;
    static constexpr float UNIT = 1.0f;
    using Quad = uint2;

    static DEVICE Quad read(u64 at) { return read_8(at); }

    static DEVICE void widen(Quad words, u32& first, u32& second) { first = words.x, second = words.y; }

    static DEVICE void of_step(const u32 (&chunks)[CHUNKS][4], int step, u32& first, u32& second) {
        first = chunks[step / 2][step % 2 * 2], second = chunks[step / 2][step % 2 * 2 + 1];
    }

    static DEVICE u32 column(int step, u32 lane) { return step / 2 * 32 + lane * 8 + step % 2 * 4; }
};

// The pairs of a query, in the order of those of a key.
template <class Key, class Query>
DEVICE void query_pairs(typename Query::Quad quad, u32& first, u32& second) {
    Query::widen(quad, first, second);
    if constexpr (Key::SWAPS != Query::SWAPS) {
        const u32 low = __byte_perm(first, second, 0x5410), high = __byte_perm(first, second, 0x7632);
        first = low, second = high;
    }
}

// Bytes of shared memory for the copies of all warps.
template <class Key>
constexpr int ring_bytes() {
    // Chunks of a lane's two keys, and a scale.
    return WARPS * Key::STAGES * LANES * (2 * Key::CHUNKS * 16 + 4);
}

// Where a warp copies keys to: [STAGES][2 CHUNKS][lanes] of 16 bytes, then [STAGES][lanes] scales.
template <class Key>
struct Ring {
    static constexpr int STAGE = 2 * Key::CHUNKS * LANES * 16;
    u32 chunks, scales;

    DEVICE Ring(u32 begin, u32 warp, u32 lane) {
        chunks = begin + warp * Key::STAGES * STAGE + lane * 16;
        scales = begin + WARPS * Key::STAGES * STAGE + (warp * Key::STAGES * LANES + lane) * 4;
    }

    // Begins to copy what this lane multiplies of the keys `key` and `key + 8`, and the scale of the one whose logit it stores. Returns
    // whether that one is there.
    DEVICE bool copy(const Args& args, const Run& run, int stage, u32 key, const u32 (&pages)[2], u32 quad_lane) const {
        bool stores = false;
        const u32 to = chunks + stage * STAGE;
        u64 scale_at = args.kv;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const KeyPlace place = place_on(args, run, key + 8 * half, pages[half]);
            const u64 at = place.page + (u64)(place.token * (DIM * Key::BYTES) + quad_lane * 16);
#pragma unroll
            for (int i = 0; i < Key::CHUNKS; i++) {
                const u32 chunk = to + (half * Key::CHUNKS + i) * LANES * 16;
                const u8* from = global_pointer<const u8>(at + i * 64);
                if (!Key::HAS_SCALES || args.is_wide) {
                    copy_16(chunk, from, place.is_there);
                } else {
#pragma unroll
                    for (int word = 0; word < 4; word++) copy_4(chunk + 4 * word, from + 4 * word, place.is_there);
                }
            }
            if (quad_lane == half) {
                stores = place.is_there;
                scale_at = place.page + (u64)args.page_size * DIM + 4 * place.token;
            }
        }
        if constexpr (Key::HAS_SCALES) {
            copy_4(scales + stage * LANES * 4, global_pointer<const u8>(scale_at), stores);
        }
        return stores;
    }
};

// Queries in registers, for mma.sync.
template <class Key, class Query, int TILES>
struct KeptQueries {
    static constexpr int SHARED_BYTES = 0;
    u32 pairs[STEPS][TILES][2];

    DEVICE void load(const Args& args, const Run& run, u32) {
        const u32 group = threadIdx.x % LANES / 4, quad_lane = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const u32 head = n * 8 + group;
            const u64 at = args.q + run.token * args.q_token_stride + min(head, args.num_heads - 1) * args.q_head_stride;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                query_pairs<Key, Query>(Query::read(at + Key::column(step, quad_lane) * Query::BYTES), pairs[step][n][0], pairs[step][n][1]);
            }
        }
    }

    DEVICE void multiply(float (&sums)[TILES][4], const u32 (&keys)[2][Key::CHUNKS][4]) const {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            u32 a[4];
            Key::of_step(keys[0], step, a[0], a[2]);
            Key::of_step(keys[1], step, a[1], a[3]);
#pragma unroll
            for (int n = 0; n < TILES; n++) multiply_16_bit<Query::IS_BF16>(sums[n], a, pairs[step][n][0], pairs[step][n][1]);
        }
    }
};

// Queries in shared memory, for wgmma: two halves of 64 columns, rows of 128 bytes, swizzled.
template <class Key, class Query, int TILES>
struct SharedQueries {
    static constexpr int HALF = TILES * 8 * 128;
    static constexpr int SHARED_BYTES = 2 * HALF;
    u32 begin;

    DEVICE void load(const Args& args, const Run& run, u32 to) {
        begin = to;
        // A lane's quads of a head's steps, as a lane of a quad multiplies them.
        for (u32 item = threadIdx.x; item < TILES * 8 * STEPS * 4; item += WARPS * LANES) {
            const u32 head = item / (STEPS * 4), step = item / 4 % STEPS, quad_lane = item % 4;
            const u64 at = args.q + run.token * args.q_token_stride + min(head, args.num_heads - 1) * args.q_head_stride;
            u32 first, second;
            query_pairs<Key, Query>(Query::read(at + Key::column(step, quad_lane) * Query::BYTES), first, second);
            const u32 row = to + step / 4 * HALF + head * 128, chunk = step % 4 * 2;
            store_4(row + (chunk ^ head % 8) * 16 + quad_lane * 4, first);
            store_4(row + ((chunk + 1) ^ head % 8) * 16 + quad_lane * 4, second);
        }
        fence_proxy_async();
        __syncthreads();
    }

    DEVICE void multiply(float (&sums)[TILES][4], const u32 (&keys)[2][Key::CHUNKS][4]) const {
        u32 a[STEPS][4];
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            Key::of_step(keys[0], step, a[step][0], a[step][2]);
            Key::of_step(keys[1], step, a[step][1], a[step][3]);
        }
        begin_multiplications(sums);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            multiply_columns<Query::IS_BF16>(sums, a[step], matrix_at(begin + step / 4 * HALF) + step % 4 * 2, step > 0);
        }
        end_of_multiplications(sums);
        wgmma_wait<0>();
        pin(sums);
    }
};

// Adds the weighted scores of a lane's heads to the logits of its two keys.
template <int TILES>
DEVICE void add_heads(float (&logits)[2], const float (&weights)[TILES][2], const float (&sums)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) logits[i / 2] = fmaf(weights[n][i % 2], relu(sums[n][i]), logits[i / 2]);
    }
}

template <class Key, class Query, int TILES, template <class, class, int> class Queries>
DEVICE void score(const Args& args) {
    extern __shared__ __align__(1024) u8 shared[];
    Run run;
    griddep_wait();
    if (!run_of_block(args, run)) return;
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, group = lane / 4, quad_lane = lane % 4;
    if (run.begin < run.end) {
        const Ring<Key> ring(shared_address(shared) + Queries<Key, Query, TILES>::SHARED_BYTES, warp, lane);
        const u32 first = run.begin + warp * 16 + group; // the first of this lane's keys
        u32 pages[2] = {page_of(args, run, first), page_of(args, run, first + 8)};
        u32 stores = 0; // a bit a stage: whether this lane stores a logit
#pragma unroll
        for (int stage = 0; stage < Key::STAGES - 1; stage++) {
            const u32 key = first + stage * BLOCK;
            stores |= static_cast<u32>(ring.copy(args, run, stage, key, pages, quad_lane)) << stage;
            cp_async_commit();
            pages[0] = page_of(args, run, key + BLOCK), pages[1] = page_of(args, run, key + BLOCK + 8);
        }
        Queries<Key, Query, TILES> queries;
        queries.load(args, run, shared_address(shared));
        float weights[TILES][2];
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) weights[n][i] = weight_of(args, run.token, n * 8 + quad_lane * 2 + i);
        }
        int stage = 0;
#pragma unroll 1
        for (u32 key = first; key - first + run.begin < run.end; key += BLOCK) {
            cp_async_wait<Key::STAGES - 2>();
            u32 keys[2][Key::CHUNKS][4];
#pragma unroll
            for (int i = 0; i < 2 * Key::CHUNKS; i++) load_16(keys[i / Key::CHUNKS][i % Key::CHUNKS], ring.chunks + stage * Ring<Key>::STAGE + i * LANES * 16);
            float scale = Key::UNIT * Query::UNIT;
            if constexpr (Key::HAS_SCALES) scale *= __uint_as_float(load_4(ring.scales + stage * LANES * 4));
            const bool stores_now = stores >> stage & 1;

            const int free = stage == 0 ? Key::STAGES - 1 : stage - 1;
            const u32 ahead = key + (Key::STAGES - 1) * BLOCK;
            const bool stores_ahead = ring.copy(args, run, free, ahead, pages, quad_lane);
            cp_async_commit();
            stores = stores & ~(1u << free) | static_cast<u32>(stores_ahead) << free;
            pages[0] = page_of(args, run, ahead + BLOCK), pages[1] = page_of(args, run, ahead + BLOCK + 8);

            float sums[TILES][4] = {};
            queries.multiply(sums, keys);
            float logits[2] = {0.0f, 0.0f}; // of key and key + 8
            if (args.num_heads == TILES * 8) {
                add_heads(logits, weights, sums);
            } else {
                // Heads past the last are not left out by a weight of 0: the product of that and an infinity is NaN.
#pragma unroll
                for (int n = 0; n < TILES; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) sums[n][i] = n * 8 + quad_lane * 2 + i % 2 < args.num_heads ? sums[n][i] : 0.0f;
                }
                add_heads(logits, weights, sums);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                logits[half] += __shfl_xor_sync(~0u, logits[half], 1);
                logits[half] += __shfl_xor_sync(~0u, logits[half], 2);
            }
            if (stores_now) {
                store_logit(args, run, key + 8 * quad_lane, __float_as_uint(scale * (quad_lane == 0 ? logits[0] : logits[1])));
            }
            stage = stage + 1 == Key::STAGES ? 0 : stage + 1;
        }
        cp_async_wait<0>();
    }
    fill<WARPS * LANES>(args, run);
}
