// The variants `mma_m128` and `mma_m64` for f16 inputs.
#include "mla_prefill_mma.cuh"

PREFILLS(f16, false)
