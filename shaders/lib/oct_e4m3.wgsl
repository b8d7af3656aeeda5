// An oct is eight neighbouring elements of a row: here FP8 e4m3fn bytes, four a word.
alias OctE4m3 = vec2<u32>;

// Sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7F and 0xFF are NaN.
// Normal values become an f32 by moving the exponent's bias from 7 to 127. A subnormal is its mantissa times 2^-9;
// it is made from an integer because a device may flush f32 subnormals, which shorter tricks pass through.
fn decode_e4m3_word(word: u32) -> vec4<f32> {
    let code = (vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(0xFFu);
    let magnitude = code & vec4<u32>(0x7Fu);
    let normal = (magnitude << vec4<u32>(20u)) + vec4<u32>(120u << 23u);
    let subnormal = bitcast<vec4<u32>>(vec4<f32>(magnitude) * 0.001953125);
    var bits = select(normal, subnormal, magnitude < vec4<u32>(8u));
    bits = select(bits, vec4<u32>(0x7FC00000u), magnitude == vec4<u32>(0x7Fu));
    return bitcast<vec4<f32>>(bits | ((code & vec4<u32>(0x80u)) << vec4<u32>(24u)));
}

fn decode_e4m3(oct: OctE4m3) -> mat2x4<f32> {
    return mat2x4<f32>(decode_e4m3_word(oct.x), decode_e4m3_word(oct.y));
}
