// ptx: compute_90a version=8.0
// The variant for Hopper's warpgroups, of whose 168 registers a thread those that load give 144 up.
#include "mla_decode_wgmma.cuh"

// limits: mla_decode_512_64_wgmma_m64 registers=168 threads=384 shared=232448
DECODE_GROUPS(mla_decode_512_64_wgmma_m64, F16)
