// Index keys of new tokens into the index cache: LayerNorm, RoPE, the Hadamard rotation, quantisation, a scatter by slot.
//
//   for token: slot = slots[token]; skip if NO_SLOT
//     x = (k[token] - mean) / (variance + eps)^1/2 * weight + bias; x and scale by lib/index_row
//     kv[slot / page_size] codes [slot % page_size] = x / scale; scales [slot % page_size] = scale
//
// Tile: a token has 16 threads, of two quads (4 consecutive elements) each.
// Concatenated with: lib/grid, lib/round, lib/in_*, lib/out_*, lib/index_row, lib/index_scale or lib/index_no_scale.
// Constants: GROUP, PARTS, HAS_SCALES (1 for codes), POSITIONS_FOLLOW (a bit of the count: the table has positions too).

struct IndexAppendParams {
    index: IndexParams,
    norm_eps: f32,
    k_base_quads: u32, // quads, as all bases and strides
    k_stride_quads: u32,
    kv_base_quads: u32,
    kv_block_stride_quads: u32,
    page_size: u32,
    max_tokens: u32,
    first_slot: u32, // of the slab that is bound; 0 where it is the whole pool
    num_slots: u32, // of that slab
    reserved_0: u32,
    reserved_1: u32,
    reserved_2: u32,
}

const NO_SLOT = 0xFFFFFFFFu; // the token is skipped

// [1 + tokens, or 1 + 2 * tokens] num_tokens, then slots, then positions if POSITIONS_FOLLOW is set in num_tokens
@group(0) @binding(0) var<storage, read> table: array<u32>;
@group(1) @binding(0) var<uniform> params: IndexAppendParams;
@group(1) @binding(1) var<storage, read> positions: array<i32>; // [tokens]
@group(1) @binding(2) var<storage, read> cos_sin: array<vec4<f32>>; // [max_position, 16]: 8 quads of cosines, 8 of sines
@group(1) @binding(3) var<storage, read> k: array<InQuad>; // [tokens, 32], strided
@group(1) @binding(4) var<storage, read> norm_weight: array<vec4<f32>>; // [32]
@group(1) @binding(5) var<storage, read> norm_bias: array<vec4<f32>>; // [32]
@group(1) @binding(6) var<storage, read_write> kv: array<OutQuad>; // [num_pages] of [page_size, 32], then scales [page_size]; pages strided

var<workgroup> moments: array<vec2<f32>, GROUP>; // [ROWS, PARTS] mean of a part's elements, and the sum of squares around it

@compute @workgroup_size(GROUP)
fn indexer_append(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    // A step prepared again after this was recorded may have more tokens than the binding's buffers hold.
    let counted = table[0] & ~POSITIONS_FOLLOW;
    let num_tokens = min(counted, params.max_tokens);
    // Uniform over the workgroup, as there are barriers.
    if item_of(group, groups, 0u) / PARTS >= num_tokens {
        return;
    }
    let row = lane / PARTS;
    let part = lane % PARTS;
    let index = item_of(group, groups, lane) / PARTS;
    let token = min(index, num_tokens - 1u);
    let quad = quad_of(part);
    let at = params.k_base_quads + token * params.k_stride_quads + quad;
    let key = part_of(k[at], k[at + 8u]);
    var position = 0;
    if params.index.rope != 0u {
        if (table[0] & POSITIONS_FOLLOW) != 0u {
            position = i32(table[1u + counted + token]);
        } else {
            position = positions[token];
        }
    }
    let normed = normalised(key, row, part, quad);
    let x = rotated_part(normed, row, part, position, params.index);
    let amax = largest_of(row);
    var scale = IndexScale(0u, 1.0);
    if HAS_SCALES == 1u {
        scale = scale_of(amax, params.index);
    }
    // NO_SLOT and slots of other slabs fail this test. The host checked the slots; the bound also covers a table made for a larger pool.
    let slot = select(NO_SLOT, table[1u + token], index < num_tokens) - params.first_slot;
    if slot < params.num_slots {
        let page = params.kv_base_quads + slot / params.page_size * params.kv_block_stride_quads;
        let offset = slot % params.page_size;
        kv[page + offset * ROW_QUADS + quad] = out_of(x.first, scale.inverse, amax, params.index);
        kv[page + offset * ROW_QUADS + quad + 8u] = out_of(x.second, scale.inverse, amax, params.index);
        if part == 0u {
            put_scale(page + params.page_size * ROW_QUADS + offset, scale.bits);
        }
    }
}

// LayerNorm. Each part has the mean of its elements and the sum of squares around it, which are joined by the parallel algorithm of Chan:
// as accurate as two passes, with one barrier.
fn normalised(x: Part, row: u32, part: u32, quad: u32) -> Part {
    let ones = vec4<f32>(1.0);
    let part_mean = (dot(x.first, ones) + dot(x.second, ones)) * 0.125;
    let a = x.first - part_mean;
    let b = x.second - part_mean;
    moments[row * PARTS + part] = vec2<f32>(part_mean, dot(a, a) + dot(b, b));
    workgroupBarrier();
    var means = 0.0;
    var squares = 0.0;
    for (var i = 0u; i < PARTS; i++) { // unroll
        means += moments[row * PARTS + i].x;
        squares += moments[row * PARTS + i].y;
    }
    let mean = means / 16.0;
    for (var i = 0u; i < PARTS; i++) { // unroll
        let apart = moments[row * PARTS + i].x - mean;
        squares += 8.0 * apart * apart;
    }
    let factor = inverseSqrt(squares / 128.0 + params.norm_eps);
    return Part(
        (x.first - mean) * factor * norm_weight[quad] + norm_bias[quad],
        (x.second - mean) * factor * norm_weight[quad + 8u] + norm_bias[quad + 8u],
        x.is_finite,
    );
}
