// How a cooperative matrix gets its keys: bfloat16, each the upper half of an f32, two a word, made binary16.
//
// That is exact from 2^-17 up to 65280, and within 2^-25 below. Larger ones are noticed, since they become infinite: see
// wide_rows.wgsl. A driver whose conversion rounded to zero would make them 65504, unnoticed; the test group hard_data would tell.
alias KvOct = vec4<u32>;

const KEY_UNIT = 1.0; // what a staged key has to be multiplied with

fn float_key(oct: KvOct) -> mat2x4<f32> {
    let low = bitcast<vec4<f32>>(oct << vec4<u32>(16u));
    let high = bitcast<vec4<f32>>(oct & vec4<u32>(0xFFFF0000u));
    return mat2x4<f32>(vec4<f32>(low.x, high.x, low.y, high.y), vec4<f32>(low.z, high.z, low.w, high.w));
}

fn half_key(oct: KvOct) -> HalfOct {
    let key = float_key(oct);
    return HalfOct(vec4<f16>(key[0]), vec4<f16>(key[1]));
}

fn odd_bits(oct: KvOct) -> u32 {
    return 0u;
}

const ODD = 0u;
