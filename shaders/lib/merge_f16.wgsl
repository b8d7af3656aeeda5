// A weighted sum of two units of 16 bytes: 8 elements of f16, two a word. Needs round.wgsl and merge_weights.wgsl.
//
// Inputs are read by the built-in, which costs an instruction: a subnormal that it may flush, under 2^-14, is far below
// the tolerance. The built-in the other way may round either way, so the sum is rounded in integers.
fn merge_unit(p: vec4<u32>, s: vec4<u32>, w: Weights) -> vec4<u32> {
    let x = merge_pair(p.x, s.x, w);
    let y = merge_pair(p.y, s.y, w);
    let z = merge_pair(p.z, s.z, w);
    let last = merge_pair(p.w, s.w, w);
    return f16_words(vec4<u32>(x.x, y.x, z.x, last.x), vec4<u32>(x.y, y.y, z.y, last.y));
}

fn merge_pair(p: u32, s: u32, w: Weights) -> vec2<u32> {
    return bitcast<vec2<u32>>(w.prefix * unpack2x16float(p) + w.suffix * unpack2x16float(s));
}
