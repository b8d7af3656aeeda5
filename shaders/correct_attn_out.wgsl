// Weights one rank's attention output by the LSEs of all ranks, as vLLM's correct_attn_out: the sum over the ranks is the whole's.
//
//   top = max over ranks of lse; sum = sum over ranks of base^(lse - top), without those that are -inf, +inf or NaN
//   output = base^(lse of this rank - top) / sum * out; lse = top + log(sum)
//   this rank alone has a weight: its bits unchanged; none has: 0 and -inf; a weight of 0 gives 0, whatever `out` holds
//
// Tile: one quad (4 consecutive elements) of a row a thread, where a row is a (token, head), heads first.
//
// Concatenated with: lib/grid, lib/round, lib/sets, lib/correct, lib/quad_*, lib/out_*. Constants: GROUP, HEAD_QUADS.

@group(1) @binding(1) var<storage, read> input: array<OutQuad>; // `out` [tokens, heads, HEAD_QUADS], strided
@group(1) @binding(3) var<storage, read_write> output: array<OutQuad>; // [tokens, heads, HEAD_QUADS], strided

@compute @workgroup_size(GROUP)
fn correct_attn_out(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let item = item_of(group, groups, lane);
    let row = item / HEAD_QUADS;
    let quad = item % HEAD_QUADS;
    let row_token = row / params.num_heads;
    let head = row % params.num_heads;
    // A step prepared again after its commands were recorded may have more tokens than the binding's buffers.
    if row_token >= table[0] || table[1] + row_token >= params.max_tokens {
        return;
    }
    let token = table[1] + row_token;
    let c = correction_of(token, head);
    let state = input[at(params.input, 0u, token, head) + quad];
    let to = at(params.output, 0u, token, head) + quad;
    if c.weight == 0.0 {
        output[to] = OutQuad();
    } else if c.is_only {
        output[to] = state;
    } else {
        output[to] = out_quad(bitcast<vec4<u32>>(c.weight * decode_quad(bitcast<Quad>(state))), UNSCALED);
    }
    if quad == 0u {
        write_lse(token, head, c);
    }
}
