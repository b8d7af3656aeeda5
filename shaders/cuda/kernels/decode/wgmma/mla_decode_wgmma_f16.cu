// ptx: compute_90a version=8.0
// The variant `wgmma_m64` for f16 caches. It is compiled for 168 registers a thread, of which the loader warpgroup releases 144 by
// setmaxnreg.
#include "mla_decode_wgmma.cuh"

// limits: mla_decode_512_64_wgmma_m64 registers=168 threads=384 shared=232448
DECODE_GROUPS(mla_decode_512_64_wgmma_m64, F16)
