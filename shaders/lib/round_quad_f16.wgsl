// Widens a quad, 4 consecutive elements, of f16 to f32 bits and rounds it back. Concatenated with: lib/round.
alias QuadF16 = vec2<u32>;

// -> f32 bits
fn widen_f16(quad: QuadF16) -> vec4<u32> {
    return vec4<u32>(
        f32_bits_of_f16(quad.x & 0xFFFFu),
        f32_bits_of_f16(quad.x >> 16u),
        f32_bits_of_f16(quad.y & 0xFFFFu),
        f32_bits_of_f16(quad.y >> 16u),
    );
}

fn narrow_f16(bits: vec4<u32>) -> QuadF16 {
    return vec2<u32>(
        f16_bits(bits.x) | (f16_bits(bits.y) << 16u),
        f16_bits(bits.z) | (f16_bits(bits.w) << 16u),
    );
}
