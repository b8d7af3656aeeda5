// An oct is eight neighbouring elements of a row: here FP8 e4m3fn bytes, four a word. For every device.
alias OctE4m3 = vec2<u32>;

// What a decoded oct is to be multiplied by.
const SCALE_E4M3 = 0.00390625;

// Sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7F and 0xFF are NaN. With a bit above them, exponent and mantissa
// are a number from 2 up, 2^8 too large. A subnormal is then (1 + m/8) 2 and should be 4 m/8: twice as much, less 4. The
// smaller of the two is right for every code, and no device has a subnormal to flush.
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

// Where a NaN code need not come out as NaN.
fn decode_finite_e4m3(oct: OctE4m3) -> mat2x4<f32> {
    return mat2x4<f32>(
        with_sign_e4m3(bitcast<vec4<u32>>(magnitude_e4m3(oct.x)), oct.x),
        with_sign_e4m3(bitcast<vec4<u32>>(magnitude_e4m3(oct.y)), oct.y),
    );
}
