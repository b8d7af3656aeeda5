//! The oracle of what rounding loses.

use wgpu_mla::{Dtype, GuardCounts};

/// How a value is rounded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rounding {
    /// To a dtype; codes are those of the quotient by the scale.
    To(Dtype, f32),
    /// To codes whose scale is made from the values.
    OwnScales,
}

/// What is lost of values: by comparison of the exact quotient with the ends of the dtype's range.
pub fn guard_counts(values: impl IntoIterator<Item = f32>, rounding: Rounding) -> GuardCounts {
    let (scale, [flushed, top]) = match rounding {
        Rounding::OwnScales => (1.0, [0.0, f64::MAX]),
        Rounding::To(Dtype::F32, _) => (1.0, [0.0, f64::MAX]),
        // Numbers from a power of two less half of the last place on become infinite; half of the least number becomes 0.
        Rounding::To(Dtype::F16, _) => (1.0, [(-25f64).exp2(), below(65_536.0 - 16.0)]),
        Rounding::To(Dtype::Bf16, _) => (1.0, [(-134f64).exp2(), below(128f64.exp2() - 119f64.exp2())]),
        Rounding::To(Dtype::E4m3, scale) => (f64::from(scale), [(-10f64).exp2(), 448.0]),
    };
    let mut counts = GuardCounts::default();
    for value in values {
        let quotient = (f64::from(value) / scale).abs();
        counts.nan += u32::from(quotient.is_nan());
        counts.saturated += u32::from(quotient > top);
        counts.flushed += u32::from(quotient > 0.0 && quotient <= flushed);
        if value.is_finite() {
            counts.amax = counts.amax.max(value.abs());
        }
    }
    counts
}

/// The number before.
fn below(x: f64) -> f64 {
    x.next_down()
}
