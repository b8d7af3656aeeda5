// Decodes an oct, 8 consecutive elements, of FP8 e4m3fn codes (four a word) to f32, on every device.
alias OctE4m3 = vec2<u32>;

const SCALE_E4M3 = 0.00390625; // scale of a decoded element: 2^-8

// e4m3fn: sign, 4 exponent bits (bias 7), 3 mantissa bits; 0x7F and 0xFF are NaN. Exponent and mantissa, with a bit set above them, are
// an f32 of at least 2 that is 2^8 times the value of a normal code. A subnormal code reads as 2 (1 + m/8) and should be 4 m/8: twice
// as much, less 4. The smaller of the two is right for every code, and no f32 subnormal occurs that a device might flush.
fn magnitude_e4m3(word: u32) -> vec4<f32> {
    let moved = vec4<u32>(word << 20u, word << 12u, word << 4u, word >> 4u);
    let above = bitcast<vec4<f32>>((moved & vec4<u32>(0x07F00000u)) | vec4<u32>(0x40000000u));
    return min(above, fma(vec4<f32>(2.0), above, vec4<f32>(-4.0)));
}

fn with_sign_e4m3(magnitude: vec4<u32>, word: u32) -> vec4<f32> {
    let sign = vec4<u32>(word << 24u, word << 16u, word << 8u, word) & vec4<u32>(0x80000000u);
    return bitcast<vec4<f32>>(magnitude | sign);
}

fn decode_e4m3_word(word: u32) -> vec4<f32> {
    let magnitude = magnitude_e4m3(word);
    let bits = select(bitcast<vec4<u32>>(magnitude), vec4<u32>(0x7FC00000u), magnitude > vec4<f32>(114688.0));
    return with_sign_e4m3(bits, word);
}

fn decode_e4m3(oct: OctE4m3) -> mat2x4<f32> {
    return mat2x4<f32>(decode_e4m3_word(oct.x), decode_e4m3_word(oct.y));
}

// For values, where a NaN code need not decode to NaN.
fn decode_finite_e4m3(oct: OctE4m3) -> mat2x4<f32> {
    return mat2x4<f32>(
        with_sign_e4m3(bitcast<vec4<u32>>(magnitude_e4m3(oct.x)), oct.x),
        with_sign_e4m3(bitcast<vec4<u32>>(magnitude_e4m3(oct.y)), oct.y),
    );
}
