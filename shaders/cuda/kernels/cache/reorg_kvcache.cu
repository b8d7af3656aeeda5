// Puts gathered parts of several ranks back in the order of their tokens, as raw bits (vLLM's reorg_kvcache), as
// shaders/reorg_kvcache.wgsl.
//
//   for (first, begin, out_row) of the chunks, for t < its tokens: token = begin + t
//     block = token / interleave % blocks, turn = token / interleave / blocks, rank = owners[block]
//     index = (turn * owned[rank] + before[block]) * interleave + token % interleave    the token's index among the rank's
//     out[out_row + t] = gathered[rank][sources[chunk][rank] + index]
//
// Tile: 4 elements of a row a thread, of 16, 8 or 4 bytes by the entry; rows of all chunks one after the other.
// The grid covers max_tokens, so that a captured launch serves every table that fits: threads past its tokens leave early.

// limits: reorg_kvcache_* registers=40 threads=256

#include "lib/divisor.cuh"
#include "lib/global.cuh"

#define THREADS 256u

struct Args {
    u64 gathered; // [world, max_local_rows, row_units], ranks and rows strided
    u64 out;      // [max_rows, row_units], strided
    // u32 [5] num_tokens, num_chunks, world, interleave, blocks; then of each chunk [num_chunks] its first token's number in the step,
    // [num_chunks] begin, [num_chunks] out_row, [num_chunks, world] sources; of the pattern [blocks] owners, [blocks] before, [world] owned
    u64 table;
    u64 rank_stride; // bytes, as the other strides
    u64 gathered_stride;
    u64 out_stride;
    u32 max_rows;
    u32 max_local_rows;
    u32 world;
    u32 row_units;
    Divisor by_row_units;
};

template <u32 BYTES> __device__ __forceinline__ void reorg(const Args &args) {
    u32 item = blockIdx.x * THREADS + threadIdx.x;
    u32 number = divide(item, args.by_row_units);
    u32 unit = item - number * args.row_units;
    auto word = [&](u32 index) { return read_4(args.table + 4ull * index); };
    if (number >= word(0)) {
        return;
    }
    u32 num_chunks = word(1), world = word(2), interleave = word(3), blocks = word(4);
    u32 begins = 5 + num_chunks, out_rows = begins + num_chunks, sources = out_rows + num_chunks;
    u32 owners = sources + num_chunks * world, before = owners + blocks, owned = before + blocks;
    // Binary search for the last chunk that begins at or before this token.
    u32 chunk = 0, end = num_chunks;
    while (end - chunk > 1) {
        u32 middle = (chunk + end) / 2;
        if (word(5 + middle) <= number) {
            chunk = middle;
        } else {
            end = middle;
        }
    }
    u32 t = number - word(5 + chunk), token = word(begins + chunk) + t;
    u32 whole = token / interleave, turn = whole / blocks, block = whole - turn * blocks;
    u32 rank = word(owners + block);
    u32 index = (turn * word(owned + rank) + word(before + block)) * interleave + (token - whole * interleave);
    u32 local_row = word(sources + chunk * world + rank) + index, row = word(out_rows + chunk) + t;
    // A step prepared again after a launch was captured may have more rows than the binding's buffers.
    if (rank >= args.world || local_row >= args.max_local_rows || row >= args.max_rows) {
        return;
    }
    u64 from = args.gathered + rank * args.rank_stride + local_row * args.gathered_stride + (u64)unit * BYTES;
    u64 to = args.out + row * args.out_stride + (u64)unit * BYTES;
    if (BYTES == 16) {
        store_16(to, read_16(from));
    } else if (BYTES == 8) {
        store_8(to, read_8(from));
    } else {
        store_4(to, read_4(from));
    }
}

#define REORG(BYTES) \
    extern "C" __global__ void __launch_bounds__(THREADS) reorg_kvcache_##BYTES(const Args args) { reorg<BYTES>(args); }

REORG(16)
REORG(8)
REORG(4)
