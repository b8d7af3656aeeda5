// An oct, 8 consecutive elements, in f16: the element type of the arrays that cooperative matrices are loaded from.
struct HalfOct {
    low: vec4<f16>,
    high: vec4<f16>,
}

// From words of two f16 codes, through u16: naga has no bitcast from u32 to f16.
fn half_oct(words: vec4<u32>) -> HalfOct {
    let low = vec4<u32>(words.x & 0xFFFFu, words.x >> 16u, words.y & 0xFFFFu, words.y >> 16u);
    let high = vec4<u32>(words.z & 0xFFFFu, words.z >> 16u, words.w & 0xFFFFu, words.w >> 16u);
    return HalfOct(bitcast<vec4<f16>>(vec4<u16>(low)), bitcast<vec4<f16>>(vec4<u16>(high)));
}
