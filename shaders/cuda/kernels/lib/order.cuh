// The order of kernels on a stream.
#pragma once

// On cards that can, a kernel begins before the one before it has ended, and waits only where it needs what that wrote. src/cuda/ptx.rs makes
// instructions of these comments there. Each block waits, one without work too: the kernel after this one waits for this one alone.
__device__ __forceinline__ void let_next_kernel_begin() {
    asm volatile("// sm_90: griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void wait_for_kernel_before() {
    asm volatile("// sm_90: griddepcontrol.wait;" ::: "memory");
}
