// A weighted sum of two units of 16 bytes: 8 elements of bf16, two a word. Needs round.wgsl and merge_weights.wgsl.
fn merge_unit(p: vec4<u32>, s: vec4<u32>, w: Weights) -> vec4<u32> {
    let high_half = vec4<u32>(0xFFFF0000u);
    let low = w.prefix * bitcast<vec4<f32>>(p << vec4<u32>(16u)) + w.suffix * bitcast<vec4<f32>>(s << vec4<u32>(16u));
    let high = w.prefix * bitcast<vec4<f32>>(p & high_half) + w.suffix * bitcast<vec4<f32>>(s & high_half);
    return vec4<u32>(
        pair_of(low.x, high.x),
        pair_of(low.y, high.y),
        pair_of(low.z, high.z),
        pair_of(low.w, high.w),
    );
}

fn pair_of(low: f32, high: f32) -> u32 {
    return bf16_bits(bitcast<u32>(low)) | (bf16_bits(bitcast<u32>(high)) << 16u);
}
