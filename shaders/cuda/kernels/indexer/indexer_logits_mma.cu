// The variant `mma`: queries in registers, mma.sync.

// limits: indexer_logits_mma_h64_* registers=255 threads=256
// limits: indexer_logits_mma_h32_* registers=255 threads=256

#include "indexer_logits_mma.cuh"

#define LOGITS(NAME, KEY, QUERY) \
    extern "C" __device__ const u32 indexer_logits_mma_h64_##NAME##_shared_bytes = ring_bytes<KEY>(); \
    extern "C" __global__ void __launch_bounds__(WARPS* LANES, 1) indexer_logits_mma_h64_##NAME(const Args args) { score<KEY, QUERY, 8, KeptQueries>(args); } \
    extern "C" __device__ const u32 indexer_logits_mma_h32_##NAME##_shared_bytes = ring_bytes<KEY>(); \
    extern "C" __global__ void __launch_bounds__(WARPS* LANES, 1) indexer_logits_mma_h32_##NAME(const Args args) { score<KEY, QUERY, 4, KeptQueries>(args); }

LOGITS(e4m3_e4m3, Codes<false>, Codes<false>)
LOGITS(e4m3_f16, Codes<false>, Halves<false>)
LOGITS(e4m3_bf16, Codes<true>, Halves<true>)
LOGITS(f16_f16, Halves<false>, Halves<false>)
LOGITS(bf16_bf16, Halves<true>, Halves<true>)
