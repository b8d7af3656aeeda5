// Widens a quad, 4 consecutive elements, of bf16 to f32 bits and rounds it back. Concatenated with: lib/round.
alias QuadBf16 = vec2<u32>;

// -> f32 bits
fn widen_bf16(quad: QuadBf16) -> vec4<u32> {
    return vec4<u32>(quad.x << 16u, quad.x & 0xFFFF0000u, quad.y << 16u, quad.y & 0xFFFF0000u);
}

fn narrow_bf16(bits: vec4<u32>) -> QuadBf16 {
    return vec2<u32>(
        bf16_bits(bits.x) | (bf16_bits(bits.y) << 16u),
        bf16_bits(bits.z) | (bf16_bits(bits.w) << 16u),
    );
}
