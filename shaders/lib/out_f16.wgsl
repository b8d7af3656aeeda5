// Rounds a quad, 4 consecutive elements, from f32 bits to f16. Concatenated with: lib/round.
alias OutQuad = vec2<u32>;

// f32 bits -> f16 bits
fn out_code(bits: u32) -> u32 {
    return f16_bits(bits);
}

fn out_quad(bits: vec4<u32>, scale: E4m3Scale) -> OutQuad {
    return vec2<u32>(
        out_code(bits.x) | (out_code(bits.y) << 16u),
        out_code(bits.z) | (out_code(bits.w) << 16u),
    );
}
