// Merges any number of partial attention states (sets) of the same queries, as FlashInfer's merge_states, vLLM's dcp_lse_combine and
// shaders/merge_states.wgsl.
//
//   top = max over sets of lse; weight = base^(lse - top), 0 where lse is -inf, +inf or NaN
//   output = sum(weight * state) / sum(weight), in the order of the sets; lse = top + log(sum(weight))
//   one set with a weight: its bits unchanged; none: 0 and -inf; a weight of 0 leaves a state out, whatever it holds
//
// Tile: one quad (4 consecutive elements) of a row a thread, where a row is a (token, head), heads first; an element where rows are no
// multiple of 8 elements. Online: a set with a larger LSE rescales the sums.
//
// The grid covers max_tokens, so that a captured launch serves every range that fits: blocks past its tokens leave early.

// limits: merge_states registers=64 threads=256
// limits: merge_states_elements registers=64 threads=256

#include "lib/divisor.cuh"
#include "lib/sum.cuh"
#include "merge/sets.cuh"

#define THREADS 256

struct Args {
    // Set 0 of each; set_stride and lse_set_stride give the others.
    Place states; // [sets, tokens, heads, head_size], strided
    Place lse; // f32 [sets, tokens, heads], strided
    Place output; // [tokens, heads, head_size], strided
    Place output_lse; // f32 [tokens, heads], strided; address 0: not written
    u64 table; // u32 [3] num_tokens, first token, num_sets
    u64 set_stride; // bytes, as the next
    u64 lse_set_stride;
    u32 max_tokens;
    u32 max_sets;
    u32 num_heads;
    u32 row_units; // quads or elements
    u32 dtype;
    float log2_base; // of the base that LSEs are in: log2 e or 1
    float per_ln; // what a natural logarithm is multiplied by to be in it: 1 or log2 e
    float output_scale;
    Divisor by_row_units;
    Divisor by_num_heads;
};

template <class Unit> __device__ __forceinline__ void merge(const Args &args) {
    griddep_launch();
    griddep_wait();
    u32 item = blockIdx.x * THREADS + threadIdx.x;
    u32 row = divide(item, args.by_row_units);
    u32 unit = item - row * args.row_units;
    u32 index = divide(row, args.by_num_heads);
    u32 head = row - index * args.num_heads;
    u32 count = read_4(args.table), first = read_4(args.table + 4);
    u32 num_sets = min(read_4(args.table + 8), args.max_sets);
    // first + index does not overflow: the host bounds the range.
    if (index >= count || first + index >= args.max_tokens) {
        return;
    }
    u32 token = first + index;
    u64 column = (u64)unit * Unit::bytes(args.dtype);
    u64 states = row_of(args.states, token, head) + column, lses = row_of(args.lse, token, head);

    // Sums with their rests: a plain sum of 65,536 sets is off by more than 2e-6.
    float top = LOWEST;
    Compensated sum;
    Unit merged = Unit::zero(), rest = Unit::zero();
    u32 some = 0, only = 0;
#pragma unroll 4
    for (u32 set = 0; set < num_sets; set++) {
        u32 bits = read_4(lses + set * args.lse_set_stride);
        Unit state = Unit::read(states + set * args.set_stride, args.dtype);
        if (weighs(bits)) {
            float lse = __uint_as_float(bits), larger = fmaxf(top, lse);
            // A difference that overflows is -inf, and exp(-inf) = 0.
            float factor = exp_of(top - larger, args.log2_base), weight = exp_of(lse - larger, args.log2_base);
            top = larger;
            sum.scale(factor);
            sum.add(weight);
            merged = merged.times(factor), rest = rest.times(factor);
            merged.add(rest, state.times(weight));
            some++;
            only = set;
        }
    }
    // What is not finite may be of a set whose weight is 0, or has become so: added up once more without those.
    if (some > 1 && merged.not_finite()) {
        merged = Unit::zero(), rest = Unit::zero();
        for (u32 set = 0; set < num_sets; set++) {
            u32 bits = read_4(lses + set * args.lse_set_stride);
            float weight = weighs(bits) ? exp_of(__uint_as_float(bits) - top, args.log2_base) : 0.0f;
            if (weight > 0.0f) {
                merged.add(rest, Unit::read(states + set * args.set_stride, args.dtype).times(weight));
            }
        }
    }

    u64 to = row_of(args.output, token, head) + column;
    u32 lse_bits = NOTHING;
    if (some == 1 && args.output_scale == 1.0f) {
        Unit::copy(to, states + only * args.set_stride, args.dtype);
    } else {
        merged.with(rest).times(some > 0 ? 1.0f / sum.value() : 0.0f).times(args.output_scale).store(to, args.dtype);
    }
    if (some == 1) {
        lse_bits = read_4(lses + only * args.lse_set_stride);
    } else if (some > 1) {
        lse_bits = __float_as_uint(fmaf(logf(sum.value()), args.per_ln, top));
    }
    if (unit == 0 && args.output_lse.address != 0) {
        store_4(row_of(args.output_lse, token, head), lse_bits);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) merge_states(const Args args) { merge<Quads>(args); }

extern "C" __global__ void __launch_bounds__(THREADS) merge_states_elements(const Args args) { merge<Element>(args); }
