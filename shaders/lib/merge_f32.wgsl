// merge_state's weighted sum of two units of 16 bytes, 4 elements of f32. Concatenated with: lib/merge_weights.
fn merge_unit(p: vec4<u32>, s: vec4<u32>, w: Weights) -> vec4<u32> {
    return bitcast<vec4<u32>>(w.prefix * bitcast<vec4<f32>>(p) + w.suffix * bitcast<vec4<f32>>(s));
}
