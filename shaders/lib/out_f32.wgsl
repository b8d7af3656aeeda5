// Outputs of f32: 4 elements are 16 bytes. Needs round.wgsl for E4m3Scale.
alias OutQuad = vec4<u32>;

fn out_code(bits: u32) -> u32 {
    return bits;
}

fn out_quad(bits: vec4<u32>, scale: E4m3Scale) -> OutQuad {
    return bits;
}
