// Writes a step's tables from a batch that only the device knows (vLLM's metadata arrays): the slots of new tokens (batch_slots), and the
// tables of a decode that was planned for upper bounds (batch_items, batch_pages).
//
// The host cannot check the arrays' contents, so every index derived from them is bounded here.
// Tile: one thread a token, an item and a query token, or a word of the page list.

// limits: batch_* registers=40 threads=256

#include "lib/global.cuh"

#define THREADS 256u
#define NO_SLOT 0xFFFFFFFFu
#define NO_PAGE 0xFFFFFFFFu

struct Args {
    u64 seq_lens;        // i32 [batch], of whole sequences
    u64 query_start_loc; // i32 [batch + 1]
    u64 block_table;     // i32 [batch, max_pages] page ids, of what this rank holds
    u64 marks; // u32 [blocks] twice the number of this rank's blocks before it, plus 1 where it is this rank's
    u64 slots;  // u32 [1 + max_tokens] num_tokens, which the host wrote, then slots
    u64 plan;   // u32, the template: see Plan
    u64 tables; // u32 [Header, items, queries, merges, merge_partials], the step's
    u64 pages;  // u32 [num_words] page ids, the step's
    u32 batch;  // sequences, at least 1; as is max_pages
    u32 max_pages;
    u32 page_size;
    u32 num_pages;
    u32 max_tokens; // slots that `slots` holds
    // The share of this rank; all three are 0 where it holds every token.
    u32 interleave; // tokens in a block of the pattern, at least 1
    u32 owned;      // blocks of the pattern that are this rank's
    u32 blocks;     // blocks of the pattern
};

// u32 [8] num_items, num_queries, num_words, items_at, queries_at (in `tables`), batch, unused; then
// [num_items, 8] work items, [num_items] their sequences, [num_queries, 2] query tokens, [num_queries] their sequences,
// [batch + 1] where each sequence's pages begin
struct Plan {
    u64 at;
    u32 num_items, num_queries, num_words, items_to, queries_to, batch;
    u32 item_sequences, queries, query_sequences, page_begin;

    __device__ __forceinline__ explicit Plan(const Args &args) : at(args.plan) {
        num_items = word(0), num_queries = word(1), num_words = word(2), items_to = word(3), queries_to = word(4);
        batch = min(word(5), args.batch);
        item_sequences = 8 + num_items * 8;
        queries = item_sequences + num_items;
        query_sequences = queries + num_queries * 2;
        page_begin = query_sequences + num_queries;
    }
    __device__ __forceinline__ u32 word(u32 index) const { return read_4(at + 4ull * index); }
};

// How many of the first `len` tokens of a whole sequence this rank holds.
__device__ __forceinline__ u32 local_of(const Args &args, u32 len) {
    if (args.blocks == 0) {
        return len;
    }
    u32 whole = len / args.interleave, turn = whole / args.blocks;
    u32 mark = read_4(args.marks + 4ull * (whole - turn * args.blocks));
    return (turn * args.owned + mark / 2) * args.interleave + (mark & 1 ? len - whole * args.interleave : 0u);
}

// Whether this rank holds a token of a whole sequence.
__device__ __forceinline__ bool is_local(const Args &args, u32 token) {
    return args.blocks == 0 || read_4(args.marks + 4ull * (token / args.interleave % args.blocks)) & 1;
}

// Tokens of a whole sequence; 0 for a negative length.
__device__ __forceinline__ u32 whole_len_of(const Args &args, u32 sequence) { return max((int)read_4(args.seq_lens + 4ull * sequence), 0); }

// Tokens of a sequence that this rank holds.
__device__ __forceinline__ u32 len_of(const Args &args, u32 sequence) { return local_of(args, whole_len_of(args, sequence)); }

__device__ __forceinline__ int start_of(const Args &args, u32 sequence) { return read_4(args.query_start_loc + 4ull * sequence); }

// How many keys of the whole a query token attends to, by the causal mask aligned bottom-right: its own position and those before. 0 for a
// token of another sequence, or before the first key.
__device__ __forceinline__ u32 whole_visible_of(const Args &args, u32 sequence, u32 token) {
    int begin = start_of(args, sequence), end = start_of(args, sequence + 1), t = token, len = whole_len_of(args, sequence);
    return t < begin || t >= end || begin < 0 || end - t > len ? 0u : len - (end - t) + 1;
}

// How many of them this rank holds.
__device__ __forceinline__ u32 visible_of(const Args &args, u32 sequence, u32 token) { return local_of(args, whole_visible_of(args, sequence, token)); }

