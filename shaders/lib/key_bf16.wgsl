// How a cooperative matrix gets its keys: bfloat16, each the upper half of an f32, two a word, made binary16.
//
// That is exact from 2^-17 up to 65280, and within 2^-25 below. Where a key is larger, the item is done a second time with
// the keys divided by the power of two that brings the largest below 2^15.
struct HalfOct {
    low: vec4<f16>,
    high: vec4<f16>,
}

alias KvOct = vec4<u32>;

const KEY_UNIT = 1.0; // what a staged key has to be multiplied with, on the first attempt
const KEY_ATTEMPTS = 2u;

fn float_key(oct: KvOct) -> mat2x4<f32> {
    let low = bitcast<vec4<f32>>(oct << vec4<u32>(16u));
    let high = bitcast<vec4<f32>>(oct & vec4<u32>(0xFFFF0000u));
    return mat2x4<f32>(vec4<f32>(low.x, high.x, low.y, high.y), vec4<f32>(low.z, high.z, low.w, high.w));
}

fn half_key(oct: KvOct, shrink: f32) -> HalfOct {
    let key = float_key(oct) * shrink;
    return HalfOct(vec4<f16>(key[0]), vec4<f16>(key[1]));
}

fn largest_key(oct: KvOct) -> f32 {
    let key = float_key(oct);
    let largest = max(abs(key[0]), abs(key[1]));
    return max(max(largest.x, largest.y), max(largest.z, largest.w));
}
