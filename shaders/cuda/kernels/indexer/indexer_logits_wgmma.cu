// The variant `wgmma`: queries in shared memory, wgmma with the keys in registers. Two blocks on a multiprocessor.

// ptx: compute_90a version=8.0
// limits: indexer_logits_wgmma_h64_* registers=128 threads=256
// limits: indexer_logits_wgmma_h32_* registers=128 threads=256

#include "indexer_logits_mma.cuh"

#define LOGITS(NAME, KEY, QUERY) \
    extern "C" __device__ const u32 indexer_logits_wgmma_h64_##NAME##_shared_bytes = SharedQueries<KEY, QUERY, 8>::SHARED_BYTES + ring_bytes<KEY>(); \
    extern "C" __global__ void __launch_bounds__(WARPS* LANES, 2) indexer_logits_wgmma_h64_##NAME(const Args args) { score<KEY, QUERY, 8, SharedQueries>(args); } \
    extern "C" __device__ const u32 indexer_logits_wgmma_h32_##NAME##_shared_bytes = SharedQueries<KEY, QUERY, 4>::SHARED_BYTES + ring_bytes<KEY>(); \
    extern "C" __global__ void __launch_bounds__(WARPS* LANES, 2) indexer_logits_wgmma_h32_##NAME(const Args args) { score<KEY, QUERY, 4, SharedQueries>(args); }

LOGITS(e4m3_e4m3, Codes<false>, Codes<false>)
LOGITS(e4m3_f16, Codes<false>, Halves<false>)
LOGITS(e4m3_bf16, Codes<true>, Halves<true>)
LOGITS(f16_f16, Halves<false>, Halves<false>)
LOGITS(bf16_bf16, Halves<true>, Halves<true>)
