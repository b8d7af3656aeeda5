// Index queries as they meet index keys: RoPE, the Hadamard rotation, quantisation with a scale a token and head, which goes into the
// head's weight.
//
//   for token of the table's range, head: x = q[token][head]; x and scale by index_row.cuh
//     q_out[token][head] = x / scale; weights_out[token][head] = weights[token][head] * scale * weight_scale
//
// Tile: a row, a head of a token, a warp. The grid covers max_tokens, so that a captured launch serves every range that fits: warps past
// its tokens leave early.

// limits: indexer_query_* registers=40 threads=128

#include "index_row.cuh"

#define THREADS 128u

struct Args {
    IndexArgs index;
    Place q;           // [max_tokens, heads, 128]
    Place weights;     // f32 [max_tokens, heads]
    Place q_out;       // [max_tokens, heads, 128]
    Place weights_out; // f32 [max_tokens, heads]
    u64 table;         // u32 [3 + table_tokens] num_tokens, first token, whether positions follow, positions of the tokens
    float weight_scale;
    u32 max_tokens;   // tokens that the arrays hold
    u32 table_tokens; // positions that the table holds
    u32 num_heads;
    Divisor by_heads;
};

template <bool CODES>
__device__ __forceinline__ void query(const Args &args) {
    u32 item = blockIdx.x * THREADS + threadIdx.x, row = item / 32, lane = item % 32;
    u32 index = divide(row, args.by_heads), head = row - index * args.num_heads;
    griddep_launch();
    griddep_wait();
    u32 num_tokens = read_4(args.table), token = read_4(args.table + 4) + index;
    // A step prepared again after this was captured may have more tokens than the arrays hold.
    if (index >= min(num_tokens, args.table_tokens) || token >= args.max_tokens) {
        return;
    }
    Angles angles = {};
    if (args.index.rope != 0) {
        bool is_own = read_4(args.table + 8) != 0;
        angles = angles_at(args.index, is_own ? args.table + 12ull + 4ull * index : args.index.positions + 4ull * token, lane);
    }
    float4 x = quad_of(row_of(args.q, token, head), lane, args.index.input);
    u32 weight = lane == 0 ? read_4(row_of(args.weights, token, head)) : 0u;
    bool is_finite = row_is_finite(x);
    x = rotated(args.index, x, angles, lane);
    float scale = 1.0f;
    if constexpr (CODES) {
        scale = is_finite ? scale_of(args.index, x) : __uint_as_float(NAN_BITS);
    }
    store_part<CODES>(args.index, row_of(args.q_out, token, head), lane, x, scale, is_finite);
    if (lane == 0) {
        store_4(row_of(args.weights_out, token, head), __float_as_uint(__uint_as_float(weight) * scale * args.weight_scale));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) indexer_query_codes(const Args args) { query<true>(args); }
extern "C" __global__ void __launch_bounds__(THREADS) indexer_query_elements(const Args args) { query<false>(args); }
