// Merges two attention states, 4 elements an invocation: head_size and all strides are multiples of 4 elements.
//
//   for (token, head), quad: w = weigh(token, head)
//     output = prefix * w.prefix + suffix * w.suffix, or the bits of the only side there is
//
// Prelude: GROUP, HEAD_QUADS. Libs: grid, round, in_*, out_*, merge_weights.

@group(0) @binding(1) var<storage, read> prefix_output: array<InQuad>; // [tokens, heads, HEAD_QUADS], strided
@group(0) @binding(2) var<storage, read> suffix_output: array<InQuad>; // [tokens, heads, HEAD_QUADS], strided
@group(0) @binding(3) var<storage, read_write> output: array<OutQuad>; // [tokens, heads, HEAD_QUADS], strided

@compute @workgroup_size(GROUP)
fn merge_attn_states(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let item = item_of(group, groups, lane);
    if item >= params.num_items {
        return;
    }
    let quad = item % HEAD_QUADS;
    let row = item / HEAD_QUADS;
    let token = row / params.num_heads;
    let head = row % params.num_heads;

    let w = weigh(token, head);
    var merged = OutQuad();
    if w.sides == TAKE_BOTH {
        let p = bitcast<vec4<f32>>(in_bits4(prefix_output[at(params.prefix, token, head) + quad]));
        let s = bitcast<vec4<f32>>(in_bits4(suffix_output[at(params.suffix, token, head) + quad]));
        merged = out_quad(bitcast<vec4<u32>>(w.prefix * p + w.suffix * s), UNSCALED);
    } else if w.sides == TAKE_PREFIX {
        merged = prefix_output[at(params.prefix, token, head) + quad];
    } else if w.sides == TAKE_SUFFIX {
        merged = suffix_output[at(params.suffix, token, head) + quad];
    }
    output[at(params.output, token, head) + quad] = merged;
    if quad == 0u {
        write_lse(token, head, w.lse_bits);
    }
}
