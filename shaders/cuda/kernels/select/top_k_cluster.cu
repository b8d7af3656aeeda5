// top_k with a cluster of blocks a row.

// ptx: compute_90 version=7.8
// limits: top_k_cluster* registers=64 threads=512

#include "select/top_k.cuh"

#define TOP_K_CLUSTER(BLOCKS) \
    extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(TOP_K_THREADS, 2) top_k_cluster##BLOCKS(const Args args) { top_k<BLOCKS>(args); }

TOP_K_CLUSTER(2)
TOP_K_CLUSTER(4)
TOP_K_CLUSTER(8)
