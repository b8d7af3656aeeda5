// ptx: compute_90a version=8.0
// The variant `wgmma_m128` for f16 inputs.
#include "mla_prefill_wgmma.cuh"

PREFILLS(f16, false)
