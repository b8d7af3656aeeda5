// The arguments and tables of mla_decode and mla_merge, and accessors. The host's twins: src/cuda/decode/args.rs, src/plan.rs and
// src/tables.rs, compared by src/cuda/manifest_test.rs.
#pragma once

#include "lib/divisor.cuh"
#include "lib/ptx.cuh"
#include "lib/row_end.cuh"

constexpr u32 DIRECT = 0xFFFFFFFFu; // `partial` of an item that writes `out` itself: its rows have one split
constexpr float EMPTY = -1.0e38f; // finite sentinel for the maximum, and the LSE -inf, of a row that attends to no key
#define NO_WEIGHT __uint_as_float(0xFF800000u) // -inf: the maximum of a split whose keys all have the logit -inf
// Lazy rescaling (FlashAttention-4): a row's running maximum moves only when it grew by more than this, in base 2.
constexpr float LAZY = 12.0f;
constexpr u32 NAN_BITS = 0x7FC00000u;
#define NOT_A_NUMBER __uint_as_float(NAN_BITS)

enum Dtype : u32 { F32, F16, BF16, E4M3 };

// How the cache may be copied: tokens are aligned to 8 bytes, or to 16, or the binding has a TMA map of boxes.
enum Copying : u32 { CHUNKS_8, CHUNKS_16, BOXES };

struct WorkItem {
    u32 first_row, num_rows, page_begin, kv_begin, kv_end, partial, pool, reserved;
};

struct QueryToken {
    u32 token, visible;
};

struct Merge {
    u32 token, begin, end;
};

// The front of the tables.
struct Header {
    u32 num_items, num_merges, page_size, num_pages;
};

// One step and one layer. Strides count elements.
struct Args {
    const Header* header; // [1]
    const WorkItem* items; // [num_items], room for the grid's blocks
    const QueryToken* queries; // [total_q]
    const Merge* merges; // [num_merges]
    const u32* merge_partials; // [num_partials] indices, those of a merge consecutive
    const u32* pages; // [num_words] page ids, those of a sequence consecutive; where tokens are listed, i32 [total_q, topk] slots
    const u32* topk_lengths; // i32 [total_q], how many entries of a list count; null: all
    const float* sinks; // [H], a base-2 logit of each head that has no value; null: none
    float* partials; // [partials, L + 4] a query row's weighted sum of latents, the maximum and the sum of its weights (store_weight), padding
    const u8* q_nope; // [total_q, H, L]
    const u8* q_pe; // [total_q, H, R]
    const u8* kv; // [num_pages, page_size, L + R], the layer's first page
    u8* out; // [total_q, H, L]
    float* lse; // [total_q, H]
    u64 q_nope_token_stride, q_nope_head_stride;
    u64 q_pe_token_stride, q_pe_head_stride;
    u64 kv_block_stride;
    u64 out_token_stride, out_head_stride;
    u64 lse_token_stride, lse_head_stride;
    u64 topk_length_stride;
    float logit_scale; // softmax_scale * q_scale * k_scale * log2(e)
    float out_scale; // k_scale: the value is the latent
    float lse_scale; // base-2 LSE to the base asked for
    u32 num_heads;
    u32 max_queries; // query tokens that q, out and lse hold, at least 1
    u32 query_dtype, out_dtype;
    u32 copies; // a Copying
    u32 clamp_pages; // whether page ids may lie outside the pool
    u32 page_size;
    u32 num_pages;
    u32 tile_pages, tile_rest; // a tile's tokens / page_size, and % page_size; where tokens are listed, a tile's tokens, and 0
    u32 multiprocessors;
    u32 is_listed; // whether tokens are listed by slots
    u32 list_stride; // from a list to the next
    u32 first_slot, num_slots; // of the pool's slots, those that this cache has
    Divisor by_page_size;
};

__host__ __device__ constexpr int bytes_of(Dtype dtype) {
    return dtype == F32 ? 4 : dtype == E4M3 ? 1 : 2;
}

// An element of a query as f32.
DEVICE float element(const u8* row, u32 dtype, u32 column) {
    switch (dtype) {
        case F32: return reinterpret_cast<const float*>(row)[column];
        case F16: return f16_to_float(reinterpret_cast<const u16*>(row)[column]);
        case BF16: return bf16_to_float(reinterpret_cast<const u16*>(row)[column]);
        default: return e4m3_to_float(row[column]);
    }
}

// A step prepared again after its graph was captured may have more query tokens than the binding's buffers, which no host check can see:
// the clamp keeps accesses inside q, out and lse.
DEVICE u32 bound_token(const Args& args, u32 token) {
    return min(token, args.max_queries - 1);
}

