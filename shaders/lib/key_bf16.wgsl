// Keys for cooperative matrices from a bf16 cache: an oct (8 consecutive elements, two a word) converted to f16.
//
// Exact for magnitudes from 2^-17 to 65280, within 2^-25 below. Larger ones become infinite, which shows in the scores: the item is then
// recomputed in f32 (lib/wide_rows.wgsl). A driver that rounded toward zero would give 65504 instead, undetected; the test group
// hard_data would fail there.
alias KvOct = vec4<u32>;

const KEY_UNIT = 1.0; // scale of a staged key

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
