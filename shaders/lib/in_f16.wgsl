// Reads a quad, 4 consecutive elements, of f16 as f32 bits. Concatenated with: lib/round.
alias InQuad = vec2<u32>;

// f16 bits -> f32 bits
fn in_bits(code: u32) -> u32 {
    return f32_bits_of_f16(code);
}

fn in_bits4(q: InQuad) -> vec4<u32> {
    return vec4<u32>(in_bits(q.x & 0xFFFFu), in_bits(q.x >> 16u), in_bits(q.y & 0xFFFFu), in_bits(q.y >> 16u));
}
