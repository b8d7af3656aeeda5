// ptx: compute_89 version=8.4
// The variant `mma_fp8_m16`, for FP8 (e4m3) caches with e4m3 queries.
#include "mla_decode_fp8.cuh"

// ptxas 12.8 spills 16 bytes for sm_100, whose tensor cores do not take FP8 by mma.sync: there the variant only runs forced.
// limits: mla_decode_512_64_mma_fp8_m16 registers=255 threads=128 shared=101376 spills=16
// limits: mla_decode_*_mma_fp8_m16 registers=255 threads=128 shared=101376
//         entry                         L    R  stages
DECODE_FP8(mla_decode_512_64_mma_fp8_m16, 512, 64, 2)
DECODE_FP8(mla_decode_256_64_mma_fp8_m16, 256, 64, 3)
DECODE_FP8(mla_decode_256_32_mma_fp8_m16, 256, 32, 3)
DECODE_FP8(mla_decode_512_0_mma_fp8_m16,  512, 0,  2)
