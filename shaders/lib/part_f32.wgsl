// f32 operands of head_project_coop.wgsl: an oct (8 consecutive elements) split into two f16 parts, after a scale by a power of two that
// brings the largest element into [2^14, 2^15). Part 0 is the element truncated to f16's mantissa, part 1 the remainder; together they
// are within 2^-22 of the element, or 2^-39 of the largest. Concatenated with: lib/oct_f32, lib/half_oct.

// The f32 bits of the oct's largest magnitude.
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

// Part 0 is truncated by its bits: a compiler may remove a conversion to f16 and back.
fn high_f32(x: vec4<f32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(x) & vec4<u32>(0xFFFFE000u));
}
