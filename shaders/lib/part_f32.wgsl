// How a cooperative matrix gets f32: scaled by a power of two, so that the largest of them is from 2^14 up to 2^15, and in two parts.
// Part 0 is what f16 holds of it, part 1 the rest, but for 2^-22 of the element or 2^-39 of the largest. By bits: a compiler may take a
// conversion to f16 and back for nothing. Needs oct_f32.wgsl.

// The bits of the oct's largest magnitude.
fn top_f32(oct: OctF32) -> u32 {
    let magnitudes = max(bitcast<vec4<u32>>(abs(oct[0])), bitcast<vec4<u32>>(abs(oct[1])));
    let pair = max(magnitudes.xy, magnitudes.zw);
    return max(pair.x, pair.y);
}

fn part_f32(oct: OctF32, part: u32, factor: f32) -> HalfOct {
    let value = oct * factor;
    let high = mat2x4<f32>(high_f32(value[0]), high_f32(value[1]));
    if (part == 0u) {
        return HalfOct(vec4<f16>(high[0]), vec4<f16>(high[1]));
    }
    return HalfOct(vec4<f16>(value[0] - high[0]), vec4<f16>(value[1] - high[1]));
}

fn high_f32(x: vec4<f32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(x) & vec4<u32>(0xFFFFE000u));
}
