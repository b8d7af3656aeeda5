// A quad, 4 consecutive elements, of f32 as its bits.
alias QuadF32 = vec4<u32>;

fn widen_f32(quad: QuadF32) -> vec4<u32> {
    return quad;
}

fn narrow_f32(bits: vec4<u32>) -> QuadF32 {
    return bits;
}
