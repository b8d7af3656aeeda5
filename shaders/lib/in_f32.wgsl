// Inputs of f32: 4 elements are 16 bytes.
alias InQuad = vec4<u32>;

fn in_bits(code: u32) -> u32 {
    return code;
}

fn in_bits4(q: InQuad) -> vec4<u32> {
    return q;
}
