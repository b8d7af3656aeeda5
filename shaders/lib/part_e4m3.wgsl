// e4m3 weights of head_project_coop.wgsl: an oct (8 consecutive codes) as f16, exactly 2^-8 times the codes' values, subnormals included,
// which tensor cores keep. A NaN code becomes a NaN. Concatenated with: lib/oct_e4m3_f16, lib/half_oct.

// The f32 bits of 2^14, for which exponent_for gives a scale of 1.
fn top_e4m3(oct: OctE4m3) -> u32 {
    return 0x46800000u;
}

fn part_e4m3(oct: OctE4m3, part: u32, factor: f32) -> HalfOct {
    let even = halves_or_nan_e4m3(oct << vec2<u32>(8u)); // of elements 0 and 2, 4 and 6
    let odd = halves_or_nan_e4m3(oct); // of elements 1 and 3, 5 and 7
    let first = (even & vec2<u32>(0xFFFFu)) | (odd << vec2<u32>(16u));
    let second = (even >> vec2<u32>(16u)) | (odd & vec2<u32>(0xFFFF0000u));
    return half_oct(vec4<u32>(first.x, second.x, first.y, second.y));
}
