// Programmatic dependent launch.
#pragma once

// Since compute capability 9.0 a kernel may start while the previous one on the stream drains, and waits where it reads what that wrote or
// overwrites what that reads. src/cuda/kernels/ptx.rs turns these comments of the PTX into instructions for such cards. Every block must
// wait, one without work too: the next kernel waits for the completion of this one only.
// Lets the next kernel on the stream start: griddepcontrol.launch_dependents.
__device__ __forceinline__ void griddep_launch() {
    asm volatile("// sm_90: griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernel before has completed and its writes are visible.
__device__ __forceinline__ void griddep_wait() {
    asm volatile("// sm_90: griddepcontrol.wait;" ::: "memory");
}
