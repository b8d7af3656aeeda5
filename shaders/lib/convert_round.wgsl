// Input and cache differ: through f32, then to nearest even.
fn convert(q: InQuad, scale: E4m3Scale) -> OutQuad {
    return out_quad(in_bits4(q), scale);
}
