// A quad is four neighbouring elements of a row: here f32.
alias QuadF32 = vec4<u32>;

fn widen_f32(quad: QuadF32) -> vec4<u32> {
    return quad;
}

fn narrow_f32(bits: vec4<u32>) -> QuadF32 {
    return bits;
}
