// cp.async into stages that wgmma reads: what is in flight, and whom to tell when it has landed.
#pragma once

#include "tma.cuh"

struct InFlight {
    u32 barrier = 0; // the mbarrier of the stage that is being copied; 0 for none

    // Waits until all but LEFT groups of cp.async have landed, and signals their stage as full: behind a proxy fence, as wgmma reads it.
    template <int LEFT>
    DEVICE void finish() {
        if (barrier == 0) return;
        wait_for_all_but<LEFT>();
        before_tensor_copies();
        __syncwarp();
        if (threadIdx.x % LANES == 0) arrive(barrier);
        barrier = 0;
    }
};
