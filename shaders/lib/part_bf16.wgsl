// bf16 operands of head_project_coop.wgsl: an oct (8 consecutive elements) converted to f16 after a scale by a power of two that brings
// the largest element into [2^14, 2^15). f16 then holds elements of at least 2^-32 of the largest exactly, and smaller ones within 2^-40
// of it, which is less than the rounding of f32 sums. Concatenated with: lib/oct_bf16, lib/half_oct.

// The f32 bits of the oct's largest magnitude.
fn top_bf16(oct: OctBf16) -> u32 {
    let magnitudes = max((oct << vec4<u32>(16u)) & vec4<u32>(0x7FFF0000u), oct & vec4<u32>(0x7FFF0000u));
    let pair = max(magnitudes.xy, magnitudes.zw);
    return max(pair.x, pair.y);
}

fn part_bf16(oct: OctBf16, part: u32, factor: f32) -> HalfOct {
    let value = decode_bf16(oct) * factor;
    return HalfOct(vec4<f16>(value[0]), vec4<f16>(value[1]));
}
