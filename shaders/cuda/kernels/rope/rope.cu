// Rotates rows by their tokens' positions.
//
//   for token of the table's range, head: y[token][head] = x[token][head], rotated by cos_sin[positions[token]]
//
// An item is a unit: four pairs of a row. A grid is for max_tokens, so that a captured one serves every range that fits: threads past its
// tokens leave early.

// limits: rope_f32 registers=40 threads=128
// limits: rope_f16 registers=40 threads=128
// limits: rope_bf16 registers=40 threads=128

#include "rope.cuh"

#define THREADS 128u

struct Args {
    RopeArgs rope;
    u64 table; // u32: the number of tokens, the first of them
    Divisor by_head_units;
    u32 max_tokens; // that rows and positions have
    u32 reserved;
};

template <class T>
__device__ __forceinline__ void rope(const Args &args) {
    u32 item = blockIdx.x * THREADS + threadIdx.x;
    u32 index = divide(item, args.by_head_units);
    let_next_kernel_begin();
    wait_for_kernel_before();
    uint2 range = read_8(args.table);
    u32 token = range.y + index;
    if (index < range.x && token < args.max_tokens) {
        rotate_unit<T>(args.rope, token, position_of(args.rope, token), item - index * args.rope.head_units);
    }
}

#define ROPE(NAME, T) \
    extern "C" __global__ void __launch_bounds__(THREADS) rope_##NAME(const Args args) { rope<T>(args); }

ROPE(f32, F32)
ROPE(f16, F16)
ROPE(bf16, Bf16)
