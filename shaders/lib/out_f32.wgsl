// Outputs of f32: 4 elements are 16 bytes. Needs round.wgsl for E4m3Scale.
alias OutQuad = vec4<u32>;

fn out_code(bits: u32) -> u32 {
    return bits;
}

// a NaN is made quiet, as the hardware and `half` do
fn out_quad(bits: vec4<u32>, scale: E4m3Scale) -> OutQuad {
    let is_nan = (bits & vec4<u32>(0x7FFFFFFFu)) > vec4<u32>(F32_INF);
    return bits | select(vec4<u32>(0u), vec4<u32>(0x400000u), is_nan);
}
