// Rotary embedding of queries, out of place or in place.
//
//   for token of the step's range, head: y[token][head] = rotate(x[token][head], cos_sin[positions[token]])
//
// Tile: one unit, four rotated pairs of a head, a thread. A quad is 4 consecutive elements: offsets and strides are multiples of it, so no
// two threads write the same word.
//
// Concatenated with: lib/grid, lib/rotate, lib/rotate_rows, lib/round, lib/round_quad_*, lib/rope_apart or lib/rope_in_place.
// Constants: GROUP, UNITS, HEAD_UNITS (units of all heads of a token), INTERLEAVED.

@group(0) @binding(0) var<storage, read> table: array<u32>; // [2] num_tokens, first token
@group(1) @binding(0) var<uniform> params: RopeParams;

@compute @workgroup_size(GROUP)
fn rope(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let item = item_of(group, groups, lane);
    let index = item / HEAD_UNITS;
    // A step prepared again after this was recorded may have more tokens than the binding's buffers hold.
    let token = table[1] + index;
    let is_item = index < table[0] && token < params.max_tokens;
    let bound_token = min(token, params.max_tokens - 1u);
    rotate_unit(bound_token, positions[bound_token], item % HEAD_UNITS, params, is_item);
}
