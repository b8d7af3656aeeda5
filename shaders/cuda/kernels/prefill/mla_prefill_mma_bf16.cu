// The variants `mma_m128` and `mma_m64` for bf16 inputs.
#include "mla_prefill_mma.cuh"

PREFILLS(bf16, true)
