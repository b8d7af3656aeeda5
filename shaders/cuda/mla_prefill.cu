// Attention of a tile of query rows of one head over the keys that they see, in f32: the twin of shaders/mla_prefill.wgsl.
//
// The threads are 16 x 16: a thread owns 4 rows (`ty` says which) and, of each block of TOKENS keys, two quads of them, later CQ quads of
// columns of the output (`tx`). Everything that threads share goes through one array of shared memory, in turns:
//   1. scores   slices of DEPTH columns of queries and keys, transposed, so that a float4 is four rows, or four keys, of one column. Where
//               inputs are f32, the sums of eight columns are added up apart: large logits need all their digits
//   2. softmax  each thread's maxima; every thread then knows its rows' maxima, and keeps sums over its own keys until the end
//   3. values   slices of SLICE keys: the weights, again four rows a float4, and the values
// Keys past the last one that the tile sees repeat it and weigh 0.
//
// A grid is for max_tiles, so that a captured one serves every table that fits: blocks past its tiles leave early.

// limits: mla_prefill_f32_128 registers=176 threads=256
// limits: mla_prefill_f16_128 registers=168 threads=256
// limits: mla_prefill_bf16_128 registers=168 threads=256
// limits: mla_prefill_f32_256 registers=232 threads=256
// limits: mla_prefill_f16_256 registers=208 threads=256
// limits: mla_prefill_bf16_256 registers=208 threads=256

#include "global.cuh"
#include "round.cuh"

#define THREADS 256u
#define ROW_QUADS 16u // of a tile
#define KEY_QUADS 32u // of a block
#define TOKENS 128u
#define DEPTH 16u
#define EMPTY -1.0e38f // a finite stand-in for the -inf of a row that has seen no key

// An array [tokens, heads, dim]: address of its first element, and strides in bytes.
struct Rows {
    u64 address;
    u64 token_stride;
    u64 head_stride;
};

struct Args {
    u64 table; // u32: the number of tiles, then TILE_WORDS of each
    Rows q_nope;
    Rows q_pe;
    Rows k_nope;
    Rows k_pe;
    Rows v;
    Rows out;
    Rows lse;
    float logit_scale; // softmax_scale * log2(e)
    u32 max_tokens;    // query tokens and keys that the buffers hold, each at least 1
    u32 max_keys;
    u32 max_tiles; // for which the table has room
    u32 num_heads;
    u32 nope_quads;
    u32 rope_quads;
    u32 value_quads;
    u32 out_dtype; // 0 f32, 1 f16, 2 bf16
    u32 reserved;
};

// PrefillTile of src/prefill/plan.rs.
#define TILE_WORDS 5u

struct Tile {
    u32 head;
    u32 first_token;
    u32 num_rows;
    u32 kv_begin;
    u32 num_keys;
    int first_visible;
};

// Rows and keys past the tile's last one stand for the last. A table of another step may say more than the buffers hold: the bounds keep it
// harmless.
__device__ __forceinline__ u32 token_of(const Args &args, const Tile &tile, u32 row) {
    return min(tile.first_token + min(row, tile.num_rows - 1), args.max_tokens - 1);
}

__device__ __forceinline__ u32 key_of(const Args &args, const Tile &tile, u32 key) {
    return min(tile.kv_begin + min(key, tile.num_keys - 1), args.max_keys - 1);
}

__device__ __forceinline__ u32 visible_to(const Tile &tile, u32 row) {
    return (u32)min(max(tile.first_visible + (int)row, 0), (int)tile.num_keys);
}

// Four neighbouring elements as f32.
struct F32 {
    static const u32 BYTES = 4;
    static const bool SUMS_APART = true;
    static __device__ __forceinline__ float4 quad(u64 at) {
        uint4 x = read_16(at);
        return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
    }
};

struct F16 {
    static const u32 BYTES = 2;
    static const bool SUMS_APART = false;
    static __device__ __forceinline__ float4 quad(u64 at) {
        uint2 x = read_8(at);
        return make_float4(f32_of_f16(x.x & 0xFFFFu), f32_of_f16(x.x >> 16), f32_of_f16(x.y & 0xFFFFu), f32_of_f16(x.y >> 16));
    }
};

