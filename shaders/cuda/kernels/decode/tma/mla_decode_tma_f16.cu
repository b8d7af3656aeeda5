// ptx: compute_90 version=8.0
// The variant `mma_tma_m16` for f16 caches: TMA boxes of 16 tokens, for compute capability 9.0 and later and pages of a multiple of 16
// tokens.
#include "decode/mla_decode.cuh"

// limits: mla_decode_512_64_mma_tma_m16 registers=255 threads=256 shared=232448
//         entry                        L    R   cache rows tokens warps stages parts sharers kept
DECODE_TMA(mla_decode_512_64_mma_tma_m16, 512, 64, F16, 16, 64, 8, 3, 1, 1, 36)
