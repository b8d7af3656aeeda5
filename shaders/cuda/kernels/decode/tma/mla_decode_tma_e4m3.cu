// ptx: compute_90 version=8.0
// The variant `mma_tma_m16` for FP8 (e4m3) caches: TMA boxes of 16 tokens, for compute capability 9.0 and later and pages of a multiple of
// 16 tokens.
#include "decode/mla_decode.cuh"

// limits: mla_decode_512_64_mma_tma_m16 registers=255 threads=128 shared=115712 card=204800
//         entry                        L    R   cache rows tokens warps stages parts sharers kept
DECODE_TMA(mla_decode_512_64_mma_tma_m16, 512, 64, E4M3, 16, 64, 4, 2, 1, 1, 24)
