// Gathers tokens of the paged cache into a contiguous workspace (vLLM's gather_and_maybe_dequant_cache), with conversion.
//
//   for (slot, out_row, tokens) in pieces, each inside one page: for t < tokens:
//     out[out_row + t] = convert(kv[slot / PAGE_SIZE][slot % PAGE_SIZE + t])
//
// A quad is 4 consecutive elements. L + R and every offset and stride are multiples of 4, so a quad is 1, 2 or 4 whole words on both
// sides, and no two invocations write the same word. Each piece has PAGE_SIZE places, one for each token that it could have.
//
// Tile: one quad of PLACES_PER_LANE places a thread; all loads are issued before the first conversion, to overlap their latency.
// Concatenated with: lib/grid, lib/round, lib/in_*, lib/out_*, lib/slots, and lib/pack_* or lib/convert_begin_nothing; then
// lib/gather_plain with lib/convert_*, or lib/record with lib/gather_record.
// Constants: GROUP, PAGE_SIZE, ROW_QUADS, PLACES_PER_LANE.

struct GatherParams {
    scale: E4m3Scale,
    kv_base_quads: u32,
    kv_block_stride_quads: u32,
    out_base_quads: u32,
    out_stride_quads: u32,
    max_rows: u32,
    first_slot: u32, // of the slab that is bound; 0 where it is the whole pool
    num_slots: u32, // of that slab
    reserved_0: u32,
}

@group(0) @binding(0) var<storage, read> table: array<u32>; // [1 + 3 * pieces] num_pieces, then (slot, out_row, tokens) of each
@group(1) @binding(0) var<uniform> params: GatherParams;
@group(1) @binding(1) var<storage, read> kv: array<InQuad>; // [num_pages, page_size, SLOT_QUADS], pages strided
@group(1) @binding(2) var<storage, read_write> out: array<OutQuad>; // [out_rows, (L + R) / 4], strided

const NO_ROW = 0xFFFFFFFFu;

@compute @workgroup_size(GROUP)
fn kv_gather(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let item = item_of(group, groups, lane);
    let quad = item % ROW_QUADS;
    let first = item / ROW_QUADS * PLACES_PER_LANE;
    let num_places = table[0] * PAGE_SIZE;
    // Uniform over the workgroup, as begin_convert has a barrier.
    if item_of(group, groups, 0u) / ROW_QUADS * PLACES_PER_LANE >= num_places {
        return;
    }
    var rows: array<u32, PLACES_PER_LANE>;
    var quads: array<Stored, PLACES_PER_LANE>;
    for (var i = 0u; i < PLACES_PER_LANE; i++) { // unroll
        let place = min(first + i, num_places - 1u);
        let piece = 1u + place / PAGE_SIZE * 3u;
        let t = place % PAGE_SIZE;
        // The host checked the slots; the bounds also cover a table made for a larger pool. Other slabs' tokens are left to their dispatch.
        let in_slab = table[piece] + t - params.first_slot;
        let slot = min(in_slab, params.num_slots - 1u);
        let is_used = first + i < num_places && t < table[piece + 2u] && in_slab == slot;
        rows[i] = select(NO_ROW, table[piece + 1u] + t, is_used);
        quads[i] = stored_quad(row_of_slot(slot, params.kv_base_quads, params.kv_block_stride_quads), quad);
    }
    begin_convert(lane, params.scale);
    for (var i = 0u; i < PLACES_PER_LANE; i++) { // unroll
        // A step prepared again after this was recorded may have more rows than the binding's buffers hold.
        if rows[i] < params.max_rows {
            out[params.out_base_quads + rows[i] * params.out_stride_quads + quad] = convert(quads[i], params.scale);
        }
    }
}
