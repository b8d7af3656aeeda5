// Decodes an oct, 8 consecutive elements, of FP8 e4m3fn codes (four a word) to f32, through f16: half the work of lib/oct_e4m3.wgsl.
// For devices that keep f16 subnormals (Caps::f16_subnormals).
alias OctE4m3 = vec2<u32>;

const SCALE_E4M3 = 256.0; // scale of a decoded element: the exponent's bias is 8 higher in f16

// e4m3fn: sign, 4 exponent bits (bias 7), 3 mantissa bits; 0x7F and 0xFF are NaN. A code in the upper byte of an f16 is that f16 after
// all but its sign moved down by one bit. An e4m3 subnormal becomes an f16 subnormal.
fn halves_e4m3(bytes: vec2<u32>) -> vec2<u32> {
    return (bytes & vec2<u32>(0x80008000u)) | ((bytes >> vec2<u32>(1u)) & vec2<u32>(0x3F803F80u));
}

// The same, with an f16 NaN for a NaN code: adding 1 in its last place carries into the exponent's top bit, which no other code does.
fn halves_or_nan_e4m3(bytes: vec2<u32>) -> vec2<u32> {
    let magnitude = (bytes >> vec2<u32>(1u)) & vec2<u32>(0x3F803F80u);
    let nan = (magnitude + vec2<u32>(0x00800080u)) & vec2<u32>(0x40004000u);
    return (bytes & vec2<u32>(0x80008000u)) | magnitude | nan;
}

fn interleave_e4m3(even: vec2<u32>, odd: vec2<u32>) -> mat2x4<f32> {
    let e0 = unpack2x16float(even.x);
    let e1 = unpack2x16float(even.y);
    let o0 = unpack2x16float(odd.x);
    let o1 = unpack2x16float(odd.y);
    return mat2x4<f32>(vec4<f32>(e0.x, o0.x, e0.y, o0.y), vec4<f32>(e1.x, o1.x, e1.y, o1.y));
}

fn decode_e4m3(oct: OctE4m3) -> mat2x4<f32> {
    return interleave_e4m3(halves_or_nan_e4m3(oct << vec2<u32>(8u)), halves_or_nan_e4m3(oct));
}

// For values, where a NaN code need not decode to NaN.
fn decode_finite_e4m3(oct: OctE4m3) -> mat2x4<f32> {
    return interleave_e4m3(halves_e4m3(oct << vec2<u32>(8u)), halves_e4m3(oct));
}
