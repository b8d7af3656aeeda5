// What rope_append writes to a cache whose tokens are elements of one dtype. lib/append_record.wgsl is the alternative.
// Concatenated with: lib/append, lib/in_*, lib/out_*, lib/convert_*. Constants: LATENT_QUADS.

// A quad of the rotary part of the token in a slot.
fn put_rope(slot: u32, quad: u32, rope: InQuad) {
    kv[append_row(slot, params.append) + LATENT_QUADS + quad] = convert(rope, params.append.scale);
    note_lost(in_bits4(rope), params.append.guard_flushed, params.append.guard_top); // guarded
}

// A quad of the latent, if the invocation `has_latent`.
fn append_latent(lane: u32, token: u32, quad: u32, slot: u32, has_latent: bool) {
    if has_latent {
        let latent = kv_c[params.append.kv_c_base_quads + token * params.append.kv_c_stride_quads + quad];
        if slot < params.append.num_slots {
            kv[append_row(slot, params.append) + quad] = convert(latent, params.append.scale);
            note_lost(in_bits4(latent), params.append.guard_flushed, params.append.guard_top); // guarded
        }
    }
}
