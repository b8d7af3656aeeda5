// Weights one rank's attention output by the LSEs of all ranks, as vLLM's correct_attn_out and shaders/correct_attn_out.wgsl: the sum over
// the ranks is the whole's.
//
//   top = max over ranks of lse; sum = sum over ranks of base^(lse - top), without those that are -inf, +inf or NaN
//   output = base^(lse of this rank - top) / sum * out; lse = top + log(sum)
//   this rank alone has a weight: its bits unchanged; none has: 0 and -inf; a weight of 0 gives 0, whatever `out` holds
//
// Tile: one quad (4 consecutive elements) of a row a thread, where a row is a (token, head), heads first; an element where rows are no
// multiple of 8 elements. The grid covers max_tokens: blocks past a step's tokens leave early.

// limits: correct_attn_out registers=64 threads=256
// limits: correct_attn_out_elements registers=64 threads=256

#include "lib/divisor.cuh"
#include "merge/sets.cuh"

#define THREADS 256

struct Args {
    Place out; // [tokens, heads, head_size], strided
    Place lses; // f32 [tokens, heads] of rank 0, strided
    Place output; // [tokens, heads, head_size], strided
    Place output_lse; // f32 [tokens, heads], strided; address 0: not written
    u64 table; // u32 [2] num_tokens, first token
    u64 lse_rank_stride; // bytes
    u32 max_tokens;
    u32 world; // at least 1
    u32 rank; // below world
    u32 num_heads;
    u32 row_units; // quads or elements
    u32 dtype;
    float log2_base; // of the base that LSEs are in: log2 e or 1
    float per_ln; // what a natural logarithm is multiplied by to be in it: 1 or log2 e
    Divisor by_row_units;
    Divisor by_num_heads;
};

template <class Unit> __device__ __forceinline__ void correct(const Args &args) {
    griddep_launch();
    griddep_wait();
    u32 item = blockIdx.x * THREADS + threadIdx.x;
    u32 row = divide(item, args.by_row_units);
    u32 unit = item - row * args.row_units;
    u32 index = divide(row, args.by_num_heads);
    u32 head = row - index * args.num_heads;
    u32 count = read_4(args.table), first = read_4(args.table + 4);
    // first + index does not overflow: the host bounds the range.
    if (index >= count || first + index >= args.max_tokens) {
        return;
    }
    u32 token = first + index;
    u64 column = (u64)unit * Unit::bytes(args.dtype);
    u64 lses = row_of(args.lses, token, head), from = row_of(args.out, token, head) + column;
    Unit state = Unit::read(from, args.dtype);

    float top = LOWEST, sum = 0.0f;
    u32 some = 0, only = NOTHING;
#pragma unroll 4
    for (u32 rank = 0; rank < args.world; rank++) {
        u32 bits = read_4(lses + rank * args.lse_rank_stride);
        if (weighs(bits)) {
            float lse = __uint_as_float(bits), larger = fmaxf(top, lse);
            sum = fmaf(sum, exp_of(top - larger, args.log2_base), exp_of(lse - larger, args.log2_base));
            top = larger;
            some++;
            only = bits;
        }
    }
    u32 mine = read_4(lses + args.rank * args.lse_rank_stride);
    float weight = weighs(mine) ? exp_of(__uint_as_float(mine) - top, args.log2_base) / sum : 0.0f;

    u64 to = row_of(args.output, token, head) + column;
    if (weight == 0.0f) {
        Unit::zero().store(to, args.dtype);
    } else if (some == 1) {
        Unit::copy(to, from, args.dtype);
    } else {
        state.times(weight).store(to, args.dtype);
    }
    if (unit == 0 && args.output_lse.address != 0) {
        u32 lse_bits = some > 1 ? __float_as_uint(fmaf(logf(sum), args.per_ln, top)) : only;
        store_4(row_of(args.output_lse, token, head), lse_bits);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) correct_attn_out(const Args args) { correct<Quads>(args); }

extern "C" __global__ void __launch_bounds__(THREADS) correct_attn_out_elements(const Args args) { correct<Element>(args); }
