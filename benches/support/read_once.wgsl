// Reads an array once, LOADS vec4 a thread, and does nothing else: the least time that the weights of a projection take.
// The bench writes out the loads and their sum, one a line: a rolled loop would measure a private array in memory.

const GROUP = 256u;

@group(0) @binding(0) var<storage, read> source: array<vec4<u32>>; // [groups * GROUP * LOADS]
@group(0) @binding(1) var<storage, read_write> target_words: array<vec4<u32>>; // [1]

@compute @workgroup_size(GROUP)
fn read_once(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let first = group.x * GROUP * LOADS + lane;
    LOAD_QUADS
    let sum = SUM_OF_QUADS;
    // Never true, but the compiler cannot know it, so it keeps the loads.
    if all(sum == vec4<u32>(0x9E3779B9u, 0x7F4A7C15u, 0xF39CC060u, 0x5CEDC834u)) {
        target_words[0] = sum;
    }
}
