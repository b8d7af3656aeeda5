// ptx: compute_90a version=8.0
// The variants `wgmma_swap_ab_*` for bf16 caches.
#include "mla_decode_swap.cuh"

// limits: mla_decode_512_64_wgmma_swap_ab_n16 registers=80 threads=384 shared=232448
DECODE_SWAPPED(mla_decode_512_64_wgmma_swap_ab_n16, BF16, 16)
// limits: mla_decode_512_64_wgmma_swap_ab_n32 registers=168 threads=384 shared=232448
DECODE_SWAPPED(mla_decode_512_64_wgmma_swap_ab_n32, BF16, 32)
