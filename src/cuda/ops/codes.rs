//! How a kernel divides what it has in registers by the scale of e4m3 codes.

/// `E4m3Scale` of round.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct E4m3Scale {
    k_scale: f32,
    inv_low: f32,
    inv_high: f32,
    max_bits: u32,
}

impl E4m3Scale {
    pub(super) fn new(k_scale: f32) -> Self {
        let scale = f64::from(k_scale);
        let is_power_of_two = k_scale.to_bits().trailing_zeros() >= 23;
        // A product is rounded by at most 2^-24 of itself, and each bound by as much here.
        let margin = if is_power_of_two { 0.0 } else { (-22f64).exp2() };
        // Within these limits no code depends on a subnormal number.
        if !((-100f64).exp2()..100f64.exp2()).contains(&scale) {
            return Self { k_scale, inv_low: 0.0, inv_high: 0.0, max_bits: 0 };
        }
        Self {
            k_scale,
            inv_low: (128.0 * (1.0 - margin) / scale) as f32,
            inv_high: (128.0 * (1.0 + margin) / scale) as f32,
            max_bits: ((456.0 * scale) as f32).to_bits(),
        }
    }
}

/// `CodeScale` of codes.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct CodeScale {
    fast: E4m3Scale,
    factor: f32,
    scale: f32,
    inverse: f32,
    reserved: u32,
}

impl CodeScale {
    /// A normal, positive scale.
    pub(super) fn new(scale: f32) -> Self {
        // Within 2^-62 to 2^63 no product that decides a code is subnormal or past f32's range.
        let factor = match scale {
            _ if scale < (-62f32).exp2() => 64f32.exp2(),
            _ if scale >= 63f32.exp2() => (-64f32).exp2(),
            _ => 1.0,
        };
        let fast = E4m3Scale::new(scale);
        let scale = scale * factor;
        Self { fast, factor, scale, inverse: 1.0 / scale, reserved: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::{CodeScale, E4m3Scale};
    use crate::base::dtype::{e4m3_decode, e4m3_encode};

    /// `e4m3_codes` of codes.cuh: `e4m3_fast` of round.cuh, line by line, where it is sure.
    fn code(x: f32, by: &CodeScale) -> u8 {
        let magnitude = x.abs();
        let (low, high) = (magnitude * by.fast.inv_low, magnitude * by.fast.inv_high);
        let base = f32::from_bits((low.to_bits() & f32::INFINITY.to_bits()).max(0x4000_0000));
        let [sum, other] = [low, high].map(|bound| bound.mul_add((-20f32).exp2(), base).to_bits());
        if sum == other && magnitude.to_bits() <= by.fast.max_bits {
            (sum + (sum >> 20)) as u8 | (x.to_bits() >> 24 & 0x80) as u8
        } else {
            exact(x, by)
        }
    }

    /// `e4m3_code` of codes.cuh, line by line.
    fn exact(x: f32, by: &CodeScale) -> u8 {
        let a = x.abs() * by.factor;
        let y = (a * by.inverse).min(448.0);
        let biased = (y.to_bits() >> 23).max(121);
        let unit = f32::from_bits((biased - 3) << 23);
        let n = (y * f32::from_bits((257 - biased) << 23)).trunc();
        let above = (-((n + 0.5) * unit)).mul_add(by.scale, a);
        let low = n as u32;
        let up = u32::from(above > 0.0 || (above == 0.0 && low & 1 == 1));
        let code = (((biased - 120) << 3) + low - 8 + up).min(0x7E) as u8;
        if x.is_nan() { 0x7F } else { code | (x.to_bits() >> 24 & 0x80) as u8 }
    }

    /// What the f64 quotient is rounded to: it is on the same side of every tie as the exact one.
    fn nearest(x: f32, scale: f32) -> u8 {
        let quotient = f64::from(x) / f64::from(scale);
        let near = quotient.abs().min(448.0);
        let below = (0..0x7Eu8).rev().find(|&code| f64::from(e4m3_decode(code)) <= near).unwrap_or(0);
        let middle = f64::midpoint(e4m3_decode(below).into(), e4m3_decode(below + 1).into());
        let up = near > middle || (near == middle && below % 2 == 1);
        let sign = if quotient.is_sign_negative() { 0x80 } else { 0 };
        if x.is_nan() { 0x7F } else { sign | (below + u8::from(up)) }
    }

    #[test]
    fn codes_are_those_of_the_exact_quotient() {
        let scales =
            [1.0, 0.37, 1.5, 0.099_999_994, f32::MIN_POSITIVE, 1.1e-19, 3.3e-20, 1e19, 1e20, f32::MAX];
        for scale in scales {
            let by = CodeScale::new(scale);
            let check = |x: f32| {
                let nearest = nearest(x, scale);
                assert_eq!([code(x, &by), exact(x, &by)], [nearest; 2], "{x:e} / {scale:e}");
            };
            for code in 0..0x7Eu8 {
                let middle = f32::midpoint(e4m3_decode(code), e4m3_decode(code + 1));
                for at in
                    [e4m3_decode(code), middle].map(|value| (f64::from(value) * f64::from(scale)) as f32)
                {
                    for x in [at.next_down(), at, at.next_up()] {
                        check(x);
                        check(-x);
                    }
                }
            }
            for x in [0.0, -0.0, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-45, 448.0 * scale] {
                check(x);
            }
            for i in 0..1u32 << 14 {
                check(f32::from_bits(i.wrapping_mul(0x9E37_79B1)));
            }
        }
        assert_eq!(code(464.0, &CodeScale::new(1.0)), e4m3_encode(464.0));
    }

    #[test]
    fn the_inverses_stay_on_their_sides_of_a_rounded_product() {
        let rounding = (-24f64).exp2();
        for i in 1..1u32 << 16 {
            // mantissas of all kinds, exponents of the fast path
            let bits = i.wrapping_mul(0x9E37_79B1);
            let k_scale = f32::from_bits((bits & 0x7F_FFFF) | ((27 + i % 200) << 23));
            let (scale, k_scale) = (E4m3Scale::new(k_scale), f64::from(k_scale));
            assert!(scale.max_bits != 0);
            if bits & 0x7F_FFFF != 0 {
                assert!(f64::from(scale.inv_low) * k_scale * (1.0 + rounding) < 128.0, "{k_scale}");
                assert!(f64::from(scale.inv_high) * k_scale * (1.0 - rounding) > 128.0, "{k_scale}");
            }
        }
        for e in -126..=127 {
            let scale = E4m3Scale::new(f64::from(e).exp2() as f32);
            assert_eq!(scale.max_bits != 0, (-100..100).contains(&e));
            if scale.max_bits != 0 {
                let inverse = f64::from(7 - e).exp2() as f32;
                assert_eq!((scale.inv_low, scale.inv_high), (inverse, inverse));
            }
        }
    }
}
