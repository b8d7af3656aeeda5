// Reads an array once, LOADS quads of words an invocation, and does nothing else: what the weights of a projection cost at least.

const GROUP = 256u;

@group(0) @binding(0) var<storage, read> source: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> target_words: array<vec4<u32>>;

@compute @workgroup_size(GROUP)
fn read_once(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let first = group.x * GROUP * LOADS + lane;
    var quads: array<vec4<u32>, LOADS>;
    for (var i = 0u; i < LOADS; i++) {
        quads[i] = source[first + i * GROUP];
    }
    var sum = vec4<u32>(0u);
    for (var i = 0u; i < LOADS; i++) {
        sum ^= quads[i];
    }
    // Never so, which the compiler does not know.
    if all(sum == vec4<u32>(0x9E3779B9u, 0x7F4A7C15u, 0xF39CC060u, 0x5CEDC834u)) {
        target_words[0] = sum;
    }
}
