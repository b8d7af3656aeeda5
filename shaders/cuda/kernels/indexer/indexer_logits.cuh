// What the kernels of indexer_logits share: arguments, whose twin on the host is in src/cuda/ops/indexer_logits.rs, runs of keys
// (src/ops/indexer_logits/runs.rs), and where a key is.
//
//   logits[row][j] = k_scale[j] * sum over heads h of weights[token][h] * relu(q[token][h] . k[j])
//
// The grid covers max_runs, so that a captured launch serves every table that fits: blocks past its runs leave early.
#pragma once

#include "lib/divisor.cuh"
#include "lib/global.cuh"
#include "lib/ptx.cuh"

#define MINUS_INFINITY 0xFF800000u

// An index key, or a head of an index query.
constexpr int DIM = 128;

struct Args {
    u64 q;       // [max_tokens, Hi, 128], strided
    u64 weights; // f32 [max_tokens, Hi], strided
    u64 kv;      // [num_pages, page_size, 128], the layer's first page, pages strided; with codes a page ends in f32 [page_size] scales
    u64 logits;  // f32 [max_rows, max_columns], rows strided
    u64 table;   // u32 [table_words]: num_runs, runs, page ids
    u64 q_token_stride; // bytes, as all strides
    u64 q_head_stride;
    u64 weights_token_stride;
    u64 weights_head_stride;
    u64 block_stride;
    u64 logits_row_stride;
    u32 max_tokens;
    u32 max_rows;
    u32 max_columns;
    u32 max_runs; // for which the grid has blocks
    u32 first_page; // of the slab; 0 where it is the whole pool
    u32 num_pages;
    u32 num_heads;
    u32 page_size;
    u32 is_wide; // whether pages begin at multiples of 16 bytes
    u32 query;   // dtype, for the kernels that read any
    u32 reserved_0;
    u32 table_words;
    Divisor by_page_size;
};

// Run of src/ops/indexer_logits/runs.rs, within what the binding has room for.
struct Run {
    u32 row, token, pages, begin, end, fill_end;
};

// The run of this block; false where there is none.
__device__ __forceinline__ bool run_of_block(const Args &args, Run &run) {
    const u32 count = min(read_4(args.table), args.max_runs);
    if (blockIdx.x >= count) {
        return false;
    }
    const u64 at = args.table + 4 + 24ull * blockIdx.x;
    run = {read_4(at), read_4(at + 4), 1 + 6 * read_4(args.table) + read_4(at + 8), read_4(at + 12), read_4(at + 16), read_4(at + 20)};
    // A step prepared again after its graph was captured may reach further than the binding: the host refuses to launch it, and these keep
    // accesses inside.
    run.end = min(run.end, args.max_columns);
    run.fill_end = min(run.fill_end, args.max_columns);
    return run.row < args.max_rows && run.token < args.max_tokens;
}

// Where a key is; `is_there` is false for one past the run's end, and for one that another slab has.
struct KeyPlace {
    u64 page;
    u32 token; // in the page
    bool is_there;
};

// The page id of a key; of the run's last one for a key behind it. The run has a key.
__device__ __forceinline__ u32 page_of(const Args &args, const Run &run, u32 key) {
    const u32 entry = run.pages + divide(min(key, run.end - 1), args.by_page_size);
    return read_4(args.table + 4ull * min(entry, args.table_words - 1));
}

__device__ __forceinline__ KeyPlace place_on(const Args &args, const Run &run, u32 key, u32 page_id) {
    const u32 page = page_id - args.first_page;
    const u32 bounded = min(key, run.end - 1);
    const u32 token = bounded - divide(bounded, args.by_page_size) * args.page_size;
    return {args.kv + min(page, args.num_pages - 1) * args.block_stride, token, key < run.end && page < args.num_pages};
}

// relu, which keeps NaN.
__device__ __forceinline__ float relu(float x) {
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float weight_of(const Args &args, u32 token, u32 head) {
    if (head >= args.num_heads) {
        return 0.0f;
    }
    return __uint_as_float(read_4(args.weights + token * args.weights_token_stride + head * args.weights_head_stride));
}

__device__ __forceinline__ void store_logit(const Args &args, const Run &run, u32 column, u32 bits) {
    store_4(args.logits + run.row * args.logits_row_stride + 4ull * column, bits);
}

// -inf behind what the row sees.
template <u32 THREADS>
__device__ __forceinline__ void fill(const Args &args, const Run &run) {
    for (u32 column = run.end + threadIdx.x; column < run.fill_end; column += THREADS) {
        store_logit(args, run, column, MINUS_INFINITY);
    }
}
