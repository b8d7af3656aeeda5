// merge_state's weighted sum of two units of 16 bytes, 8 elements of bf16. Concatenated with: lib/round, lib/merge_weights.
fn merge_unit(p: vec4<u32>, s: vec4<u32>, w: Weights) -> vec4<u32> {
    let high_half = vec4<u32>(0xFFFF0000u);
    let low = w.prefix * bitcast<vec4<f32>>(p << vec4<u32>(16u)) + w.suffix * bitcast<vec4<f32>>(s << vec4<u32>(16u));
    let high = w.prefix * bitcast<vec4<f32>>(p & high_half) + w.suffix * bitcast<vec4<f32>>(s & high_half);
    return bf16_words(bitcast<vec4<u32>>(low), bitcast<vec4<u32>>(high));
}
