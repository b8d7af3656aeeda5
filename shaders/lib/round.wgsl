// Conversions between f32, f16, bf16 and e4m3 on bit patterns, in integer arithmetic.
//
// The built-ins do not serve: pack2x16float may round either way, subnormals may be flushed, and a shader may assume that no NaN and no
// infinity exist. Here every value is a u32 of its bits, and each of the 2^32 patterns converts exactly as on the host, by the crate
// `half` and `e4m3_encode`.

const F32_INF = 0x7F800000u;

// m / 2^shift, rounded to nearest even; 1 <= shift <= 31.
fn shift_right_rne(m: u32, shift: u32) -> u32 {
    let q = m >> shift;
    let rest = m & ((1u << shift) - 1u);
    let half = 1u << (shift - 1u);
    let up = rest > half || (rest == half && (q & 1u) == 1u);
    return q + select(0u, 1u, up);
}

// f32 bits -> f16 bits. Overflows to infinity; a NaN stays one, made quiet, with the top of its payload.
fn f16_bits(x: u32) -> u32 {
    let sign = (x >> 16u) & 0x8000u;
    let a = x & 0x7FFFFFFFu;
    // Below 2^-14: f16 subnormals, in units of 2^-24. Below 2^-25 the result is 0.
    if a < 0x38800000u {
        let e = a >> 23u;
        if e < 102u {
            return sign;
        }
        return sign | shift_right_rne((a & 0x7FFFFFu) | 0x800000u, 126u - e);
    }
    // Rebias the exponent by 127 - 15. From 2^16 on the result exceeds the bits of infinity, to which it is clamped.
    let normal = a - 0x38000000u;
    let rounded = min((normal + 0xFFFu + ((normal >> 13u) & 1u)) >> 13u, 0x7C00u);
    let nan = 0x7E00u | ((a >> 13u) & 0x3FFu);
    return sign | select(rounded, nan, a > F32_INF);
}

// f32 bits -> bf16 bits. Overflows to infinity; a NaN is made quiet.
fn bf16_bits(x: u32) -> u32 {
    let rounded = (x + 0x7FFFu + ((x >> 16u) & 1u)) >> 16u;
    return select(rounded, (x >> 16u) | 0x40u, (x & 0x7FFFFFFFu) > F32_INF);
}

// Two f16 codes in a word, of finite f32 below 65520. pack2x16float may round either way, so the bits that it would drop are rounded
// beforehand; below 2^-14, f16's subnormals, its rounding stands, or it flushes them.
fn f16_pair(bits: vec2<u32>) -> u32 {
    let magnitude = bits & vec2<u32>(0x7FFFFFFFu);
    let odd = (bits >> vec2<u32>(13u)) & vec2<u32>(1u);
    // The sum is clamped, as that of a NaN may carry into the sign bit.
    let up = min(magnitude + vec2<u32>(0xFFFu) + odd, vec2<u32>(0x7FFFFFFFu)) & vec2<u32>(0x7FFFE000u);
    return pack2x16float(bitcast<vec2<f32>>(up | (bits & vec2<u32>(0x80000000u))));
}

// Four words of two bf16 codes, low halves from `low`, high halves from `high`, both f32 bits. As bf16_bits, but with one test for NaN for
// all eight elements.
fn bf16_words(low: vec4<u32>, high: vec4<u32>) -> vec4<u32> {
    let no_sign = vec4<u32>(0x7FFFFFFFu);
    let inf = vec4<u32>(F32_INF);
    if any(((low & no_sign) > inf) | ((high & no_sign) > inf)) {
        return vec4<u32>(
            bf16_bits(low.x) | (bf16_bits(high.x) << 16u),
            bf16_bits(low.y) | (bf16_bits(high.y) << 16u),
            bf16_bits(low.z) | (bf16_bits(high.z) << 16u),
            bf16_bits(low.w) | (bf16_bits(high.w) << 16u),
        );
    }
    let shift = vec4<u32>(16u);
    let one = vec4<u32>(1u);
    let below_half = vec4<u32>(0x7FFFu);
    let low_up = low + below_half + ((low >> shift) & one);
    let high_up = high + below_half + ((high >> shift) & one);
    return (low_up >> shift) | (high_up & vec4<u32>(0xFFFF0000u));
}

