// Decodes a quad, 4 consecutive elements, of f16 (two a word) to f32. Needs no SHADER_F16.
alias Quad = vec2<u32>;

fn decode_quad(quad: Quad) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(quad.x), unpack2x16float(quad.y));
}
