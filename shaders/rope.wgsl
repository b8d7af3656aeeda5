// Rotates rows by their tokens' positions.
//
//   for token of the step's range, head: y[token][head] = x[token][head], rotated by cos_sin[positions[token]]
//
// An item is a unit: four pairs of a row. Offsets and strides are multiples of a quad, so no two items share a word.
//
// Prelude: GROUP, UNITS, HEAD_UNITS (those of all heads of a token), INTERLEAVED.
// Libs: grid, round, round_quad_*, rotate, rotate_rows, rope_apart or rope_in_place.

@group(0) @binding(0) var<storage, read> table: array<u32>; // [2] number of tokens, the first of them
@group(1) @binding(0) var<uniform> params: RopeParams;

@compute @workgroup_size(GROUP)
fn rope(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let item = item_of(group, groups, lane);
    let index = item / HEAD_UNITS;
    // A table that was prepared again after this was recorded may hold more than the binding.
    let token = table[1] + index;
    let is_item = index < table[0] && token < params.max_tokens;
    let bound_token = min(token, params.max_tokens - 1u);
    rotate_unit(bound_token, positions[bound_token], item % HEAD_UNITS, params, is_item);
}
