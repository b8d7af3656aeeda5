// Reads an array once, LOADS quads of words an invocation, and does nothing else: what the weights of a projection cost at least.
// Its loads are written out by the bench: in a rolled loop, a private array would be what is measured.

const GROUP = 256u;

@group(0) @binding(0) var<storage, read> source: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> target_words: array<vec4<u32>>;

@compute @workgroup_size(GROUP)
fn read_once(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let first = group.x * GROUP * LOADS + lane;
    LOAD_QUADS
    let sum = SUM_OF_QUADS;
    // Never so, which the compiler does not know.
    if all(sum == vec4<u32>(0x9E3779B9u, 0x7F4A7C15u, 0xF39CC060u, 0x5CEDC834u)) {
        target_words[0] = sum;
    }
}