// f16 bits -> f32 bits; a NaN is made quiet, as hardware and the crate `half` do.
fn f32_bits_of_f16(h: u32) -> u32 {
    let sign = (h & 0x8000u) << 16u;
    let e = (h >> 10u) & 0x1Fu;
    let m = h & 0x3FFu;
    if e == 31u {
        return sign | F32_INF | (m << 13u) | select(0u, 0x400000u, m != 0u);
    }
    if e != 0u {
        return sign | ((e + 112u) << 23u) | (m << 13u);
    }
    if m == 0u {
        return sign;
    }
    // Subnormal, m * 2^-24: every f16 subnormal is a normal f32.
    let top = firstLeadingBit(m);
    return sign | ((top + 103u) << 23u) | ((m << (23u - top)) & 0x7FFFFFu);
}

// bf16 bits -> f32 bits; a NaN is made quiet.
fn f32_bits_of_bf16(b: u32) -> u32 {
    return (b << 16u) | select(0u, 0x400000u, (b & 0x7FFFu) > 0x7F80u);
}

// An e4m3 cache holds x / k_scale. k_scale = mantissa * 2^(exponent - 23), 2^23 <= mantissa < 2^24.
struct E4m3Scale {
    inv_mantissa: f32, // 2^23 / mantissa, rounded
    exponent: i32,
    mantissa: u32,
    // For the fast path of code_e4m3.wgsl:
    max_bits: u32, // f32 bits of 456 * k_scale, the largest x that rounds to 448 without saturation
    inv_low: f32, // bounds of 128 / k_scale, wider than a product's rounding error; both exact for a power of two
    inv_high: f32,
    two_to_24: f32, // 2^24, or 0 where the scale is too small or too large for the fast path
    pad: u32,
}

const UNSCALED = E4m3Scale(1.0, 0, 0x800000u, 0x43E40000u, 128.0, 128.0, 16777216.0, 0u);

// f32 bits x -> e4m3 bits of the exact x / k_scale, rounded to nearest even. Saturates at 448, infinities too; NaN gives 0x7F.
fn e4m3_scaled_bits(x: u32, scale: E4m3Scale) -> u32 {
    let sign = (x >> 24u) & 0x80u;
    let a = x & 0x7FFFFFFFu;
    if a > F32_INF {
        return 0x7Fu;
    }
    if a == F32_INF {
        return sign | 0x7Eu;
    }
    if a == 0u {
        return sign;
    }
    // |x| = m * 2^(e - 23) with 2^23 <= m < 2^24, f32 subnormals included
    var e = i32(a >> 23u) - 127;
    var fraction = a & 0x7FFFFFu;
    if e == -127 {
        let top = firstLeadingBit(a);
        e = i32(top) - 149;
        fraction = (a << (23u - top)) & 0x7FFFFFu;
    }
    // The quotient of the mantissas, between 1/2 and 2, to within a few units in its last place.
    let product = bitcast<u32>(bitcast<f32>(0x3F800000u | fraction) * scale.inv_mantissa);
    let e_difference = e - scale.exponent;
    let e_quotient = e_difference + i32(product >> 23u) - 127;
    if e_quotient > 8 {
        return sign | 0x7Eu;
    }
    if e_quotient < -10 {
        return sign;
    }
    // 4 significant bits, fewer below 2^-6: `low` is the quotient's floor in units of the code's last place ..
    let e_code = max(e_quotient, -6);
    let low = ((product & 0x7FFFFFu) | 0x800000u) >> u32(20 + e_code - e_quotient);
    // .. and the side of low + 1/2 is decided exactly: fraction * 2^d / mantissa against (2 low + 1) / 2, both times 4, where
    // -2 <= d <= 4, so that neither side passes 2^31. Where `low` is off by one, the quotient is next to a whole number.
    let left = (fraction | 0x800000u) << u32(e_difference - e_code + 5);
    let right = ((2u * low + 1u) * scale.mantissa) << 1u;
    let up = left > right || (left == right && (low & 1u) == 1u);
    // Rounding up to the next power of two carries into the exponent by itself.
    let q = low + select(0u, 1u, up);
    return sign | min((u32(e_code + 7) << 3u) + q - 8u, 0x7Eu);
}

// f32 bits -> e4m3 bits.
fn e4m3_bits(x: u32) -> u32 {
    return e4m3_scaled_bits(x, UNSCALED);
}
