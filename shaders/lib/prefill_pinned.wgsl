// Queries, keys and values of lib/prefill.wgsl, for a kernel that loads them well before it uses what it loads. They are not written, but
// declared as if they were: NVIDIA's compiler moves a load from a read-only buffer down to its use, past barriers, and its latency is then
// waited for. Queries too, since one buffer may hold all of them, and wgpu refuses one that is bound in both ways.
@group(1) @binding(1) var<storage, read_write> q_nope: array<Unit>; // [T, H, P]
@group(1) @binding(2) var<storage, read_write> q_pe: array<Unit>; // [T, H, R]
@group(1) @binding(3) var<storage, read_write> k_nope: array<Unit>; // [S, H, P]
@group(1) @binding(4) var<storage, read_write> k_pe: array<Unit>; // [S, H, R]
@group(1) @binding(5) var<storage, read_write> v: array<Unit>; // [S, H, V]
