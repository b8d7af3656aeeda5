// A quad is four neighbouring elements of a row: here four bfloat16, each the upper half of an f32, in two words.
alias QuadBf16 = vec2<u32>;

fn decode_bf16(quad: QuadBf16) -> vec4<f32> {
    let low = quad << vec2<u32>(16u);
    let high = quad & vec2<u32>(0xFFFF0000u);
    return bitcast<vec4<f32>>(vec4<u32>(low.x, high.x, low.y, high.y));
}
