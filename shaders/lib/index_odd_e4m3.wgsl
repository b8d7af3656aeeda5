// Whether an oct (8 consecutive elements) of e4m3 codes has a NaN, and an element as bits of f32. Concatenated with: lib/oct_e4m3*.

// Adding 1 to a byte flips its top bit only if the byte is 0x7F or 0xFF, the NaN codes. Adding to four bytes at once, a carry out of 0xFF
// may flip the byte above too, but then there was a NaN already.
fn has_odd_e4m3(oct: OctE4m3) -> bool {
    let next = oct + vec2<u32>(0x01010101u);
    return (((next.x ^ oct.x) | (next.y ^ oct.y)) & 0x80808080u) != 0u;
}

fn bits_of_e4m3(oct: OctE4m3, i: u32) -> u32 {
    let code = (oct[i / 4u] >> (i % 4u * 8u)) & 0xFFu;
    let element = SCALE_E4M3 * decode_finite_e4m3(vec2<u32>(code, 0u))[0].x;
    return select(bitcast<u32>(element), 0x7FC00000u, (code & 0x7Fu) == 0x7Fu);
}
