// A weighted sum of two units of 16 bytes: 8 elements of f16, two a word. Needs round.wgsl and merge_weights.wgsl.
//
// Inputs are read by the built-in, which costs an instruction. A subnormal that it may flush, under 2^-14, is far below the tolerance, and
// so is what f16_pair does with one. The weights add up to 1: a sum of finite inputs does not overflow.
fn merge_unit(p: vec4<u32>, s: vec4<u32>, w: Weights) -> vec4<u32> {
    return vec4<u32>(merge_pair(p.x, s.x, w), merge_pair(p.y, s.y, w), merge_pair(p.z, s.z, w), merge_pair(p.w, s.w, w));
}

fn merge_pair(p: u32, s: u32, w: Weights) -> u32 {
    return f16_pair(bitcast<vec2<u32>>(w.prefix * unpack2x16float(p) + w.suffix * unpack2x16float(s)));
}
