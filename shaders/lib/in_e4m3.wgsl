// Reads a quad, 4 consecutive elements, of e4m3 codes as f32 bits. Concatenated with: lib/round.
alias InQuad = u32;

// 4 codes times k_scale = mantissa * 2^(exponent - 23), as f32 bits: rounded once to nearest even, subnormals included; overflow gives
// infinity. In integer arithmetic, as WGSL lets a device round an f32 product either way.
fn in_bits4_scaled(q: InQuad, scale: E4m3Scale) -> vec4<u32> {
    let codes = vec4<u32>(q, q >> 8u, q >> 16u, q >> 24u);
    let sign = (codes & vec4<u32>(0x80u)) << vec4<u32>(24u);
    let magnitude = codes & vec4<u32>(0x7Fu);
    // |value| = m * 2^(e - 10) with 8 <= m <= 15; a subnormal, m * 2^-9, is normalised to that
    let e_code = magnitude >> vec4<u32>(3u);
    let is_normal = e_code > vec4<u32>(0u);
    let subnormal = magnitude & vec4<u32>(7u);
    let up = vec4<u32>(3u) - firstLeadingBit(max(subnormal, vec4<u32>(1u)));
    let m = select(subnormal << up, subnormal | vec4<u32>(8u), is_normal);
    let e = vec4<i32>(select(vec4<u32>(1u) - up, e_code, is_normal));
    // 2^26 <= product < 2^28: its top bit is bit 26 or 27
    let product = m * scale.mantissa;
    let high = product >> vec4<u32>(27u);
    let biased = e + vec4<i32>(scale.exponent + 120) + vec4<i32>(high);
    // Below a biased exponent of 1, f32 subnormals keep the last place of 1. The product is below 2^28, so a shift by 29 or more gives 0.
    let shift = min(vec4<u32>(3u) + high + vec4<u32>(max(vec4<i32>(1) - biased, vec4<i32>(0))), vec4<u32>(31u));
    let q_floor = product >> shift;
    let rest = product & ((vec4<u32>(1u) << shift) - vec4<u32>(1u));
    let half = vec4<u32>(1u) << (shift - vec4<u32>(1u));
    let is_up = (rest > half) | ((rest == half) & ((q_floor & vec4<u32>(1u)) == vec4<u32>(1u)));
    let rounded = q_floor + select(vec4<u32>(0u), vec4<u32>(1u), is_up);
    // biased - 1, as the implicit top bit of `rounded` adds one to the exponent.
    let base = vec4<u32>(max(biased - vec4<i32>(1), vec4<i32>(0))) << vec4<u32>(23u);
    let finite = select(min(base + rounded, vec4<u32>(F32_INF)), vec4<u32>(0u), magnitude == vec4<u32>(0u));
    return sign | select(finite, vec4<u32>(0x7FC00000u), magnitude == vec4<u32>(0x7Fu));
}
