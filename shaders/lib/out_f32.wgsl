// How four neighbouring output elements are stored: as they are.
alias OutQuad = vec4<f32>;

fn encode_out(quad: vec4<f32>) -> OutQuad {
    return quad;
}
