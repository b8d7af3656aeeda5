// Merges two attention states (FlashInfer's merge_state): variant `units`, 16 bytes (a unit) at a time. head_size and all offsets and
// strides are multiples of a unit.
//
//   output = prefix * w.prefix + suffix * w.suffix, or the bits of the only side whose LSE is finite (with an output_scale of 1)
//
// Tile: UNITS_PER_LANE units of ROWS_PER_LANE rows a thread, where a row is a (token, head), heads first. Both LSEs and all units of
// both sides are loaded before the first is used, to overlap their latency. One division a thread finds the first row; the next one
// is a head further. Consecutive threads take consecutive units, so loads coalesce: a thread's own units are ROW_LANES apart.
// Rows past the end read the last token and are not written.
//
// Concatenated with: lib/grid, lib/round, lib/merge_weights, lib/merge_<dtype>.
// Constants: GROUP, HEAD_UNITS, ROWS_PER_LANE, UNITS_PER_LANE (divides HEAD_UNITS).

const ROW_LANES = HEAD_UNITS / UNITS_PER_LANE;

@group(0) @binding(1) var<storage, read> prefix_output: array<vec4<u32>>; // [tokens, heads, HEAD_UNITS], strided
@group(0) @binding(2) var<storage, read> suffix_output: array<vec4<u32>>; // [tokens, heads, HEAD_UNITS], strided
@group(0) @binding(3) var<storage, read_write> output: array<vec4<u32>>; // [tokens, heads, HEAD_UNITS], strided

@compute @workgroup_size(GROUP)
fn merge_state(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let item = item_of(group, groups, lane);
    let unit = item % ROW_LANES;
    let first_row = item / ROW_LANES * ROWS_PER_LANE;
    var token = first_row / params.num_heads;
    var head = first_row % params.num_heads;

    var tokens: array<u32, ROWS_PER_LANE>;
    var heads: array<u32, ROWS_PER_LANE>;
    var lse_bits: array<vec2<u32>, ROWS_PER_LANE>; // prefix, suffix
    var prefix: array<vec4<u32>, ROWS_PER_LANE * UNITS_PER_LANE>;
    var suffix: array<vec4<u32>, ROWS_PER_LANE * UNITS_PER_LANE>;
    for (var i = 0u; i < ROWS_PER_LANE; i++) { // unroll
        let t = min(token, params.num_tokens - 1u);
        lse_bits[i].x = prefix_lse[at(params.prefix_lse, t, head)];
        lse_bits[i].y = suffix_lse[at(params.suffix_lse, t, head)];
        let at_prefix = at(params.prefix, t, head) + unit;
        let at_suffix = at(params.suffix, t, head) + unit;
        for (var j = 0u; j < UNITS_PER_LANE; j++) { // unroll
            prefix[i * UNITS_PER_LANE + j] = prefix_output[at_prefix + j * ROW_LANES];
            suffix[i * UNITS_PER_LANE + j] = suffix_output[at_suffix + j * ROW_LANES];
        }
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
            let at_output = at(params.output, tokens[i], heads[i]) + unit;
            for (var j = 0u; j < UNITS_PER_LANE; j++) { // unroll
                // A select, not a branch: a compiler may sink a load into the branch that uses it, behind the LSEs' latency.
                let p = select(vec4<u32>(0u), prefix[i * UNITS_PER_LANE + j], w.has_prefix);
                let s = select(vec4<u32>(0u), suffix[i * UNITS_PER_LANE + j], w.has_suffix);
                output[at_output + j * ROW_LANES] = select(merge_unit(p, s, w), p | s, w.is_copy);
            }
            if unit == 0u {
                write_lse(tokens[i], heads[i], lse_bits[i].x, lse_bits[i].y, w);
            }
        }
    }
}
