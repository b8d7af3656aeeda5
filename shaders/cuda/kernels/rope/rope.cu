// Rotary embedding of queries, out of place or in place.
//
//   for token of the table's range, head: y[token][head] = rotate(x[token][head], cos_sin[positions[token]])
//
// Tile: one unit, four rotated pairs of a head, a thread. The grid covers max_tokens, so that a captured launch serves every range that
// fits: threads past its tokens leave early.

// limits: rope_f32 registers=40 threads=128
// limits: rope_f16 registers=40 threads=128
// limits: rope_bf16 registers=40 threads=128

#include "rope.cuh"

#define THREADS 128u

struct Args {
    RopeArgs rope;
    u64 table; // u32 [2] num_tokens, first token
    Divisor by_head_units;
    u32 max_tokens; // tokens that x, y and positions hold
    u32 reserved;
};

template <u32 CODE>
__device__ __forceinline__ void rope(const Args &args) {
    u32 item = blockIdx.x * THREADS + threadIdx.x;
    u32 index = divide(item, args.by_head_units);
    griddep_launch();
    griddep_wait();
    uint2 range = read_8(args.table);
    u32 token = range.y + index;
    if (index < range.x && token < args.max_tokens) {
        rotate_unit(args.rope, CODE, token, position_of(args.rope, token), item - index * args.rope.head_units);
    }
}

#define ROPE(NAME, CODE) \
    extern "C" __global__ void __launch_bounds__(THREADS) rope_##NAME(const Args args) { rope<CODE>(args); }

ROPE(f32, 0)
ROPE(f16, 1)
ROPE(bf16, 2)
