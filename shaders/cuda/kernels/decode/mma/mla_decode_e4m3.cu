// ptx: compute_89 version=8.1
// The variants `mma_*` for FP8 (e4m3) caches; names and columns as in mla_decode_16_bit.cuh.
#include "decode/mla_decode.cuh"

// limits: mla_decode_512_64_*_small_split registers=255 threads=128 shared=101376
// limits: mla_decode_512_64_*_small registers=255 threads=256 shared=101376
// limits: mla_decode_512_64_mma_m16 registers=255 threads=128 shared=101376
// limits: mla_decode_512_64_mma_m* registers=255 threads=256 shared=232448
// limits: mla_decode_256_* registers=255 threads=128 shared=101376
// limits: mla_decode_512_0_* registers=255 threads=128 shared=101376
//     entry                               L    R         rows tokens warps stages parts sharers kept copies
DECODE(mla_decode_512_64_mma_m16,          512, 64, E4M3, 16, 64, 4, 2, 1, 1, 18)
DECODE(mla_decode_512_64_mma_m32,          512, 64, E4M3, 32, 64, 8, 3, 1, 4, 9)
DECODE(mla_decode_512_64_mma_m64,          512, 64, E4M3, 64, 64, 8, 3, 1, 2, 0, ARRIVALS)
DECODE(mla_decode_512_64_mma_m16_split,    512, 64, E4M3, 16, 64, 8, 3, 2, 1, 0)
DECODE(mla_decode_512_64_mma_m64_small,    512, 64, E4M3, 64, 32, 8, 3, 1, 4, 7)
DECODE(mla_decode_512_64_mma_m32_small,    512, 64, E4M3, 32, 32, 8, 4, 1, 4, 9)
DECODE(mla_decode_512_64_mma_m16_small_split, 512, 64, E4M3, 16, 32, 4, 2, 2, 1, 0)
DECODE(mla_decode_256_64_mma_m16,          256, 64, E4M3, 16, 64, 4, 3, 1, 1, 20)
DECODE(mla_decode_256_64_mma_m16_split,    256, 64, E4M3, 16, 64, 4, 3, 2, 1, 0)
DECODE(mla_decode_256_32_mma_m16,          256, 32, E4M3, 16, 64, 4, 3, 1, 1, 18)
DECODE(mla_decode_256_32_mma_m16_split,    256, 32, E4M3, 16, 64, 4, 3, 2, 1, 0)
DECODE(mla_decode_512_0_mma_m16,           512, 0, E4M3, 16, 64, 4, 2, 1, 1, 0)
DECODE(mla_decode_512_0_mma_m16_split,     512, 0, E4M3, 16, 32, 4, 2, 2, 1, 0)
