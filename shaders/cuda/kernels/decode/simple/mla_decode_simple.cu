// Split-KV MLA decode without tensor cores, in f32: variant `simple`, for f32 caches and for cards that no other variant fits.
// Tile: up to 8 query rows a block, one warp a row (decode_f32.cuh), one token at a time; the cache is read in place. Work items and
// tables are those of shaders/mla_decode.wgsl.
#define UNROLLED 1
#include "decode/decode_f32.cuh"

constexpr int ROWS = 8;

// limits: mla_decode_* registers=128 threads=256

template <class Layout>
DEVICE void decode(const Args& args) {
    if (blockIdx.x >= args.header->num_items) return;
    const WorkItem item = item_of_block(args);
    const u32 row = threadIdx.x / LANES;
    if constexpr (Layout::CACHE == F32) {
        static_assert(ROWS * LANES == F32_THREADS, "their pitch");
        __shared__ Compensated totals[sums_of_lane(Layout::LATENT)][F32_THREADS];
        if (row < item.num_rows) decode_row<Layout>(args, item, row, &totals[0][threadIdx.x]);
    } else {
        if (row < item.num_rows) decode_row<Layout>(args, item, row);
    }
}

#define DECODE(name, ...) \
    extern "C" __global__ void __launch_bounds__(ROWS * LANES, 2) name(const __grid_constant__ Args args) { decode<__VA_ARGS__>(args); }
#define DECODES(name, CACHE) \
    DECODE(mla_decode_##name##_512_64, Plain<512, 64, CACHE>) \
    DECODE(mla_decode_##name##_256_64, Plain<256, 64, CACHE>) \
    DECODE(mla_decode_##name##_256_32, Plain<256, 32, CACHE>) \
    DECODE(mla_decode_##name##_512_0, Plain<512, 0, CACHE>)

DECODES(f32, F32)
DECODES(f16, F16)
DECODES(bf16, BF16)
DECODES(e4m3, E4M3)
DECODE(mla_decode_ds656_512_64, Record<64>)
DECODE(mla_decode_ds528_512_0, Record<0>)
