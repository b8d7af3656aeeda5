// Split-KV MLA decode without tensor cores, in f32: variant `simple`, for f32 caches and for cards that no other variant fits.
//
//   for token of the item: logit = scale * q . kv[token]; online softmax; out += weight * kv[token][:L]
//
// Tile: up to 8 query rows a block, one warp a row, one token at a time; the cache is read in place. The same work items and tables as
// shaders/mla_decode.wgsl.
#include "decode/mla.cuh"

constexpr int ROWS = 8;

// limits: mla_decode_* registers=128 threads=256

template <Dtype CACHE>
DEVICE float2 cache_pair(const u8* row, u32 column) {
    if constexpr (CACHE == F32) {
        return *reinterpret_cast<const float2*>(row + column * 4);
    } else if constexpr (CACHE == E4M3) {
        const u16 codes = *reinterpret_cast<const u16*>(row + column);
        return make_float2(e4m3_to_float(static_cast<u8>(codes)), e4m3_to_float(static_cast<u8>(codes >> 8)));
    } else {
        const u32 word = *reinterpret_cast<const u32*>(row + column * 2);
        const u16 first = static_cast<u16>(word), second = static_cast<u16>(word >> 16);
        if constexpr (CACHE == F16) return make_float2(f16_to_float(first), f16_to_float(second));
        return make_float2(bf16_to_float(first), bf16_to_float(second));
    }
}

// Masked tokens are not read. A lane has two consecutive columns of every 64.
template <int LATENT, int ROPE, Dtype CACHE>
DEVICE void decode(const Args& args) {
    constexpr int BYTES = bytes_of(CACHE), DIM = LATENT + ROPE, PAIRS = (DIM + 63) / 64, VALUE_PAIRS = LATENT / 64;
    if (blockIdx.x >= args.header->num_items) return;
    const WorkItem item = args.items[blockIdx.x];
    const u32 row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    if (row >= item.num_rows) return;
    const u32 index = item.first_row + row, head = index % args.num_heads;
    const QueryToken query = args.queries[index / args.num_heads];
    const u32 token = bound_token(args, query.token);
    const u32 query_bytes = args.query_dtype == F32 ? 4 : args.query_dtype == E4M3 ? 1 : 2;
    const u8* nope = args.q_nope + (token * args.q_nope_token_stride + head * args.q_nope_head_stride) * query_bytes;
    const u8* pe = args.q_pe + (token * args.q_pe_token_stride + head * args.q_pe_head_stride) * query_bytes;
    float2 q[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const u32 column = i * 64 + lane * 2;
        q[i] = make_float2(0.0f, 0.0f);
        if (column >= DIM) break;
        const u8* part = column < LATENT ? nope : pe;
        const u32 at = column < LATENT ? column : column - LATENT;
        q[i] = make_float2(element(part, args.query_dtype, at), element(part, args.query_dtype, at + 1));
    }

    const u32 page_size = args.page_size, num_pages = args.num_pages;
    const u32 end = min(query.visible, item.kv_end);
    float top = EMPTY, sum = 0.0f;
    float2 out[VALUE_PAIRS] = {};
    for (u32 at = item.kv_begin; at < end; at++) {
        const u32 page = at / page_size;
        u32 id = args.pages[item.page_begin + page];
        if (args.clamp_pages) id = min(id, num_pages - 1);
        const u64 first = id * args.kv_block_stride + static_cast<u64>(at - page * page_size) * DIM;
        const u8* key = args.kv + first * BYTES;
        float2 k[PAIRS];
        float logit = 0.0f;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const u32 column = i * 64 + lane * 2;
            k[i] = make_float2(0.0f, 0.0f);
            if (column >= DIM) break;
            k[i] = cache_pair<CACHE>(key, column);
            logit = fmaf(q[i].x, k[i].x, fmaf(q[i].y, k[i].y, logit));
        }
#pragma unroll
        for (int lanes = 1; lanes < LANES; lanes *= 2) logit += __shfl_xor_sync(~0u, logit, lanes);
        logit *= args.logit_scale;
        if (logit > top) {
            const float factor = exp2_fast(top - logit);
            sum *= factor;
#pragma unroll
            for (int i = 0; i < VALUE_PAIRS; i++) out[i] = make_float2(out[i].x * factor, out[i].y * factor);
            top = logit;
        }
        const float weight = exp2_fast(logit - top);
        sum += weight;
#pragma unroll
        for (int i = 0; i < VALUE_PAIRS; i++) out[i] = make_float2(fmaf(weight, k[i].x, out[i].x), fmaf(weight, k[i].y, out[i].y));
    }

    const bool any = !(sum == 0.0f); // NaN too
    const float factor = any ? 1.0f / sum : 1.0f, base_2 = any ? top + log2_fast(sum) : EMPTY;
    float* partial = args.partials + (static_cast<u64>(item.partial) + row) * (LATENT + 4);
#pragma unroll
    for (int i = 0; i < VALUE_PAIRS; i++) {
        const u32 column = i * 64 + lane * 2;
        if (item.partial == DIRECT) {
            store_out(args, token, head, column, out[i].x * factor, out[i].y * factor);
        } else {
            *reinterpret_cast<float2*>(partial + column) = make_float2(out[i].x * factor, out[i].y * factor);
        }
    }
    if (lane == 0) {
        if (item.partial == DIRECT) {
            store_lse(args, token, head, base_2, any);
        } else {
            partial[LATENT] = base_2;
        }
    }
}

#define DECODE(name, ...) \
    extern "C" __global__ void __launch_bounds__(ROWS * LANES, 2) name(const __grid_constant__ Args args) { decode<__VA_ARGS__>(args); }
#define DECODES(name, CACHE) \
    DECODE(mla_decode_##name##_512_64, 512, 64, CACHE) \
    DECODE(mla_decode_##name##_256_64, 256, 64, CACHE) \
    DECODE(mla_decode_##name##_256_32, 256, 32, CACHE) \
    DECODE(mla_decode_##name##_512_0, 512, 0, CACHE)

DECODES(f32, F32)
DECODES(f16, F16)
DECODES(bf16, BF16)
DECODES(e4m3, E4M3)
