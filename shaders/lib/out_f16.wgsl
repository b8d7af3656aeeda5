// How four neighbouring output elements are stored: rounded to binary16, two a word. Needs lib/round.wgsl.
alias OutQuad = vec2<u32>;

fn encode_out(quad: vec4<f32>) -> OutQuad {
    let bits = bitcast<vec4<u32>>(quad);
    return vec2<u32>(f16_bits(bits.x) | (f16_bits(bits.y) << 16u), f16_bits(bits.z) | (f16_bits(bits.w) << 16u));
}
