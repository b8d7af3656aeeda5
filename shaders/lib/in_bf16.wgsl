// Reads a quad, 4 consecutive elements, of bf16 as f32 bits. A signalling NaN stays one; lib/out_* makes it quiet.
alias InQuad = vec2<u32>;

// bf16 bits -> f32 bits
fn in_bits(code: u32) -> u32 {
    return code << 16u;
}

fn in_bits4(q: InQuad) -> vec4<u32> {
    return vec4<u32>(q.x << 16u, q.x & 0xFFFF0000u, q.y << 16u, q.y & 0xFFFF0000u);
}
