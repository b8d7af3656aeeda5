// ptx: compute_90a version=8.0
// The variants `wgmma_swap_ab_*` for FP8 (e4m3) caches. By setmaxnreg the loader warpgroup gives up registers that the others take.
#include "mla_decode_swap_fp8.cuh"

// limits: mla_decode_512_64_wgmma_swap_ab_n16 registers=96 threads=640 shared=232448
DECODE_SWAPPED_CODES(mla_decode_512_64_wgmma_swap_ab_n16, PlainCodes, 16)
// limits: mla_decode_512_64_wgmma_swap_ab_n32 registers=168 threads=384 shared=232448
DECODE_SWAPPED_CODES(mla_decode_512_64_wgmma_swap_ab_n32, PlainCodes, 32)
// limits: mla_decode_512_64_wgmma_swap_ab_n64 registers=168 threads=384 shared=232448
// The two tiles of 128 query rows are in one cluster, as in mla_decode_wgmma.cuh.
DECODE_SWAPPED_CODES(mla_decode_512_64_wgmma_swap_ab_n64, PlainCodes, 64, __cluster_dims__(2, 1, 1))
