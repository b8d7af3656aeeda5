// A quad is four neighbouring elements of a row: here one vec4<f32>.
alias QuadF32 = vec4<f32>;

fn decode_f32(quad: QuadF32) -> vec4<f32> {
    return quad;
}
