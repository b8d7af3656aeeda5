// How appends write a record: whole words, each by one invocation. Concatenated with: lib/record, lib/record_scale, lib/append, lib/in_*.
// Constants: COPIES_ROPE, 1 where the input is bf16, whose bits are copied.

// A quad of the latent, and the scale of the group that it begins.
fn put_codes(record: u32, quad: u32, bits: vec4<u32>, exponent: u32, two_to_24: f32) {
    kv[record + latent_word(quad)] = codes_of(bits, exponent, two_to_24);
    if quad % GROUP_QUADS == 0u {
        kv[record + scale_word(quad)] = exponent << 23u;
    }
}

// A quad of the rotary part.
fn put_rope_quad(record: u32, quad: u32, bits: vec4<u32>) {
    kv[record + rope_word(quad)] = rope_bits(bits.x) | (rope_bits(bits.y) << 16u);
    kv[record + rope_word(quad) + 1u] = rope_bits(bits.z) | (rope_bits(bits.w) << 16u);
}

fn rope_bits(bits: u32) -> u32 {
    return select(bf16_bits(bits), bits >> 16u, COPIES_ROPE == 1u);
}
