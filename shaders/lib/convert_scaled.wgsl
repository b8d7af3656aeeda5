// The cache holds e4m3 codes: times k_scale in f32, then to nearest even.
fn convert(q: InQuad, scale: E4m3Scale) -> OutQuad {
    return out_quad(in_bits4_scaled(q, scale), scale);
}
