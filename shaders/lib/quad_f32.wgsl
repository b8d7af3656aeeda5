// A quad is four neighbouring elements of a row: here it is what it decodes to.
alias Quad = vec4<f32>;

fn decode_quad(quad: Quad) -> vec4<f32> {
    return quad;
}
