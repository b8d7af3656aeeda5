// Programmatic dependent launch.
#pragma once

// Since compute capability 9.0 a kernel may start while the previous kernel of the stream drains. It must then call `griddep_wait` before
// it reads what that kernel wrote, or overwrites what that kernel reads. Every block must call it, also one without work: the next kernel
// waits for this one alone, and relies on it to have waited for those before.
//
// The PTX is built for older cards too. So both instructions are PTX comments, which src/cuda/kernels/ptx.rs makes instructions for cards
// that have them.

// griddepcontrol.launch_dependents: lets the next kernel of the stream start once every block of this one has called it or ended.
__device__ __forceinline__ void griddep_launch() {
    asm volatile("// sm_90: griddepcontrol.launch_dependents;" ::: "memory");
}

// griddepcontrol.wait: waits until the previous kernel of the stream has completed and its writes are visible.
__device__ __forceinline__ void griddep_wait() {
    asm volatile("// sm_90: griddepcontrol.wait;" ::: "memory");
}
