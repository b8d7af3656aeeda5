// A quad is four neighbouring elements of a row: here binary16, two a word. Needs no SHADER_F16.
alias Quad = vec2<u32>;

fn decode_quad(quad: Quad) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(quad.x), unpack2x16float(quad.y));
}