struct Bf16 {
    static const u32 BYTES = 2;
    static const bool SUMS_APART = false;
    static __device__ __forceinline__ float4 quad(u64 at) {
        uint2 x = read_8(at);
        return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xFFFF0000u), __uint_as_float(x.y << 16),
                           __uint_as_float(x.y & 0xFFFF0000u));
    }
};

// A quad of the row of a token or key: of the first part, of the second, or zeros behind both.
template <class In>
__device__ __forceinline__ float4 row_quad(const Args &args, const Rows &nope, const Rows &pe, u32 head, u32 row, u32 quad) {
    if (quad < args.nope_quads) {
        return In::quad(nope.address + row * nope.token_stride + head * nope.head_stride + quad * (4 * In::BYTES));
    }
    quad -= args.nope_quads;
    if (quad < args.rope_quads) {
        return In::quad(pe.address + row * pe.token_stride + head * pe.head_stride + quad * (4 * In::BYTES));
    }
    return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// Four columns of four rows, turned around.
__device__ __forceinline__ void stage_turned(float4 *to, u32 pitch, const float4 *x) {
    to[0] = make_float4(x[0].x, x[1].x, x[2].x, x[3].x);
    to[pitch] = make_float4(x[0].y, x[1].y, x[2].y, x[3].y);
    to[2 * pitch] = make_float4(x[0].z, x[1].z, x[2].z, x[3].z);
    to[3 * pitch] = make_float4(x[0].w, x[1].w, x[2].w, x[3].w);
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float &at(float4 &x, u32 i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// sum += x * y, four rows.
__device__ __forceinline__ void add_product(float4 &sum, const float4 &x, float y) {
    sum.x = fmaf(x.x, y, sum.x);
    sum.y = fmaf(x.y, y, sum.y);
    sum.z = fmaf(x.z, y, sum.z);
    sum.w = fmaf(x.w, y, sum.w);
}

// CQ: quads of columns of a thread, for V up to 64 * CQ. SLICE: keys whose values are staged at a time.
template <class In, u32 CQ, u32 SLICE>
__device__ __forceinline__ void prefill(const Args &args) {
    const u32 VALUE_QUADS = 16 * CQ; // of a row of staged values, the columns past V zeros
    const u32 SLICES_AT = SLICE * (ROW_QUADS + VALUE_QUADS), SCORES_AT = DEPTH * (ROW_QUADS + KEY_QUADS);
    __shared__ float4 staged[SLICES_AT > SCORES_AT ? SLICES_AT : SCORES_AT];
    let_next_kernel_begin();
    wait_for_kernel_before();
    u32 number = blockIdx.x;
    u32 index = number / args.num_heads;
    if (index >= args.max_tiles || index >= read_4(args.table)) {
        return;
    }
    u64 words = args.table + 4ull + 4ull * TILE_WORDS * index;
    Tile tile;
    tile.head = number % args.num_heads;
    tile.first_token = read_4(words);
    tile.num_rows = read_4(words + 4);
    tile.kv_begin = read_4(words + 8);
    tile.num_keys = read_4(words + 12);
    tile.first_visible = (int)read_4(words + 16);

    // Eight by four of them side by side, so that a warp reads few different places of `staged` at once.
    u32 lane = threadIdx.x;
    u32 tx = lane % 8 + lane / 32 % 2 * 8;
    u32 ty = lane / 8 % 4 + lane / 64 * 4;
    u32 visible[4];
    float row_max[4], row_sum[4]; // the sum is over this thread's keys only
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        visible[i] = visible_to(tile, ty * 4 + i);
        row_max[i] = EMPTY;
        row_sum[i] = 0.0f;
    }
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 acc[4 * CQ]; // four rows of a column
#pragma unroll
    for (u32 c = 0; c < 4 * CQ; c++) {
        acc[c] = zero;
    }
    u32 slices = (args.nope_quads + args.rope_quads + DEPTH / 4 - 1) / (DEPTH / 4);

#pragma unroll 1
    for (u32 block = 0; block < tile.num_keys; block += TOKENS) {
        // 1. scores
        float4 score[8]; // four rows of a key
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            score[k] = zero;
        }
#pragma unroll 1
        for (u32 slice = 0; slice < slices; slice++) {
            __syncthreads();
            // Neighbours take neighbouring rows: what they store lies side by side.
            for (u32 i = lane; i < (ROW_QUADS + KEY_QUADS) * (DEPTH / 4); i += THREADS) {
                float4 x[4];
                if (i < ROW_QUADS * (DEPTH / 4)) {
                    u32 row = i % ROW_QUADS * 4, column = i / ROW_QUADS;
#pragma unroll
                    for (u32 r = 0; r < 4; r++) {
                        x[r] = row_quad<In>(args, args.q_nope, args.q_pe, tile.head, token_of(args, tile, row + r), slice * (DEPTH / 4) + column);
                    }
                    stage_turned(staged + column * 4 * ROW_QUADS + row / 4, ROW_QUADS, x);
                } else {
                    u32 k = i - ROW_QUADS * (DEPTH / 4);
                    u32 row = k % KEY_QUADS * 4, column = k / KEY_QUADS;
#pragma unroll
                    for (u32 r = 0; r < 4; r++) {
                        x[r] = row_quad<In>(args, args.k_nope, args.k_pe, tile.head, key_of(args, tile, block + row + r), slice * (DEPTH / 4) + column);
                    }
                    stage_turned(staged + DEPTH * ROW_QUADS + column * 4 * KEY_QUADS + row / 4, KEY_QUADS, x);
                }
            }
            __syncthreads();
#pragma unroll 1
            for (u32 d = 0; d < DEPTH; d += 8) {
                float4 before[8];
                if (In::SUMS_APART) {
#pragma unroll
                    for (u32 k = 0; k < 8; k++) {
                        before[k] = score[k];
                        score[k] = zero;
                    }
                }
#pragma unroll
                for (u32 e = 0; e < 8; e++) {
                    float4 query = staged[(d + e) * ROW_QUADS + ty];
#pragma unroll
                    for (u32 k = 0; k < 2; k++) {
                        float4 key = staged[DEPTH * ROW_QUADS + (d + e) * KEY_QUADS + k * 16 + tx];
                        add_product(score[4 * k], query, key.x);
                        add_product(score[4 * k + 1], query, key.y);
                        add_product(score[4 * k + 2], query, key.z);
                        add_product(score[4 * k + 3], query, key.w);
                    }
                }
                if (In::SUMS_APART) {
#pragma unroll
                    for (u32 k = 0; k < 8; k++) {
                        add_product(score[k], before[k], 1.0f);
                    }
                }
            }
        }

        // 2. softmax
        float4 tops;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float top = row_max[i];
#pragma unroll
            for (u32 k = 0; k < 8; k++) {
                bool seen = block + (k / 4 * 16 + tx) * 4 + k % 4 < visible[i];
                top = fmaxf(top, seen ? at(score[k], i) * args.logit_scale : EMPTY);
            }
            at(tops, i) = top;
        }
        __syncthreads();
        staged[ty * 16 + tx] = tops;
        __syncthreads();
#pragma unroll
        for (u32 x = 0; x < 16; x++) {
            float4 other = staged[ty * 16 + x];
            tops = make_float4(fmaxf(tops.x, other.x), fmaxf(tops.y, other.y), fmaxf(tops.z, other.z), fmaxf(tops.w, other.w));
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float top = at(tops, i);
            // An unchanged maximum rescales by exactly 1, as 2^0 is.
            float factor = exp2_fast(row_max[i] - top);
            row_max[i] = top;
            row_sum[i] *= factor;
#pragma unroll
            for (u32 c = 0; c < 4 * CQ; c++) {
                at(acc[c], i) *= factor;
            }
#pragma unroll
            for (u32 k = 0; k < 8; k++) {
                bool seen = block + (k / 4 * 16 + tx) * 4 + k % 4 < visible[i];
                // The product is not rounded before the subtraction: large logits lose nothing more than the dot has lost.
                float weight = seen ? exp2_fast(fmaf(at(score[k], i), args.logit_scale, -top)) : 0.0f;
                at(score[k], i) = weight;
                row_sum[i] += weight;
            }
        }

        // 3. values
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
#pragma unroll 1
            for (u32 part = 0; part < 64 / SLICE; part++) {
                __syncthreads();
                if (tx / (SLICE / 4) == part) {
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        staged[(tx % (SLICE / 4) * 4 + i) * ROW_QUADS + ty] = score[4 * k + i];
                    }
                }
                for (u32 i = lane; i < SLICE * VALUE_QUADS; i += THREADS) {
                    u32 quad = i % VALUE_QUADS;
                    float4 value = zero;
                    if (quad < args.value_quads) {
                        u32 key = key_of(args, tile, block + k * 64 + part * SLICE + i / VALUE_QUADS);
                        value = In::quad(args.v.address + key * args.v.token_stride + tile.head * args.v.head_stride + quad * (4 * In::BYTES));
                    }
                    staged[SLICE * ROW_QUADS + i] = value;
                }
                __syncthreads();
#pragma unroll 4
                for (u32 key = 0; key < SLICE; key++) {
                    float4 weight = staged[key * ROW_QUADS + ty];
#pragma unroll
                    for (u32 c = 0; c < CQ; c++) {
                        float4 value = staged[SLICE * ROW_QUADS + key * VALUE_QUADS + c * 16 + tx];
                        add_product(acc[4 * c], weight, value.x);
                        add_product(acc[4 * c + 1], weight, value.y);
                        add_product(acc[4 * c + 2], weight, value.z);
                        add_product(acc[4 * c + 3], weight, value.w);
                    }
                }
            }
        }
    }

    // Each row's sum, for all threads that have columns of it.
    __syncthreads();
    staged[ty * 16 + tx] = make_float4(row_sum[0], row_sum[1], row_sum[2], row_sum[3]);
    __syncthreads();
    float4 sums = zero;
