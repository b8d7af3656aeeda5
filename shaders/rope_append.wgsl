// rope and kv_append fused, in one dispatch before a decode: rotates the queries, and rotates and appends the new tokens' keys.
//
//   for token: q_pe_out[token] = rotate(q_pe[token])
//              slot = slots[token]; skip the rest if NO_SLOT
//              kv[slot / PAGE_SIZE][slot % PAGE_SIZE] = convert(kv_c[token] ++ rotate(k_pe[token]))
//
// The rotated key is rounded to its input dtype before it is converted: the bits are those of rope followed by kv_append. A query is
// rounded once, to its input dtype or to codes.
//
// Tile: a thread takes a unit (four rotated pairs) of a query head, a unit of the key, or a quad (4 consecutive elements) of the latent.
// Each kind of a token begins at a multiple of 32 threads, so that a subgroup of 32 does not diverge.
//
// Concatenated with: lib/grid, lib/round, lib/round_quad_*, lib/in_*, lib/out_*, lib/slots, lib/append, lib/rotate, lib/rotate_rows,
// lib/rope_apart or lib/rope_in_place; then lib/append_plain with lib/convert_*, or lib/append_record with lib/record, lib/record_scale and
// lib/record_put. Queries in codes take lib/code_e4m3, and a guard lib/guard, with a row of
// counters for keys and the next for queries.
// Constants: GROUP, UNITS, HEAD_UNITS (units of all heads of a token), QUERY_ITEMS and KEY_ITEMS (HEAD_UNITS and UNITS, rounded up),
// TOKEN_ITEMS (of all three kinds), POSITIONS_FOLLOW (a bit of the count: the table has positions too), INTERLEAVED, PAGE_SIZE,
// LATENT_QUADS.

struct RopeAppendParams {
    append: AppendParams,
    query: RopeParams,
    query_scale: E4m3Scale, // of rotated queries that are codes
}

// [1 + tokens, or 1 + 2 * tokens] num_tokens, then slots, then positions if POSITIONS_FOLLOW is set in num_tokens
@group(0) @binding(0) var<storage, read> table: array<u32>;
@group(1) @binding(0) var<uniform> params: RopeAppendParams;
@group(1) @binding(5) var<storage, read> kv_c: array<InQuad>; // [tokens, L / 4], strided
@group(1) @binding(6) var<storage, read> k_pe: array<InQuad>; // [tokens, R / 4], strided
@group(1) @binding(7) var<storage, read_write> kv: array<OutQuad>; // [num_pages, page_size, SLOT_QUADS], pages strided

@compute @workgroup_size(GROUP)
fn rope_append(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    begin_lost(lane); // guarded
    let item = item_of(group, groups, lane);
    let part = item % TOKEN_ITEMS;
    // A step prepared again after this was recorded may have more tokens than the binding's buffers hold.
    let counted = table[0] & ~POSITIONS_FOLLOW;
    let num_tokens = min(counted, params.append.max_tokens);
    let is_item = item / TOKEN_ITEMS < num_tokens;
    let token = min(item / TOKEN_ITEMS, params.append.max_tokens - 1u);
    let in_table = min(token, max(num_tokens, 1u) - 1u);
    var position = positions[token];
    if (table[0] & POSITIONS_FOLLOW) != 0u {
        position = i32(table[1u + counted + in_table]);
    }
    // Writes test slot < num_slots, which NO_SLOT and slots of other slabs fail. The host checked the slots; the bound also covers a
    // table of a larger pool.
    let slot = select(NO_SLOT, table[1u + in_table], is_item) - params.append.first_slot;
    if part < HEAD_UNITS {
        // Only the dispatch for the first slab of a pool rotates the queries: twice in place would be wrong.
        rotate_unit(token, position, part, params.query, is_item && params.append.first_slot == 0u);
    }
    // Below QUERY_ITEMS the difference wraps.
    if part - QUERY_ITEMS < UNITS {
        append_key(token, position, part - QUERY_ITEMS, slot);
    }
    // The whole workgroup calls it, as it may have barriers.
    append_latent(lane, token, part - QUERY_ITEMS - KEY_ITEMS, slot, part >= QUERY_ITEMS + KEY_ITEMS);
    add_lost(lane, params.append.guard_row, select(0u, 1u, part < HEAD_UNITS)); // guarded
}

fn append_key(token: u32, position: i32, unit: u32, slot: u32) {
    let key = params.append.k_pe_base_quads + token * params.append.k_pe_stride_quads;
    let first = first_quad(unit);
    let second = second_quad(unit);
    let quads = TwoQuads(input_bits(k_pe[key + first]), input_bits(k_pe[key + second]));
    let turned = rotated(quads, angles_of(position, unit, params.query.max_position));
    if slot < params.append.num_slots {
        put_rope(slot, first, input_quad(turned.first));
        put_rope(slot, second, input_quad(turned.second));
    }
}
