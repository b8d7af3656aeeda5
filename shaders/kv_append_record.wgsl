// Appends new tokens to a cache of records (vLLM's concat_and_cache_ds_mla): as kv_append.wgsl, with scales that are found here.
//
//   for token: slot = slots[token]; skip if NO_SLOT
//     for each RECORD_GROUP elements of kv_c[token]: scale = 2^ceil(log2(max(amax / 448, 1e-4)))
//     kv[slot / PAGE_SIZE][slot % PAGE_SIZE] = e4m3(kv_c[token] / scale) ++ scales ++ bf16(k_pe[token])
//
// A quad is 4 consecutive elements. A quad of the latent is a word of codes, one of the rotary part two words.
//
// Tile: one quad of TOKENS_PER_LANE tokens a thread. A token has ROW_ITEMS threads: the rotary part's are rounded up, so that each group of
// quads begins at a multiple of GROUP_QUADS threads.
// Concatenated with: lib/grid, lib/round, lib/in_*, lib/out_e4m3, lib/slots, lib/append, lib/record, lib/record_scale, lib/record_put,
// lib/guard.
// Constants: GROUP, PAGE_SIZE, LATENT_QUADS, ROW_QUADS, ROW_ITEMS, TOKENS_PER_LANE.

@group(0) @binding(0) var<storage, read> table: array<u32>; // [1 + tokens] num_tokens, then slots
@group(1) @binding(0) var<uniform> params: AppendParams;
@group(1) @binding(1) var<storage, read> kv_c: array<InQuad>; // [tokens, L / 4], strided
@group(1) @binding(2) var<storage, read> k_pe: array<InQuad>; // [tokens, R / 4], strided
@group(1) @binding(3) var<storage, read_write> kv: array<u32>; // [num_pages, page_size, RECORD_WORDS], pages strided

@compute @workgroup_size(GROUP)
fn kv_append(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let item = item_of(group, groups, lane);
    let quad = item % ROW_ITEMS;
    let first = item / ROW_ITEMS * TOKENS_PER_LANE;
    // A step prepared again after this was recorded may have more tokens than the binding's buffers hold.
    let num_tokens = min(table[0], params.max_tokens);
    // Uniform over the workgroup, as there are barriers.
    if item_of(group, groups, 0u) / ROW_ITEMS * TOKENS_PER_LANE >= num_tokens {
        return;
    }
    var slots: array<u32, TOKENS_PER_LANE>;
    var quads: array<InQuad, TOKENS_PER_LANE>;
    for (var i = 0u; i < TOKENS_PER_LANE; i++) { // unroll
        slots[i] = select(NO_SLOT, table[1u + min(first + i, num_tokens - 1u)], first + i < num_tokens);
    }
    let is_latent = quad < LATENT_QUADS;
    if is_latent {
        for (var i = 0u; i < TOKENS_PER_LANE; i++) { // unroll
            let token = min(first + i, num_tokens - 1u);
            quads[i] = kv_c[params.kv_c_base_quads + token * params.kv_c_stride_quads + quad];
        }
    } else {
        let rope_quad = min(quad, ROW_QUADS - 1u) - LATENT_QUADS;
        for (var i = 0u; i < TOKENS_PER_LANE; i++) { // unroll
            let token = min(first + i, num_tokens - 1u);
            quads[i] = k_pe[params.k_pe_base_quads + token * params.k_pe_stride_quads + rope_quad];
        }
    }
    begin_lost(lane); // guarded
    begin_largest(lane);
    if is_latent {
        for (var i = 0u; i < TOKENS_PER_LANE; i++) { // unroll
            add_largest(lane, i, in_bits4(quads[i]));
        }
    }
    end_largest();
    for (var i = 0u; i < TOKENS_PER_LANE; i++) { // unroll
        // NO_SLOT and slots of other slabs fail this test. The host checked the slots; the bound also covers a table made for a larger
        // pool.
        let slot = slots[i] - params.first_slot;
        if slot < params.num_slots && quad < ROW_QUADS {
            let record = append_row(slot, params);
            if is_latent {
                put_codes(record, quad, in_bits4(quads[i]), scale_exponent(lane, i), params.scale.two_to_24);
                note_lost(in_bits4(quads[i]), 0u, F32_INF - 1u); // guarded
            } else {
                put_rope_quad(record, quad - LATENT_QUADS, in_bits4(quads[i]));
                note_lost(in_bits4(quads[i]), params.guard_flushed, params.guard_top); // guarded
            }
        }
    }
    add_lost(lane, params.guard_row, 0u); // guarded
}
