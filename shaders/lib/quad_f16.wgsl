// A quad is four neighbouring elements of a row: here four binary16 in two words. Needs no SHADER_F16.
alias QuadF16 = vec2<u32>;

fn decode_f16(quad: QuadF16) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(quad.x), unpack2x16float(quad.y));
}
