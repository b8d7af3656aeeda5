// convert where input and output dtypes differ: through f32, then rounded to nearest even. Concatenated with: lib/in_*, lib/out_*.
fn convert(q: InQuad, scale: E4m3Scale) -> OutQuad {
    return out_quad(in_bits4(q), scale);
}
