// Index queries as they meet index keys: RoPE, the Hadamard rotation, quantisation with a scale a token and head, which goes into the
// head's weight.
//
//   for token of the step's range, head: x = q[token][head]; x and scale by lib/index_row
//     q_out[token][head] = x / scale; weights_out[token][head] = weights[token][head] * scale * weight_scale
//
// Tile: a row, a head of a token, has 16 threads, of two quads (4 consecutive elements) each.
// Concatenated with: lib/grid, lib/round, lib/in_*, lib/out_*, lib/index_row.
// Constants: GROUP, PARTS, HAS_SCALES (1 for codes), POSITIONS_FOLLOW (a bit of the count: the table has positions too).

struct IndexQueryParams {
    index: IndexParams,
    weight_scale: f32,
    num_heads: u32,
    max_tokens: u32,
    q_base_quads: u32,
    q_token_stride_quads: u32,
    q_head_stride_quads: u32,
    out_base_quads: u32,
    out_token_stride_quads: u32,
    out_head_stride_quads: u32,
    weights_base: u32, // elements, as the other three of weights
    weights_token_stride: u32,
    weights_head_stride: u32,
    weights_out_base: u32,
    weights_out_token_stride: u32,
    weights_out_head_stride: u32,
    reserved_0: u32,
}

// [2, or 2 + tokens] num_tokens, first token, then positions if POSITIONS_FOLLOW is set in num_tokens
@group(0) @binding(0) var<storage, read> table: array<u32>;
@group(1) @binding(0) var<uniform> params: IndexQueryParams;
@group(1) @binding(1) var<storage, read> positions: array<i32>; // [tokens]
@group(1) @binding(2) var<storage, read> cos_sin: array<vec4<f32>>; // [max_position, 16]: 8 quads of cosines, 8 of sines
@group(1) @binding(3) var<storage, read> q: array<InQuad>; // [tokens, heads, 32], strided
@group(1) @binding(4) var<storage, read> weights: array<u32>; // [tokens, heads] f32 bits, strided
@group(1) @binding(5) var<storage, read_write> q_out: array<OutQuad>; // [tokens, heads, 32], strided
@group(1) @binding(6) var<storage, read_write> weights_out: array<u32>; // [tokens, heads] f32 bits, strided

@compute @workgroup_size(GROUP)
fn indexer_query(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let counted = table[0] & ~POSITIONS_FOLLOW;
    // Uniform over the workgroup, as there are barriers.
    if item_of(group, groups, 0u) / PARTS / params.num_heads >= counted {
        return;
    }
    let row = lane / PARTS;
    let part = lane % PARTS;
    let item = item_of(group, groups, lane) / PARTS;
    let index = min(item / params.num_heads, counted - 1u);
    let head = item % params.num_heads;
    // A step prepared again after this was recorded may have more tokens than the binding's buffers hold.
    let token = min(table[1] + index, params.max_tokens - 1u);
    let is_row = item / params.num_heads < counted && table[1] + index < params.max_tokens;
    let quad = quad_of(part);
    let at = params.q_base_quads + token * params.q_token_stride_quads + head * params.q_head_stride_quads + quad;
    let query = part_of(q[at], q[at + 8u]);
    var position = 0;
    if params.index.rope != 0u {
        if (table[0] & POSITIONS_FOLLOW) != 0u {
            position = i32(table[2u + index]);
        } else {
            position = positions[token];
        }
    }
    let x = rotated_part(query, row, part, position, params.index);
    let amax = largest_of(row);
    var scale = IndexScale(0x3F800000u, 1.0);
    if HAS_SCALES == 1u {
        scale = scale_of(amax, params.index);
    }
    if is_row {
        let to = params.out_base_quads + token * params.out_token_stride_quads + head * params.out_head_stride_quads + quad;
        q_out[to] = out_of(x.first, scale.inverse, amax, params.index);
        q_out[to + 8u] = out_of(x.second, scale.inverse, amax, params.index);
        if part == 0u {
            let weight_of = params.weights_base + token * params.weights_token_stride + head * params.weights_head_stride;
            let weight_to = params.weights_out_base + token * params.weights_out_token_stride + head * params.weights_out_head_stride;
            weights_out[weight_to] = scaled_weight(weights[weight_of], scale.bits);
        }
    }
}

// Bits of weight * scale * weight_scale. A weight that is not finite stays what it is, and a scale that is none makes NaN.
fn scaled_weight(weight: u32, scale: u32) -> u32 {
    let is_scale = scale < F32_INF;
    let is_number = (weight & F32_INF) != F32_INF;
    let product = bitcast<f32>(select(0u, weight, is_number)) * bitcast<f32>(select(0u, scale, is_scale)) * params.weight_scale;
    return select(NAN_BITS, select(weight, bitcast<u32>(product), is_number), is_scale);
}
