// Index keys of new tokens into the index cache: LayerNorm, RoPE, the Hadamard rotation, quantisation, a scatter by slot.
//
//   for token of the table: slot = slots[token]; skip if NO_SLOT
//     x = (k[token] - mean) / (variance + eps)^1/2 * weight + bias; x and scale by index_row.cuh
//     kv[slot / page_size] codes [slot % page_size] = x / scale; scales [slot % page_size] = scale
//
// Tile: a token a warp. The grid covers max_tokens, so that a captured launch serves every table that fits: warps past its tokens leave
// early.

// limits: indexer_append_* registers=40 threads=128

#include "index_row.cuh"

#define THREADS 128u

struct Args {
    IndexArgs index;
    u64 k;           // [max_tokens, 128], strided
    u64 norm_weight; // f32 [128]
    u64 norm_bias;   // f32 [128]
    u64 kv;          // [num_pages] of [page_size, 128], then f32 scales [page_size] of codes; the layer's first page, pages strided
    u64 table;       // u32 [1 + max_tokens] num_tokens, then slots
    u64 k_stride;    // bytes, as the other stride
    u64 block_stride;
    float norm_eps;
    u32 max_tokens; // tokens that table and keys hold
    u32 num_slots;  // of the slab that is written
    u32 first_slot; // of that slab; 0 where it is the whole pool
    u32 page_size;
    u32 reserved;
    Divisor by_page_size;
};

__device__ __forceinline__ float4 normalised(const Args &args, float4 x, float4 weight, float4 bias) {
    float mean = row_sum(x.x + x.y + (x.z + x.w)) * 0x1p-7f;
    x = make_float4(x.x - mean, x.y - mean, x.z - mean, x.w - mean);
    float variance = row_sum(x.x * x.x + x.y * x.y + (x.z * x.z + x.w * x.w)) * 0x1p-7f;
    float factor = __fdiv_rn(1.0f, __fsqrt_rn(variance + args.norm_eps));
    return make_float4(x.x * factor * weight.x + bias.x, x.y * factor * weight.y + bias.y, x.z * factor * weight.z + bias.z,
                       x.w * factor * weight.w + bias.w);
}

template <bool CODES>
__device__ __forceinline__ void append(const Args &args) {
    u32 item = blockIdx.x * THREADS + threadIdx.x, token = item / 32, lane = item % 32;
    griddep_launch();
    griddep_wait();
    if (token >= args.max_tokens) {
        return;
    }
    // All that does not depend on the slot is loaded before num_tokens and the slot are known, to overlap their latency.
    u32 num_tokens = read_4(args.table);
    u32 slot = read_4(args.table + 4ull + 4ull * token) - args.first_slot;
    Angles angles = {};
    if (args.index.rope != 0) {
        angles = angles_at(args.index, args.index.positions + 4ull * token, lane);
    }
    float4 x = quad_of(args.k + token * args.k_stride, lane, args.index.input);
    float4 weight = float4_at(args.norm_weight + lane * 16), bias = float4_at(args.norm_bias + lane * 16);
    // NO_SLOT and slots of other slabs fail this test. The host checked the slots; the bound also covers a table made for a larger pool.
    if (token >= num_tokens || slot >= args.num_slots) {
        return;
    }
    bool is_finite = row_is_finite(x);
    x = rotated(args.index, normalised(args, x, weight, bias), angles, lane);
    u32 page = divide(slot, args.by_page_size), offset = slot - page * args.page_size;
    u64 to = args.kv + page * args.block_stride;
    if constexpr (CODES) {
        float scale = scale_of(args.index, x);
        store_part<true>(args.index, to + offset * 128ull, lane, x, scale, is_finite);
        if (lane == 0) {
            store_4(to + args.page_size * 128ull + offset * 4ull, is_finite ? __float_as_uint(scale) : NAN_BITS);
        }
    } else {
        store_part<false>(args.index, to + (u64)offset * (32 * quad_bytes(args.index.output)), lane, x, 1.0f, is_finite);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) indexer_append_codes(const Args args) { append<true>(args); }
extern "C" __global__ void __launch_bounds__(THREADS) indexer_append_elements(const Args args) { append<false>(args); }
