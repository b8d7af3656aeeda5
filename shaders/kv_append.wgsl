// Appends new tokens to the paged cache (vLLM's concat_and_cache_mla): a scatter by slot, with conversion to the cache's dtype.
//
//   for token: slot = slots[token]; skip if NO_SLOT
//     kv[slot / PAGE_SIZE][slot % PAGE_SIZE] = convert(kv_c[token] ++ k_pe[token])
//
// A quad is 4 consecutive elements. L, R and every offset and stride are multiples of 4, so a quad is 1, 2 or 4 whole words on both
// sides, and no two invocations write the same word.
//
// Tile: one quad of TOKENS_PER_LANE tokens a thread; all loads are issued before the first conversion, to overlap their latency.
// Concatenated with: lib/grid, lib/round, lib/in_*, lib/out_*, lib/convert_*, lib/slots, lib/append, lib/guard.
// Constants: GROUP, PAGE_SIZE, LATENT_QUADS, ROW_QUADS, TOKENS_PER_LANE.

@group(0) @binding(0) var<storage, read> table: array<u32>; // [1 + tokens] num_tokens, then slots
@group(1) @binding(0) var<uniform> params: AppendParams;
@group(1) @binding(1) var<storage, read> kv_c: array<InQuad>; // [tokens, L / 4], strided
@group(1) @binding(2) var<storage, read> k_pe: array<InQuad>; // [tokens, R / 4], strided
@group(1) @binding(3) var<storage, read_write> kv: array<OutQuad>; // [num_pages, page_size, (L + R) / 4], pages strided

@compute @workgroup_size(GROUP)
fn kv_append(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let item = item_of(group, groups, lane);
    let quad = item % ROW_QUADS;
    let first = item / ROW_QUADS * TOKENS_PER_LANE;
    // A step prepared again after this was recorded may have more tokens than the binding's buffers hold.
    let num_tokens = min(table[0], params.max_tokens);
    // Uniform over the workgroup, as a guard has barriers. What is past the tokens has no slot.
    if item_of(group, groups, 0u) / ROW_QUADS * TOKENS_PER_LANE >= num_tokens {
        return;
    }
    begin_lost(lane); // guarded
    var slots: array<u32, TOKENS_PER_LANE>;
    var quads: array<InQuad, TOKENS_PER_LANE>;
    for (var i = 0u; i < TOKENS_PER_LANE; i++) { // unroll
        slots[i] = select(NO_SLOT, table[1u + min(first + i, num_tokens - 1u)], first + i < num_tokens);
    }
    if quad < LATENT_QUADS {
        for (var i = 0u; i < TOKENS_PER_LANE; i++) { // unroll
            let token = min(first + i, num_tokens - 1u);
            quads[i] = kv_c[params.kv_c_base_quads + token * params.kv_c_stride_quads + quad];
        }
    } else {
        for (var i = 0u; i < TOKENS_PER_LANE; i++) { // unroll
            let token = min(first + i, num_tokens - 1u);
            quads[i] = k_pe[params.k_pe_base_quads + token * params.k_pe_stride_quads + quad - LATENT_QUADS];
        }
    }
    for (var i = 0u; i < TOKENS_PER_LANE; i++) { // unroll
        // NO_SLOT and slots of other slabs fail this test. The host checked the slots; the bound also covers a table made for a larger
        // pool.
        let slot = slots[i] - params.first_slot;
        if slot < params.num_slots {
            kv[append_row(slot, params) + quad] = convert(quads[i], params.scale);
            note_lost(in_bits4(quads[i]), params.guard_flushed, params.guard_top); // guarded
        }
    }
    add_lost(lane, params.guard_row, 0u); // guarded
}
