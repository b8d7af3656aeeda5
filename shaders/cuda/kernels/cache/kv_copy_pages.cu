// Copies whole pages inside one layer's pool, as raw bits.
//
//   for (from, to) of the table: kv[to] = kv[from]
//
// Where a pool is cut into slabs, a launch copies from one slab to another, or within one.
//
// The host checked that no page is both read and written, and none written twice, so the copies need no order.
//
// Tile: a part of a page a block, UNITS_PER_THREAD units a thread, all loaded before the first is stored.
// The grid covers max_copies, so that a captured launch serves every table that fits: blocks past its copies leave early.

// limits: kv_copy_pages_wide registers=32 threads=256
// limits: kv_copy_pages_words registers=24 threads=256

#include "lib/global.cuh"

#define THREADS 256u
#define UNITS_PER_THREAD 4u

struct Args {
    u64 source; // [from_num_pages, page_units], the layer's first page in a slab, pages strided
    u64 target; // [to_num_pages, page_units], the same of the slab that is written, perhaps the same one
    u64 table;  // u32 [1 + 2 * max_copies] num_copies, then (from, to) of each
    u64 block_stride; // bytes
    u32 from_first_page; // 0 where the slab is the whole pool
    u32 from_num_pages;
    u32 to_first_page;
    u32 to_num_pages;
    u32 page_units;
    u32 blocks_per_page;
    u32 max_copies; // copies that the table holds
    u32 reserved_0;
};

struct Wide {
    typedef uint4 Unit;
    static __device__ __forceinline__ uint4 load(u64 at) { return load_16(at); }
    static __device__ __forceinline__ void store(u64 at, uint4 x) { store_16(at, x); }
};

struct Word {
    typedef u32 Unit;
    static __device__ __forceinline__ u32 load(u64 at) { return load_4(at); }
    static __device__ __forceinline__ void store(u64 at, u32 x) { store_4(at, x); }
};

template <class Access>
__device__ __forceinline__ void copy_pages(const Args &args) {
    typedef typename Access::Unit Unit;
    u32 copy = blockIdx.x / args.blocks_per_page;
    u32 part = blockIdx.x % args.blocks_per_page;
    u32 first = part * THREADS * UNITS_PER_THREAD + threadIdx.x;
    if (copy >= args.max_copies) {
        return;
    }
    u32 num_copies = read_4(args.table);
    u32 from = read_4(args.table + 4ull + 8ull * copy) - args.from_first_page;
    u32 to = read_4(args.table + 8ull + 8ull * copy) - args.to_first_page;
    // Copies between other slabs are left to their launch. The host checked the ids; the bound also covers a table made for a larger pool.
    if (copy >= num_copies || from >= args.from_num_pages || to >= args.to_num_pages) {
        return;
    }
    u64 source = args.source + from * args.block_stride + (u64)first * sizeof(Unit);
    u64 target = args.target + to * args.block_stride + (u64)first * sizeof(Unit);
    Unit units[UNITS_PER_THREAD];
#pragma unroll
    for (u32 i = 0; i < UNITS_PER_THREAD; i++) {
        if (first + i * THREADS < args.page_units) {
            units[i] = Access::load(source + i * THREADS * sizeof(Unit));
        }
    }
#pragma unroll
    for (u32 i = 0; i < UNITS_PER_THREAD; i++) {
        if (first + i * THREADS < args.page_units) {
            Access::store(target + i * THREADS * sizeof(Unit), units[i]);
        }
    }
}

// `wide`: units of 16 bytes, where page size, stride and the first page's address are multiples of that; else `words`.
extern "C" __global__ void __launch_bounds__(THREADS) kv_copy_pages_wide(const Args args) { copy_pages<Wide>(args); }

extern "C" __global__ void __launch_bounds__(THREADS) kv_copy_pages_words(const Args args) { copy_pages<Word>(args); }
