// What steps are made of, from a batch that only the card knows: the slots of its new tokens, and the tables of a decode that was planned
// for the longest that it may be.
//
// Whatever the arrays hold, every index made of them is bounded here.

// limits: batch_* registers=40 threads=256

#include "lib/global.cuh"

#define THREADS 256u
#define NO_SLOT 0xFFFFFFFFu
#define NO_PAGE 0xFFFFFFFFu

struct Args {
    u64 seq_lens;        // i32 [batch], as the next two
    u64 query_start_loc; // [batch + 1]
    u64 block_table;     // [batch, max_pages]
    u64 slots;  // u32 [1 + tokens]: num_tokens, which the host wrote, then the slots
    u64 plan;   // u32, see batch_items
    u64 tables; // u32, of the step
    u64 pages;  // u32, of the step: its page list
    u32 batch;  // at least 1, as max_pages
    u32 max_pages;
    u32 page_size;
    u32 num_pages;
    u32 max_tokens; // for which there is room behind `slots`
    u32 reserved;
};

// u32 [1 + 8]: num_items, num_queries, num_words, items_at, queries_at (in `tables`), batch, unused; then
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

// Tokens of a sequence; none for a negative length.
__device__ __forceinline__ u32 len_of(const Args &args, u32 sequence) { return max((int)read_4(args.seq_lens + 4ull * sequence), 0); }

__device__ __forceinline__ int start_of(const Args &args, u32 sequence) { return read_4(args.query_start_loc + 4ull * sequence); }

// Keys that a query token of a sequence sees, bottom-right: its own position and those before; 0 for a token of another sequence, or
// before the first key.
__device__ __forceinline__ u32 visible_of(const Args &args, u32 sequence, u32 token) {
    int begin = start_of(args, sequence), end = start_of(args, sequence + 1), t = token, len = len_of(args, sequence);
    return t < begin || t >= end || begin < 0 || end - t > len ? 0u : len - (end - t) + 1;
}

// What `block_table` has for a block of a sequence.
__device__ __forceinline__ u32 page_at(const Args &args, u32 sequence, u32 block) {
    return block < args.max_pages ? read_4(args.block_table + 4ull * ((u64)sequence * args.max_pages + block)) : NO_PAGE;
}

// The last of `count` numbers, in order, that is not above `value`; one of them whatever they are.
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

// The slot of each new token, where kv_append looks for it: of position seq_len - (query_start_loc[s + 1] - token), s the last sequence
// that begins at or before it. A token of no sequence has none, nor has one whose page is not of the pool: a write to another page would be worse.
extern "C" __global__ void __launch_bounds__(THREADS) batch_slots(const Args args) {
    u32 token = blockIdx.x * THREADS + threadIdx.x;
    if (token >= args.max_tokens || token >= read_4(args.slots)) {
        return;
    }
    u32 sequence = last_not_above((int)token, args.batch, [&](u32 i) { return start_of(args, i); });
    u32 slot = NO_SLOT;
    u32 visible = visible_of(args, sequence, token);
    if (visible > 0) {
        u32 position = visible - 1;
        u32 page = page_at(args, sequence, position / args.page_size);
        if (page < args.num_pages) {
            slot = page * args.page_size + position % args.page_size;
        }
    }
    store_4(args.slots + 4ull + 4ull * token, slot);
}

// The work items and query tokens of a step, cut down to the batch: an item ends at its sequence's length, and one with nothing left is
// empty, as the planner has it; a query token sees what it does of its sequence.
//
// Items and query tokens are written whole, from the checked plan of the template, and ranges only become shorter: whatever the batch
// holds, and whatever plan the tables are of by now, each is one that the host checked.
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
        // An empty item begins at 0: kernels take blocks from a multiple of their size on.
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

// The page list: each word's page, clamped to the pool; 0 past its sequence's end.
//
// A kernel of its own, after batch_items: a decode reads its item before it waits for the kernel before it, which is this one, and this
// one does not begin before batch_items has ended.
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
