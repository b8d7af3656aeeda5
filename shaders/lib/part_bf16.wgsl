// How a cooperative matrix gets bfloat16: scaled by a power of two, so that the largest of them is from 2^14 up to 2^15. f16 then holds
// all that are at least 2^-32 of it, and the others within 2^-40 of it: less than f32 sums lose. Needs oct_bf16.wgsl.

// The bits, as f32, of the oct's largest magnitude.
fn top_bf16(oct: OctBf16) -> u32 {
    let magnitudes = max((oct << vec4<u32>(16u)) & vec4<u32>(0x7FFF0000u), oct & vec4<u32>(0x7FFF0000u));
    let pair = max(magnitudes.xy, magnitudes.zw);
    return max(pair.x, pair.y);
}

fn part_bf16(oct: OctBf16, part: u32, factor: f32) -> HalfOct {
    let value = decode_bf16(oct) * factor;
    return HalfOct(vec4<f16>(value[0]), vec4<f16>(value[1]));
}
