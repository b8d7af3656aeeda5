//! How a kernel divides what it has in registers by the scale of e4m3 codes.

/// `CodeScale` of codes.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct CodeScale {
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
        let scale = scale * factor;
        Self { factor, scale, inverse: 1.0 / scale, reserved: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::CodeScale;
    use crate::base::dtype::{e4m3_decode, e4m3_encode};

    /// `e4m3_code` of codes.cuh, line by line.
    fn code(x: f32, by: &CodeScale) -> u8 {
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
            let check = |x: f32| assert_eq!(code(x, &by), nearest(x, scale), "{x:e} / {scale:e}");
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
}
