// Whether an oct (8 consecutive elements) of bf16 has an infinity or a NaN, and an element as bits of f32. Concatenated with: lib/oct_bf16.

// An exponent of all ones carries out of its eight bits.
fn has_odd_bf16(oct: OctBf16) -> bool {
    let next = ((oct & vec4<u32>(0x7F807F80u)) + vec4<u32>(0x00800080u)) & vec4<u32>(0x80008000u);
    return (next.x | next.y | next.z | next.w) != 0u;
}

fn bits_of_bf16(oct: OctBf16, i: u32) -> u32 {
    return (oct[i / 2u] >> (i % 2u * 16u)) << 16u;
}
