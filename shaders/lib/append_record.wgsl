// What rope_append writes to a cache of records. lib/append_plain.wgsl is the alternative.
// Concatenated with: lib/append, lib/in_*, lib/record_scale, lib/record_put.

// A quad of the rotary part of the token in a slot.
fn put_rope(slot: u32, quad: u32, rope: InQuad) {
    put_rope_quad(append_row(slot, params.append), quad, in_bits4(rope));
    note_lost(in_bits4(rope), params.append.guard_flushed, params.append.guard_top); // guarded
}

// A quad of the latent, if the invocation `has_latent`. Each group of quads begins at a multiple of GROUP_QUADS invocations.
fn append_latent(lane: u32, token: u32, quad: u32, slot: u32, has_latent: bool) {
    begin_largest(lane);
    var bits: vec4<u32>;
    if has_latent {
        bits = in_bits4(kv_c[params.append.kv_c_base_quads + token * params.append.kv_c_stride_quads + quad]);
        add_largest(lane, 0u, bits);
    }
    end_largest();
    if has_latent && slot < params.append.num_slots {
        let exponent = scale_exponent(lane, 0u);
        put_codes(append_row(slot, params.append), quad, bits, exponent, params.append.scale.two_to_24);
        note_lost(bits, 0u, F32_INF - 1u); // guarded
    }
}
