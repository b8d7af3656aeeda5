//! Element types: of each its size, its suffix in WGSL file names, its encoder and its decoder.

use half::{bf16, f16};

/// What an element of a query, a cache or an output is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of an f32.
    Bf16,
    /// FP8 `e4m3fn` of OCP: no infinities, largest 448, NaN is 0x7F and 0xFF.
    E4m3,
}

impl Dtype {
    /// Every dtype, widest first.
    pub const ALL: [Self; 4] = [Self::F32, Self::F16, Self::Bf16, Self::E4m3];

    /// The field's short name, which is also the suffix of the WGSL files that read it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::E4m3 => "e4m3",
        }
    }

    /// Whether its elements are 8-bit codes, which need a scale beside them.
    #[must_use]
    pub const fn is_fp8(self) -> bool {
        matches!(self, Self::E4m3)
    }

    /// Bytes of an element.
    #[inline]
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::E4m3 => 1,
        }
    }

    /// The largest finite number.
    pub(crate) const fn max(self) -> f32 {
        match self {
            Self::F32 => f32::MAX,
            Self::F16 => 65_504.0,
            Self::Bf16 => f32::from_bits(0x7F7F_0000),
            Self::E4m3 => E4M3_MAX,
        }
    }

    /// The nearest element to `x` (ties to even), little-endian, appended to `out`.
    ///
    /// f16 and bf16 overflow to infinity; e4m3 saturates to 448 and turns NaN into 0x7F.
    pub fn encode(self, x: f32, out: &mut Vec<u8>) {
        match self {
            Self::F32 => out.extend_from_slice(&x.to_le_bytes()),
            Self::F16 => out.extend_from_slice(&f16::from_f32(x).to_le_bytes()),
            Self::Bf16 => out.extend_from_slice(&bf16::from_f32(x).to_le_bytes()),
            Self::E4m3 => out.push(e4m3_encode(x)),
        }
    }

    /// [`Dtype::encode`] of a whole slice.
    #[must_use]
    pub fn encode_all(self, xs: &[f32]) -> Vec<u8> {
        let mut out = Vec::with_capacity(xs.len() * self.bytes());
        xs.iter().for_each(|&x| self.encode(x, &mut out));
        out
    }

    /// The value of the element at `index` of a little-endian array.
    ///
    /// # Panics
    /// Where the array ends before that element.
    #[inline]
    #[must_use]
    pub fn decode_at(self, bytes: &[u8], index: usize) -> f32 {
        let at = index * self.bytes();
        match self {
            Self::F32 => f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]),
            Self::F16 => f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32(),
            Self::Bf16 => bf16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32(),
            Self::E4m3 => e4m3_decode(bytes[at]),
        }
    }

    /// The values of a little-endian array; a torn last element is dropped.
    #[must_use]
    pub fn decode_all(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Self::F32 => bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect(),
            Self::F16 => bytes.as_chunks().0.iter().map(|&x| f16::from_le_bytes(x).to_f32()).collect(),
            Self::Bf16 => bytes.as_chunks().0.iter().map(|&x| bf16::from_le_bytes(x).to_f32()).collect(),
            Self::E4m3 => bytes.iter().map(|&code| e4m3_decode(code)).collect(),
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The largest finite e4m3 value.
pub const E4M3_MAX: f32 = 448.0;

/// The value of an e4m3fn code; 0x7F and 0xFF are NaN.
#[must_use]
pub fn e4m3_decode(code: u8) -> f32 {
    let exponent = i32::from(code >> 3 & 0xF);
    let mantissa = f32::from(code & 7);
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * (-9f32).exp2(),
        _ => (1.0 + mantissa / 8.0) * ((exponent - 7) as f32).exp2(),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The e4m3fn code nearest to `x`: ties to even, saturating at 448, NaN to 0x7F.
#[must_use]
pub fn e4m3_encode(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7F;
    }
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = x.abs().min(E4M3_MAX);
    // The unit in the last place is 2^(e-3) for normal values and 2^-9 below 2^-6; rounding up to the next
    // power of two carries into the exponent field by itself.
    let exponent = (magnitude.to_bits() >> 23) as i32 - 127;
    let code = if exponent < -6 {
        (magnitude * 512.0).round_ties_even() as u8
    } else {
        let steps = (magnitude * ((3 - exponent) as f32).exp2()).round_ties_even() as i32;
        (((exponent + 7) << 3) + steps - 8) as u8
    };
    sign | code
}

/// How well a `k_scale` fits data: see [`calibrate_k_scale`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Calibration {
    /// The scale: `x / k_scale` is what is stored.
    pub k_scale: f32,
    /// Finite elements whose magnitude is above `448 * k_scale`.
    pub saturated: usize,
}

