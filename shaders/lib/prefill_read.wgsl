// Queries, keys and values of lib/prefill.wgsl. Shapes are in elements, strided.
@group(1) @binding(1) var<storage, read> q_nope: array<Unit>; // [T, H, P]
@group(1) @binding(2) var<storage, read> q_pe: array<Unit>; // [T, H, R]
@group(1) @binding(3) var<storage, read> k_nope: array<Unit>; // [S, H, P]
@group(1) @binding(4) var<storage, read> k_pe: array<Unit>; // [S, H, R]
@group(1) @binding(5) var<storage, read> v: array<Unit>; // [S, H, V]
