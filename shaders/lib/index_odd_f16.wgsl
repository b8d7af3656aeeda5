// Whether an oct (8 consecutive elements) of f16 has an infinity or a NaN, and an element as bits of f32. Concatenated with: lib/oct_f16.

// An exponent of all ones carries out of its five bits.
fn has_odd_f16(oct: OctF16) -> bool {
    let next = ((oct & vec4<u32>(0x7C007C00u)) + vec4<u32>(0x04000400u)) & vec4<u32>(0x80008000u);
    return (next.x | next.y | next.z | next.w) != 0u;
}

fn bits_of_f16(oct: OctF16, i: u32) -> u32 {
    let code = (oct[i / 2u] >> (i % 2u * 16u)) & 0xFFFFu;
    let odd = ((code & 0x8000u) << 16u) | 0x7F800000u | ((code & 0x3FFu) << 13u);
    let is_finite = (code & 0x7C00u) != 0x7C00u;
    return select(odd, bitcast<u32>(unpack2x16float(select(0u, code, is_finite)).x), is_finite);
}