/// A `k_scale` for an e4m3 cache from sample rows: `amax / 448`, or the next power of two above it.
///
/// With a power of two every backend stores the same bytes. Non-finite elements are left out; all-zero or
/// empty data gives 1.
#[must_use]
pub fn calibrate_k_scale(data: &[f32], power_of_two: bool) -> Calibration {
    let amax = data.iter().filter(|x| x.is_finite()).fold(0f32, |m, x| m.max(x.abs()));
    let k_scale = k_scale_of(amax, power_of_two);
    Calibration { k_scale, saturated: count_saturated(data, k_scale) }
}

/// The scale with which nothing of up to `amax` saturates.
pub(crate) fn k_scale_of(amax: f32, power_of_two: bool) -> f32 {
    let exact = amax / E4M3_MAX;
    if exact < f32::MIN_POSITIVE {
        return 1.0;
    }
    let below = f32::from_bits(exact.to_bits() & 0x7F80_0000);
    // The quotient may have been rounded down, to a power of two even.
    let too_small = |k_scale: f32| E4M3_MAX * k_scale < amax;
    match power_of_two {
        true if too_small(below) => 2.0 * below,
        true => below,
        false if too_small(exact) => exact.next_up(),
        false => exact,
    }
}

/// Finite elements that an e4m3 cache with this `k_scale` cannot hold.
#[must_use]
pub fn count_saturated(data: &[f32], k_scale: f32) -> usize {
    data.iter().filter(|x| x.is_finite() && x.abs() > E4M3_MAX * k_scale).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_codes_survive_a_round_trip() {
        for code in 0..=255u8 {
            let value = e4m3_decode(code);
            let want = if value.is_nan() { 0x7F } else { code };
            assert_eq!(e4m3_encode(value), want, "code {code:#x} is {value}");
        }
    }

    #[test]
    fn e4m3_rounds_to_nearest_even() {
        for code in 0..0x7Eu8 {
            let (low, high) = (e4m3_decode(code), e4m3_decode(code + 1));
            let middle = f32::midpoint(low, high);
            let even = if code % 2 == 0 { code } else { code + 1 };
            assert_eq!(e4m3_encode(middle), even, "halfway between {low} and {high}");
            assert_eq!(e4m3_encode(middle.next_down()), code);
            assert_eq!(e4m3_encode(middle.next_up()), code + 1);
            assert_eq!(e4m3_encode(-middle), even | 0x80);
        }
        for big in [449.0, 464.1, 1e30, f32::INFINITY] {
            assert_eq!((e4m3_encode(big), e4m3_encode(-big)), (0x7E, 0xFE));
        }
    }

    #[test]
    fn calibration_covers_the_data() {
        let data = [0.5, -3.0, f32::INFINITY, 100.0];
        assert_eq!(calibrate_k_scale(&data, false), Calibration { k_scale: 100.0 / 448.0, saturated: 0 });
        assert_eq!(calibrate_k_scale(&data, true).k_scale, 0.25);
        assert_eq!(calibrate_k_scale(&[0.0], true).k_scale, 1.0);
        assert_eq!(count_saturated(&data, 0.1), 1);
        for e in -100..100 {
            // 448 times a power of two, its neighbours, and others whose quotient is rounded either way.
            let edge = 448.0 * (e as f32).exp2();
            for amax in [edge.next_down(), edge, edge.next_up(), edge * 1.1, edge * 1.3, edge * 1.7] {
                for power_of_two in [false, true] {
                    let got = calibrate_k_scale(&[amax], power_of_two);
                    assert_eq!(got.saturated, 0, "{amax}");
                    assert!(448.0 * got.k_scale < amax * if power_of_two { 2.0 } else { 1.000_001 });
                }
            }
            assert_eq!(calibrate_k_scale(&[edge], true).k_scale, (e as f32).exp2());
        }
    }
}
