// A quad, 4 consecutive elements, of f32: nothing to decode.
alias Quad = vec4<f32>;

fn decode_quad(quad: Quad) -> vec4<f32> {
    return quad;
}
