// Decodes an oct, 8 consecutive elements, of bf16 (two a word, each the upper half of an f32) to f32.
alias OctBf16 = vec4<u32>;

fn decode_bf16(oct: OctBf16) -> mat2x4<f32> {
    let low = bitcast<vec4<f32>>(oct << vec4<u32>(16u));
    let high = bitcast<vec4<f32>>(oct & vec4<u32>(0xFFFF0000u));
    return mat2x4<f32>(vec4<f32>(low.x, high.x, low.y, high.y), vec4<f32>(low.z, high.z, low.w, high.w));
}