// The page id of a block of a sequence; NO_PAGE past the table.
__device__ __forceinline__ u32 page_at(const Args &args, u32 sequence, u32 block) {
    return block < args.max_pages ? read_4(args.block_table + 4ull * ((u64)sequence * args.max_pages + block)) : NO_PAGE;
}

// Binary search: the index of the last of `count` sorted numbers that is not above `value`. It stays in range if they are not sorted.
template <class T, class At>
__device__ __forceinline__ u32 last_not_above(T value, u32 count, At at) {
    u32 begin = 0, end = count;
    while (end - begin > 1) {
        u32 middle = (begin + end) / 2;
        if (at(middle) <= value) {
            begin = middle;
        } else {
            end = middle;
        }
    }
    return begin;
}

// The cache slot of each new token (vLLM's slot_mapping), in the table that kv_append reads:
//
//   s = the last sequence with query_start_loc[s] <= token; position = seq_lens[s] - (query_start_loc[s + 1] - token)
//   slots[token] = block_table[s][position / page_size] * page_size + position % page_size
//
// position: of a rank with a share of the tokens its index among the rank's. A token of no sequence or of another rank gets NO_SLOT, and so
// does one whose page lies outside the pool: clamping the id would overwrite another page.
extern "C" __global__ void __launch_bounds__(THREADS) batch_slots(const Args args) {
    u32 token = blockIdx.x * THREADS + threadIdx.x;
    if (token >= args.max_tokens || token >= read_4(args.slots)) {
        return;
    }
    u32 sequence = last_not_above((int)token, args.batch, [&](u32 i) { return start_of(args, i); });
    u32 slot = NO_SLOT;
    u32 visible = whole_visible_of(args, sequence, token);
    if (visible > 0 && is_local(args, visible - 1)) {
        u32 position = local_of(args, visible - 1);
        u32 page = page_at(args, sequence, position / args.page_size);
        if (page < args.num_pages) {
            slot = page * args.page_size + position % args.page_size;
        }
    }
    store_4(args.slots + 4ull + 4ull * token, slot);
}

// Shortens a step's work items and query tokens to the batch:
//
//   item:        kv_end = min(planned kv_end, seq_len); an empty range becomes [0, 0)
//   query token: visible = min(planned visible, its causal limit)
//
// Where a rank holds a share of the tokens, all of these count its own.
//
// Items and query tokens are copied whole from a template that the host checked, and ranges only shrink. So whatever the batch holds, and
// whatever plan the tables held before, every entry stays inside the bounds that the host proved.
extern "C" __global__ void __launch_bounds__(THREADS) batch_items(const Args args) {
    u32 index = blockIdx.x * THREADS + threadIdx.x;
    Plan plan(args);
    if (index < plan.num_items) {
        u32 item[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            item[i] = plan.word(8 + index * 8 + i);
        }
        u32 end = min(item[4], len_of(args, min(plan.word(plan.item_sequences + index), plan.batch - 1)));
        // An empty item begins at 0: kernels that round kv_begin down to a whole block of tokens would run a block otherwise.
        bool is_empty = item[3] >= end;
        item[3] = is_empty ? 0u : item[3];
        item[4] = is_empty ? 0u : end;
        u64 to = args.tables + 4ull * plan.items_to + 32ull * index;
        store_16(to, make_uint4(item[0], item[1], item[2], item[3]));
        store_16(to + 16, make_uint4(item[4], item[5], item[6], item[7]));
    }
    if (index < plan.num_queries) {
        u32 token = plan.word(plan.queries + index * 2), planned = plan.word(plan.queries + index * 2 + 1);
        u32 visible = visible_of(args, min(plan.word(plan.query_sequences + index), plan.batch - 1), token);
        store_8(args.tables + 4ull * plan.queries_to + 8ull * index, make_uint2(token, min(planned, visible)));
    }
}

// The page list: the page id of each word, clamped to the pool; 0 past its sequence's end.
//
// A kernel of its own, after batch_items. By programmatic dependent launch a decode reads its item before it waits for the previous kernel,
// which is this one; and this one, launched without it, starts only after batch_items has ended.
extern "C" __global__ void __launch_bounds__(THREADS) batch_pages(const Args args) {
    u32 index = blockIdx.x * THREADS + threadIdx.x;
    Plan plan(args);
    if (index >= plan.num_words) {
        return;
    }
    u32 sequence = last_not_above(index, plan.batch, [&](u32 i) { return plan.word(plan.page_begin + i); });
    u32 block = index - min(plan.word(plan.page_begin + sequence), index);
    bool is_used = block < (len_of(args, sequence) + args.page_size - 1) / args.page_size;
    store_4(args.pages + 4ull * index, is_used ? min(page_at(args, sequence, block), args.num_pages - 1) : 0u);
}
