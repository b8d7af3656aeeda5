// Queries, keys and values of lib/prefill.wgsl, for kernels that prefetch into registers. Never written, but declared read_write:
// NVIDIA's compiler sinks a load from a read-only buffer to its use, past barriers, which exposes its latency. Queries too, since one
// buffer may hold all of them, and wgpu refuses a buffer bound both as read and as read_write. Shapes are in elements, strided.
@group(1) @binding(1) var<storage, read_write> q_nope: array<Unit>; // [T, H, P]
@group(1) @binding(2) var<storage, read_write> q_pe: array<Unit>; // [T, H, R]
@group(1) @binding(3) var<storage, read_write> k_nope: array<Unit>; // [S, H, P]
@group(1) @binding(4) var<storage, read_write> k_pe: array<Unit>; // [S, H, R]
@group(1) @binding(5) var<storage, read_write> v: array<Unit>; // [S, H, V]
