// Outputs of e4m3: 4 elements are 4 bytes. Needs round.wgsl.
alias OutQuad = u32;

fn out_quad(bits: vec4<u32>, scale: E4m3Scale) -> OutQuad {
    return e4m3_scaled_bits(bits.x, scale)
        | (e4m3_scaled_bits(bits.y, scale) << 8u)
        | (e4m3_scaled_bits(bits.z, scale) << 16u)
        | (e4m3_scaled_bits(bits.w, scale) << 24u);
}