// A page id that is safe to follow. The host checks its own page lists; those written on the device are clamped.
DEVICE u32 bound_page(const Args& args, u32 id) {
    return args.clamp_pages ? min(id, args.num_pages - 1) : id;
}

// Where the rows of an item are stored: in `out`, in its dtype and times its scale, or in the partial results as they are. Rows begin at
// multiples of 16 bytes.
struct Destination {
    bool is_direct;
    u32 dtype;
    float scale;

    DEVICE Destination(const Args& args, const WorkItem& item) : Destination(args, item.partial == DIRECT) {}
    DEVICE Destination(const Args& args, bool is_direct) : is_direct(is_direct), dtype(is_direct ? args.out_dtype : F32), scale(is_direct ? args.out_scale : 1.0f) {}

    // The row of an item, of a token and a head.
    template <int LATENT>
    DEVICE u8* row(const Args& args, const WorkItem& item, u32 row, u32 token, u32 head) const {
        if (is_direct) return out_row(args, token, head);
        return reinterpret_cast<u8*>(args.partials + (static_cast<u64>(item.partial) + row) * (LATENT + 4));
    }

    DEVICE u8* out_row(const Args& args, u32 token, u32 head) const {
        return args.out + (token * args.out_token_stride + head * args.out_head_stride) * (dtype == F32 ? 4 : 2);
    }

    // Stores two consecutive elements of a row; `column` is even.
    DEVICE void store(u8* row, u32 column, float first, float second) const {
        first *= scale;
        second *= scale;
        if (dtype == F32) {
            reinterpret_cast<float2*>(row)[column / 2] = make_float2(first, second);
        } else {
            reinterpret_cast<u32*>(row)[column / 2] = dtype == F16 ? pack_f16(first, second) : pack_bf16(first, second);
        }
    }

    // The same for four; `column` is a multiple of 4.
    DEVICE void store(u8* row, u32 column, float4 x) const {
        x = make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale);
        if (dtype == F32) {
            reinterpret_cast<float4*>(row)[column / 4] = x;
        } else {
            const bool is_f16 = dtype == F16;
            reinterpret_cast<uint2*>(row)[column / 4] = make_uint2(is_f16 ? pack_f16(x.x, x.y) : pack_bf16(x.x, x.y), is_f16 ? pack_f16(x.z, x.w) : pack_bf16(x.z, x.w));
        }
    }
};

// Stores two consecutive elements of an output row; `column` is even.
DEVICE void store_out(const Args& args, u32 token, u32 head, u32 column, float first, float second) {
    const u64 at = token * args.out_token_stride + head * args.out_head_stride + column;
    first *= args.out_scale;
    second *= args.out_scale;
    switch (args.out_dtype) {
        case F32: reinterpret_cast<float2*>(args.out)[at / 2] = make_float2(first, second); break;
        case F16: reinterpret_cast<u32*>(args.out)[at / 2] = pack_f16(first, second); break;
        default: reinterpret_cast<u32*>(args.out)[at / 2] = pack_bf16(first, second);
    }
}

// What a head's attention sink adds to the sum of a row's weights, which are relative to the base-2 logit `top`. Without one it is 0, so
// that the sum keeps its bits; the LSE is without it.
DEVICE float sink_weight(const Args& args, u32 head, float top) {
    return args.sinks == nullptr ? 0.0f : exp2_fast(args.sinks[head] - top);
}

// Stores a row's LSE, given in base 2; `seen` is false for a row that attends to no key, whose LSE is -inf.
DEVICE void store_lse(const Args& args, u32 token, u32 head, float base_2, bool seen) {
    args.lse[token * args.lse_token_stride + head * args.lse_head_stride] =
        seen ? base_2 * args.lse_scale : __uint_as_float(0xFF800000u);
}

// Stores what a merge weighs a partial result by, behind its latents: `top`, the base-2 logit that its weights are relative to, and their
// sum. They stay apart, since an f32 LSE of 1e5 has no room for the log2 of the sum; the latents are not divided by the sum, so that a
// partial result that is merged with empty ones alone is divided as an item that writes `out` itself, to the same bits. `top` counts where
// the sum is not 0.
DEVICE void store_weight(float* partial, u32 latent, float top, float sum) {
    const float from = sum > 0.0f ? top : sum == 0.0f ? EMPTY : NOT_A_NUMBER;
    *reinterpret_cast<float2*>(partial + latent) = make_float2(from, sum);
}
