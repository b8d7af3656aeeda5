// Merges any number of partial attention states (sets) of the same queries, as FlashInfer's merge_states and shaders/merge_states.wgsl.
//
//   top = max over sets of lse; weight = exp(lse - top), 0 where lse is -inf, +inf or NaN
//   output = sum(weight * state) / sum(weight), in the order of the sets; lse = top + ln(sum(weight))
//   one set with a weight: its bits unchanged; none: 0 and -inf
//
// Tile: one quad (4 consecutive elements) of a row a thread, where a row is a (token, head), heads first. Online: a set with a larger LSE
// rescales the sums.
//
// The grid covers max_tokens, so that a captured launch serves every range that fits: blocks past its tokens leave early.

// limits: merge_states registers=64 threads=256

#include "lib/divisor.cuh"
#include "lib/quads.cuh"

#define THREADS 256
// -inf, +inf and NaN have all bits of the exponent set.
#define EXPONENT 0x7F800000u

struct Args {
    // Set 0 of each; set_stride and lse_set_stride give the others.
    Place states; // [sets, tokens, heads, 4 * head_quads], strided
    Place lse; // f32 [sets, tokens, heads], strided
    Place output; // [tokens, heads, 4 * head_quads], strided
    Place output_lse; // f32 [tokens, heads], strided; address 0: not written
    u64 table; // u32 [3] num_tokens, first token, num_sets
    u64 set_stride; // bytes, as the next
    u64 lse_set_stride;
    u32 max_tokens;
    u32 max_sets;
    u32 num_heads;
    u32 head_quads;
    u32 dtype;
    u32 reserved;
    Divisor by_head_quads;
    Divisor by_num_heads;
};

__device__ __forceinline__ float exp_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
}

extern "C" __global__ void __launch_bounds__(THREADS) merge_states(const Args args) {
    let_next_kernel_begin();
    wait_for_kernel_before();
    u32 item = blockIdx.x * THREADS + threadIdx.x;
    u32 row = divide(item, args.by_head_quads);
    u32 quad = item - row * args.head_quads;
    u32 index = divide(row, args.by_num_heads);
    u32 head = row - index * args.num_heads;
    u32 count = read_4(args.table), first = read_4(args.table + 4);
    u32 num_sets = min(read_4(args.table + 8), args.max_sets);
    // first + index does not overflow: the host bounds the range.
    if (index >= count || first + index >= args.max_tokens) {
        return;
    }
    u32 token = first + index;
    u64 column = (u64)quad * quad_bytes(args.dtype);
    u64 states = row_of(args.states, token, head) + column, lses = row_of(args.lse, token, head);

    float top = -3.402823466e38f, sum = 0.0f;
    float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    u32 some = 0, only = 0;
#pragma unroll 4
    for (u32 set = 0; set < num_sets; set++) {
        u32 bits = read_4(lses + set * args.lse_set_stride);
        u64 at[1] = {states + set * args.set_stride};
        float4 state[1];
        read_quads(at, args.dtype, state);
        if ((bits & EXPONENT) != EXPONENT) {
            float lse = __uint_as_float(bits), larger = fmaxf(top, lse);
            // A difference that overflows is -inf, and exp(-inf) = 0.
            float factor = exp_of(top - larger), weight = exp_of(lse - larger);
            top = larger;
            sum = fmaf(sum, factor, weight);
            merged = make_float4(merged.x * factor, merged.y * factor, merged.z * factor, merged.w * factor);
            merged = plus_product(weight, state[0], merged);
            some++;
            only = set;
        }
    }

    u64 to = row_of(args.output, token, head) + column;
    u32 lse_bits = 0xFF800000u;
    if (some == 1) {
        // Copied bit for bit.
        u64 from = states + only * args.set_stride;
        if (args.dtype == DTYPE_F32) {
            store_16(to, read_16(from));
        } else {
            store_8(to, read_8(from));
        }
        lse_bits = read_4(lses + only * args.lse_set_stride);
    } else {
        float by = some > 1 ? 1.0f / sum : 0.0f;
        store_quad(to, args.dtype, make_float4(merged.x * by, merged.y * by, merged.z * by, merged.w * by));
        if (some > 1) {
            lse_bits = __float_as_uint(top + logf(sum));
        }
    }
    if (quad == 0 && args.output_lse.address != 0) {
        store_4(row_of(args.output_lse, token, head), lse_bits);
    }
}