#pragma unroll
    for (u32 x = 0; x < 16; x++) {
        add_product(sums, staged[ty * 16 + x], 1.0f);
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 row = ty * 4 + i;
        if (row >= tile.num_rows) {
            continue;
        }
        float sum = at(sums, i);
        bool any = sum > 0.0f;
        float factor = any ? 1.0f / sum : 0.0f;
        u64 token = token_of(args, tile, row);
        u64 out = args.out.address + token * args.out.token_stride + tile.head * args.out.head_stride;
#pragma unroll
        for (u32 c = 0; c < CQ; c++) {
            u32 quad = c * 16 + tx;
            if (quad < args.value_quads) {
                float x[4];
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    x[j] = at(acc[4 * c + j], i) * factor;
                }
                if (args.out_dtype == 0) {
                    store_16(out + quad * 16, make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])));
                } else if (args.out_dtype == 1) {
                    store_8(out + quad * 8, make_uint2(f16_pair(x[0], x[1]), f16_pair(x[2], x[3])));
                } else {
                    store_8(out + quad * 8, make_uint2(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3])));
                }
            }
        }
        if (tx == 0) {
            float lse = (row_max[i] + log2_fast(any ? sum : 1.0f)) * 0.6931471805599453f;
            store_4(args.lse.address + token * args.lse.token_stride + tile.head * args.lse.head_stride, any ? __float_as_uint(lse) : 0xFF800000u);
        }
    }
}

#define MLA_PREFILL(NAME, IN, CQ, SLICE) \
    extern "C" __global__ void __launch_bounds__(THREADS) mla_prefill_##NAME(const Args args) { prefill<IN, CQ, SLICE>(args); }

MLA_PREFILL(f32_128, F32, 2, 16)
MLA_PREFILL(f16_128, F16, 2, 16)
MLA_PREFILL(bf16_128, Bf16, 2, 16)
MLA_PREFILL(f32_256, F32, 4, 8)
MLA_PREFILL(f16_256, F16, 4, 8)
MLA_PREFILL(bf16_256, Bf16, 4, 8)
