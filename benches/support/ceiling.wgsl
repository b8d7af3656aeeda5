// The memory ceiling of every other figure: `read_all` only reads, `copy_all` reads and writes.
// Workgroups walk the buffers together, with grid stride; a thread loads eight vec4 (four in `copy_all`) an iteration.

const GROUP = 256u;

@group(0) @binding(0) var<storage, read> source: array<vec4<u32>>; // [n]
@group(0) @binding(1) var<storage, read_write> target_words: array<vec4<u32>>; // [n], or [1] for read_all

@compute @workgroup_size(GROUP)
fn read_all(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let stride = groups.x * GROUP;
    let count = arrayLength(&source);
    var sum = vec4<u32>(0u);
    // The host binds a whole number of iterations.
    for (var at = id.x; at < count; at += 8u * stride) {
        let a = source[at];
        let b = source[at + stride];
        let c = source[at + 2u * stride];
        let d = source[at + 3u * stride];
        let e = source[at + 4u * stride];
        let f = source[at + 5u * stride];
        let g = source[at + 6u * stride];
        let h = source[at + 7u * stride];
        sum += (a ^ b) + (c ^ d) + (e ^ f) + (g ^ h);
    }
    // Never true, which the compiler does not know: it keeps the loads.
    if all(sum == vec4<u32>(0x9E3779B9u, 0x7F4A7C15u, 0xF39CC060u, 0x5CEDC834u)) {
        target_words[0] = sum;
    }
}

@compute @workgroup_size(GROUP)
fn copy_all(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let stride = groups.x * GROUP;
    let count = arrayLength(&source);
    for (var at = id.x; at < count; at += 4u * stride) {
        let a = source[at];
        let b = source[at + stride];
        let c = source[at + 2u * stride];
        let d = source[at + 3u * stride];
        target_words[at] = a;
        target_words[at + stride] = b;
        target_words[at + 2u * stride] = c;
        target_words[at + 3u * stride] = d;
    }
}
