// Decodes a quad, 4 consecutive elements, of bf16 (two a word, each the upper half of an f32) to f32.
alias Quad = vec2<u32>;

fn decode_quad(quad: Quad) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4<u32>(quad.x << 16u, quad.x & 0xFFFF0000u, quad.y << 16u, quad.y & 0xFFFF0000u));
}
