// Rounds a quad, 4 consecutive elements, from f32 bits to e4m3 codes. Concatenated with: lib/round, lib/code_e4m3.
alias OutQuad = u32;

fn out_quad(bits: vec4<u32>, scale: E4m3Scale) -> OutQuad {
    return code_quad(bits, scale);
}
