// The variants `mma_*` for caches of 16-bit elements, as instances of mla_decode.cuh; the host's table is src/cuda/decode/variants.rs.
//
// `split`: queries in two parts, for f32 queries, and for f16 queries on a bf16 cache. `small`: fits the 99 KB of shared memory of a
// desktop card. Columns of the table are the parameters of Tile (decode_tile.cuh).
#pragma once

#include "decode/mla_decode.cuh"

// limits: mla_decode_512_64_*_small_split registers=255 threads=64 shared=101376
// limits: mla_decode_512_64_mma_m16_small registers=255 threads=128 shared=101376
// limits: mla_decode_512_64_*_small registers=255 threads=256 shared=101376
// limits: mla_decode_512_64_mma_m* registers=255 threads=256 shared=232448
// limits: mla_decode_256_* registers=255 threads=128 shared=101376
// limits: mla_decode_512_0_mma_m16_split registers=255 threads=64 shared=101376
// limits: mla_decode_512_0_mma_m16 registers=255 threads=128 shared=101376
#define DECODES_16_BIT(CACHE) \
    /*     entry                               L    R          rows tokens warps stages parts sharers kept copies */ \
    DECODE(mla_decode_512_64_mma_m16,          512, 64, CACHE, 16, 64, 8, 3, 1, 1, 36) \
    DECODE(mla_decode_512_64_mma_m32,          512, 64, CACHE, 32, 64, 8, 3, 1, 2, 16) \
    DECODE(mla_decode_512_64_mma_m64,          512, 64, CACHE, 64, 64, 8, 2, 1, 2, 0, ARRIVALS) \
    DECODE(mla_decode_512_64_mma_m16_split,    512, 64, CACHE, 16, 64, 8, 2, 2, 1, 0) \
    DECODE(mla_decode_512_64_mma_m64_small,    512, 64, CACHE, 64, 16, 8, 3, 1, 4, 7) \
    DECODE(mla_decode_512_64_mma_m32_small,    512, 64, CACHE, 32, 32, 8, 2, 1, 4, 9) \
    DECODE(mla_decode_512_64_mma_m16_small,    512, 64, CACHE, 16, 32, 4, 2, 1, 1, 32) \
    DECODE(mla_decode_512_64_mma_m16_small_split, 512, 64, CACHE, 16, 16, 2, 2, 2, 1, 0) \
    DECODE(mla_decode_256_64_mma_m16,          256, 64, CACHE, 16, 32, 4, 3, 1, 1, 20) \
    DECODE(mla_decode_256_64_mma_m16_split,    256, 64, CACHE, 16, 32, 4, 2, 2, 1, 0) \
    DECODE(mla_decode_256_32_mma_m16,          256, 32, CACHE, 16, 32, 4, 3, 1, 1, 18) \
    DECODE(mla_decode_256_32_mma_m16_split,    256, 32, CACHE, 16, 32, 4, 2, 2, 1, 0) \
    DECODE(mla_decode_512_0_mma_m16,           512, 0, CACHE, 16, 32, 4, 2, 1, 1, 0) \
    DECODE(mla_decode_512_0_mma_m16_split,     512, 0, CACHE, 16, 16, 2, 2, 2, 1, 0)
