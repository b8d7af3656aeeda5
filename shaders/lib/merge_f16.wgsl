// merge_state's weighted sum of two units of 16 bytes, 8 elements of f16. Concatenated with: lib/round, lib/merge_weights.
//
// Inputs are read by unpack2x16float, one instruction. It may flush subnormals, and f16_pair may too: those are below 2^-14, far below the
// tolerance. The weights add up to 1, so a sum of finite inputs does not overflow.
fn merge_unit(p: vec4<u32>, s: vec4<u32>, w: Weights) -> vec4<u32> {
    return vec4<u32>(merge_pair(p.x, s.x, w), merge_pair(p.y, s.y, w), merge_pair(p.z, s.z, w), merge_pair(p.w, s.w, w));
}

fn merge_pair(p: u32, s: u32, w: Weights) -> u32 {
    return f16_pair(bitcast<vec2<u32>>(w.prefix * unpack2x16float(p) + w.suffix * unpack2x16float(s)));
}
