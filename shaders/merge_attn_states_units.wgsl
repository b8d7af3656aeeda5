// Merges two attention states, 16 bytes at a time: head_size and all offsets and strides are multiples of a unit.
//
//   for block of ROWS_PER_LANE rows, unit: an invocation
//     load both sides and both LSEs of every row, before any of them is waited for
//     output = prefix * w.prefix + suffix * w.suffix, or the bits of the only side there is
//
// A row is a (token, head), heads first. One division a lane finds the first row; the next is one head further.
// Rows past the end are read as if they were of the last token, and not written.
//
// Prelude: GROUP, HEAD_UNITS, ROWS_PER_LANE. Libs: grid, round, merge_*, merge_weights.

@group(0) @binding(1) var<storage, read> prefix_output: array<vec4<u32>>; // [tokens, heads, HEAD_UNITS], strided
@group(0) @binding(2) var<storage, read> suffix_output: array<vec4<u32>>; // [tokens, heads, HEAD_UNITS], strided
@group(0) @binding(3) var<storage, read_write> output: array<vec4<u32>>; // [tokens, heads, HEAD_UNITS], strided

@compute @workgroup_size(GROUP)
fn merge_attn_states(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let item = item_of(group, groups, lane);
    let unit = item % HEAD_UNITS;
    let first_row = item / HEAD_UNITS * ROWS_PER_LANE;
    var token = first_row / params.num_heads;
    var head = first_row % params.num_heads;

    var tokens: array<u32, ROWS_PER_LANE>;
    var heads: array<u32, ROWS_PER_LANE>;
    var lse_bits: array<vec2<u32>, ROWS_PER_LANE>; // prefix, suffix
    var prefix: array<vec4<u32>, ROWS_PER_LANE>;
    var suffix: array<vec4<u32>, ROWS_PER_LANE>;
    for (var i = 0u; i < ROWS_PER_LANE; i++) { // unroll
        let t = min(token, params.num_tokens - 1u);
        lse_bits[i].x = prefix_lse[at(params.prefix_lse, t, head)];
        lse_bits[i].y = suffix_lse[at(params.suffix_lse, t, head)];
        prefix[i] = prefix_output[at(params.prefix, t, head) + unit];
        suffix[i] = suffix_output[at(params.suffix, t, head) + unit];
        tokens[i] = t;
        heads[i] = head;
        head++;
        let is_over = head == params.num_heads;
        token += select(0u, 1u, is_over);
        head = select(head, 0u, is_over);
    }
    for (var i = 0u; i < ROWS_PER_LANE; i++) { // unroll
        if first_row + i < params.num_items {
            let w = weigh(lse_bits[i].x, lse_bits[i].y);
            // Selected, not branched around: a load that only one branch needs may be moved behind the LSEs' latency.
            let suffix_or_none = select(vec4<u32>(0u), suffix[i], w.has_suffix);
            let one_side = select(suffix_or_none, prefix[i], w.has_prefix);
            let both = merge_unit(prefix[i], suffix[i], w);
            let at_output = at(params.output, tokens[i], heads[i]) + unit;
            output[at_output] = select(one_side, both, w.has_prefix && w.has_suffix);
            if unit == 0u {
                write_lse(tokens[i], heads[i], lse_bits[i].x, lse_bits[i].y, w);
            }
        }
    }
}
