// Rounds a quad, 4 consecutive elements, from f32 bits to e4m3 codes of the exact x / k_scale. Concatenated with: lib/round.
//
// Fast path, by interval arithmetic: y = 128 * |x| / k_scale lies between |x| * inv_low and |x| * inv_high. Each bound is rounded to
// e4m3 by an f32 addition, which rounds to nearest even:
//
//   base = the power of two at or below y, at least 128 * 2^-6, below which codes are subnormal
//   sum = base + y * 2^-20 = base + n * ulp(base), n = y in eighths of base, to nearest even
//   code = 8 * (exponent of base - 1) + n; 8 times the exponent bits of 2^1 are 0 in a byte
//
// Where both bounds give the same sum it is that of the exact quotient, as rounding is monotonic. Otherwise, next to a tie, and for
// saturation, NaN, extreme scales, and devices whose additions do not round to nearest even, which WGSL does not promise, integer
// arithmetic decides (`exact_quad`).
fn code_quad(bits: vec4<u32>, scale: E4m3Scale) -> u32 {
    let magnitude = bits & vec4<u32>(0x7FFFFFFFu);
    let low = bitcast<vec4<f32>>(magnitude) * scale.inv_low;
    let high = bitcast<vec4<f32>>(magnitude) * scale.inv_high;
    let base = bitcast<vec4<f32>>(max(bitcast<vec4<u32>>(low) & vec4<u32>(F32_INF), vec4<u32>(0x40000000u)));
    let sum = bitcast<vec4<u32>>(base + low * 0x1p-20f);
    let sum_high = bitcast<vec4<u32>>(base + high * 0x1p-20f);
    // `&`, not `&&`: that would compile to a branch each.
    let is_sure = all((magnitude <= vec4<u32>(scale.max_bits)) & (sum == sum_high)) & adds_to_nearest_even(scale.two_to_24);
    if !is_sure {
        return exact_quad(bits, scale);
    }
    let codes = sum + (sum >> vec4<u32>(20u)); // the code is the lowest byte
    let signs = ((bits.x >> 24u) & 0x80u) | ((bits.y >> 16u) & 0x8000u) | ((bits.z >> 8u) & 0x800000u) | (bits.w & 0x80000000u);
    return signs | (codes.x & 0xFFu) | ((codes.y & 0xFFu) << 8u) | ((codes.z & 0xFFu) << 16u) | (codes.w << 24u);
}

fn exact_quad(bits: vec4<u32>, scale: E4m3Scale) -> u32 {
    return e4m3_scaled_bits(bits.x, scale)
        | (e4m3_scaled_bits(bits.y, scale) << 8u)
        | (e4m3_scaled_bits(bits.z, scale) << 16u)
        | (e4m3_scaled_bits(bits.w, scale) << 24u);
}

// Tests the device at run time, with a number unknown to the compiler: 2^24 + 1 and 2^24 + 3 are ties.
fn adds_to_nearest_even(two_to_24: f32) -> bool {
    return (bitcast<u32>(two_to_24 + 1.0) == 0x4B800000u) & (bitcast<u32>(two_to_24 + 3.0) == 0x4B800002u);
}
