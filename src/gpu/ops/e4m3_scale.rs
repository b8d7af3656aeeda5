//! How a shader divides by an e4m3 cache's scale.

use super::single::uniform;

uniform! {
    "E4m3Scale":
    pub struct Scale {
        inv_mantissa: f32,
        exponent: i32,
        mantissa: u32,
        max_bits: u32,
        inv_low: f32,
        inv_high: f32,
        two_to_24: f32,
        pad: u32,
    }
}

impl Scale {
    /// A scale `m * 2^e` with `1 <= m < 2`, as the shader divides by it.
    pub(super) fn new(k_scale: f32) -> Self {
        // An f64 holds every f32 as a normal number; the low bits of its mantissa are zeros.
        let scale = f64::from(k_scale);
        let fraction = scale.to_bits() & ((1 << 52) - 1);
        let mantissa = f64::from_bits(fraction | (1023 << 52));
        let exponent = (scale.to_bits() >> 52) as i32 - 1023;
        // A product is rounded by at most 2^-23 of itself, whichever way, and each bound by 2^-24 here.
        let margin = if fraction == 0 { 0.0 } else { (-22f64).exp2() };
        // Within these no number matters that may be flushed as subnormal: under 2^-126 / 2^-100 all codes are 0.
        let is_fast = (-100..100).contains(&exponent);
        Self {
            inv_mantissa: (1.0 / mantissa) as f32,
            exponent,
            mantissa: (fraction >> 29) as u32 | 0x80_0000,
            max_bits: ((456.0 * scale) as f32).to_bits(),
            inv_low: (128.0 * (1.0 - margin) / scale) as f32,
            inv_high: (128.0 * (1.0 + margin) / scale) as f32,
            two_to_24: if is_fast { 24f32.exp2() } else { 0.0 },
            pad: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Scale;

    #[test]
    fn a_scale_is_split_exactly() {
        for e in -127..=127 {
            let scale = Scale::new(f64::from(e).exp2() as f32);
            assert_eq!((scale.inv_mantissa, scale.exponent, scale.mantissa), (1.0, e, 0x80_0000));
            assert_eq!(scale.two_to_24 != 0.0, (-100..100).contains(&e));
            if scale.two_to_24 != 0.0 {
                let inverse = f64::from(7 - e).exp2() as f32;
                assert_eq!((scale.inv_low, scale.inv_high), (inverse, inverse));
            }
        }
        for (k_scale, exponent) in [(1.5, 0), (0.375, -2)] {
            let scale = Scale::new(k_scale);
            assert_eq!(
                (scale.inv_mantissa, scale.exponent, scale.mantissa),
                (1.0 / 1.5, exponent, 0xC0_0000)
            );
        }
    }

    #[test]
    fn the_inverses_stay_on_their_sides_of_a_rounded_product() {
        let rounding = (-23f64).exp2();
        for i in 1..1u32 << 16 {
            // mantissas over the whole range, with exponents that take the fast path
            let bits = i.wrapping_mul(0x9E37_79B1);
            let k_scale = f32::from_bits((bits & 0x7F_FFFF) | ((27 + i % 200) << 23));
            if bits & 0x7F_FFFF == 0 {
                continue;
            }
            let (scale, k_scale) = (Scale::new(k_scale), f64::from(k_scale));
            assert!(scale.two_to_24 != 0.0);
            assert!(f64::from(scale.inv_low) * k_scale * (1.0 + rounding) < 128.0, "{k_scale}");
            assert!(f64::from(scale.inv_high) * k_scale * (1.0 - rounding) > 128.0, "{k_scale}");
        }
    }
}
