// Reads a quad, 4 consecutive elements, of f32 as its bits.
alias InQuad = vec4<u32>;

fn in_bits(code: u32) -> u32 {
    return code;
}

fn in_bits4(q: InQuad) -> vec4<u32> {
    return q;
}
