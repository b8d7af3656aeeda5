// A weighted sum of two units of 16 bytes: 8 elements of f16, two a word. Needs round.wgsl and merge_weights.wgsl.
//
// Inputs are read by the built-in, which costs an instruction: a subnormal that it may flush, under 2^-14, is far below
// the tolerance. The built-in the other way may round either way, so the sum is rounded in integers.
fn merge_unit(p: vec4<u32>, s: vec4<u32>, w: Weights) -> vec4<u32> {
    return vec4<u32>(
        merge_pair(p.x, s.x, w),
        merge_pair(p.y, s.y, w),
        merge_pair(p.z, s.z, w),
        merge_pair(p.w, s.w, w),
    );
}

fn merge_pair(p: u32, s: u32, w: Weights) -> u32 {
    let sum = bitcast<vec2<u32>>(w.prefix * unpack2x16float(p) + w.suffix * unpack2x16float(s));
    return f16_bits(sum.x) | (f16_bits(sum.y) << 16u);
}
