// ptx: compute_90a version=8.0
// The variant `wgmma_m64` for FP8 (e4m3) caches and queries. Of 168 registers a thread, the loader warpgroup gives up 128 by setmaxnreg.
#include "mla_decode_wgmma_fp8.cuh"

// limits: mla_decode_512_64_wgmma_m64 registers=168 threads=384 shared=232448
DECODE_CODES(mla_decode_512_64_wgmma_m64)
