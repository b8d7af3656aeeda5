// top_k with a block a row.

// limits: top_k_block registers=64 threads=512

#include "select/top_k.cuh"

extern "C" __global__ void __launch_bounds__(TOP_K_THREADS, 2) top_k_block(const Args args) { top_k<1>(args); }
