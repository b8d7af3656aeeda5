// Rounds an oct, 8 consecutive elements, from f32 to bf16, two a word. Concatenated with: lib/round.
alias OutOct = vec4<u32>;

fn encode_out_pair(pair: vec2<f32>) -> u32 {
    let bits = bitcast<vec2<u32>>(pair);
    return bf16_bits(bits.x) | (bf16_bits(bits.y) << 16u);
}

fn encode_out(oct: mat2x4<f32>) -> OutOct {
    return vec4<u32>(
        encode_out_pair(oct[0].xy),
        encode_out_pair(oct[0].zw),
        encode_out_pair(oct[1].xy),
        encode_out_pair(oct[1].zw),
    );
}
