// ptx: compute_80 version=7.8
#include "mla_decode_16_bit.cuh"

DECODES_16_BIT(BF16)
