// Outputs of e4m3: 4 elements are 4 bytes. Needs round.wgsl.
//
// Exact, and fast where that is easy. The quotient lies between x * inv_low and x * inv_high, each of which an addition
// rounds to e4m3:
//
//   base = the power of two at or below the quotient, at least 2^-6, where codes become subnormal
//   base + quotient * 2^-20 = base + n * (last place of base), n = the quotient in eighths of base, to nearest even
//   code = 8 * (exponent of base) + n + a constant, and base holds that constant in its lowest bits
//
// Where both give one code it is the exact quotient's, as rounding keeps the order. Where they do not, next to a tie, and
// for NaN, for extreme scales, and on a device whose additions do not round to nearest even, which WGSL does not promise,
// integer arithmetic decides.
alias OutQuad = u32;

const LEAST_BASE = 0x3C800000u; // of 2^-6
// 8 * (127 + e) + BASE_BITS, modulo 256, is the code of 2^e less 8. Even, so that ties are seen as they are.
const BASE_BITS = 56u;

fn out_quad(bits: vec4<u32>, scale: E4m3Scale) -> OutQuad {
    let magnitude = bits & vec4<u32>(0x7FFFFFFFu);
    let x = bitcast<vec4<f32>>(min(magnitude, vec4<u32>(scale.top_bits)));
    let low = x * scale.inv_low;
    let high = x * scale.inv_high;
    let base_bits = max(bitcast<vec4<u32>>(low) & vec4<u32>(F32_INF), vec4<u32>(LEAST_BASE)) | vec4<u32>(BASE_BITS);
    let base = bitcast<vec4<f32>>(base_bits);
    let sum = bitcast<vec4<u32>>(base + low * 0x1p-20f);
    let sum_high = bitcast<vec4<u32>>(base + high * 0x1p-20f);
    let is_sure = all(sum == sum_high) && all(magnitude <= vec4<u32>(F32_INF)) && adds_to_nearest_even(scale.two_to_24);
    if !is_sure {
        return exact_quad(bits, scale);
    }
    let codes = sum + (sum >> vec4<u32>(20u)); // in the lowest byte
    let signs = ((bits.x >> 24u) & 0x80u) | ((bits.y >> 16u) & 0x8000u) | ((bits.z >> 8u) & 0x800000u) | (bits.w & 0x80000000u);
    return signs | (codes.x & 0xFFu) | ((codes.y & 0xFFu) << 8u) | ((codes.z & 0xFFu) << 16u) | (codes.w << 24u);
}

fn exact_quad(bits: vec4<u32>, scale: E4m3Scale) -> OutQuad {
    return e4m3_scaled_bits(bits.x, scale)
        | (e4m3_scaled_bits(bits.y, scale) << 8u)
        | (e4m3_scaled_bits(bits.z, scale) << 16u)
        | (e4m3_scaled_bits(bits.w, scale) << 24u);
}

// Asked of the device itself, with a number that the compiler does not know: 2^24 + 1 and 2^24 + 3 are ties.
fn adds_to_nearest_even(two_to_24: f32) -> bool {
    return bitcast<u32>(two_to_24 + 1.0) == 0x4B800000u && bitcast<u32>(two_to_24 + 3.0) == 0x4B800002u;
}
