// Stores a quad, 4 consecutive elements, of f32 bits as f32. Concatenated with: lib/round, for E4m3Scale.
alias OutQuad = vec4<u32>;

fn out_code(bits: u32) -> u32 {
    return bits;
}

// A NaN is made quiet, as hardware and the crate `half` do.
fn out_quad(bits: vec4<u32>, scale: E4m3Scale) -> OutQuad {
    let is_nan = (bits & vec4<u32>(0x7FFFFFFFu)) > vec4<u32>(F32_INF);
    return bits | select(vec4<u32>(0u), vec4<u32>(0x400000u), is_nan);
}
