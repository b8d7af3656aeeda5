// ptx: compute_90a version=8.0
// The variants `wgmma_swap_ab_*` for records of 528 bytes, without a rotary part.
#include "mla_decode_swap_fp8.cuh"

// limits: mla_decode_512_0_wgmma_swap_ab_n16 registers=96 threads=640 shared=232448
DECODE_SWAPPED_CODES(mla_decode_512_0_wgmma_swap_ab_n16, Record<0>, 16)
// limits: mla_decode_512_0_wgmma_swap_ab_n64 registers=168 threads=384 shared=232448
DECODE_SWAPPED_CODES(mla_decode_512_0_wgmma_swap_ab_n64, Record<0>, 64, __cluster_dims__(2, 1, 1))
