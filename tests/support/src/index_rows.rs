//! Compares index keys and index queries with the oracle: docs/numbers.md has the tolerances.

use wgpu_mla::{Dtype, IndexFormat};

use crate::reference::index_scale;

/// The largest error of a scale, and of an element of a row in f32 as a share of the row's largest.
const ERROR: f64 = 1e-5;

/// Counts of codes: at most one in 100 may be the next one.
#[derive(Debug, Clone, Copy, Default)]
pub struct Codes {
    /// Codes compared.
    pub all: usize,
    /// Codes that are a neighbour of what was expected.
    pub neighbours: usize,
}

impl Codes {
    /// Compares a row of codes.
    ///
    /// # Errors
    /// A code that is no neighbour of what was expected.
    pub fn add(&mut self, got: &[u8], want: &[u8]) -> Result<(), String> {
        for (column, (&got, &want)) in got.iter().zip(want).enumerate() {
            self.all += 1;
            let apart = match (place(got), place(want)) {
                (None, None) => 0,
                (Some(got), Some(want)) => got.abs_diff(want),
                _ => u32::MAX,
            };
            if apart > 1 {
                return Err(format!("column {column} is code {got:#04x}, expected {want:#04x}"));
            }
            self.neighbours += apart as usize;
        }
        Ok(())
    }

    /// # Errors
    /// Too many neighbours.
    pub fn finish(self) -> Result<Self, String> {
        let Self { all, neighbours } = self;
        if neighbours * 100 > all {
            return Err(format!("{neighbours} of {all} codes are a neighbour of what was expected: 1 % may"));
        }
        Ok(self)
    }
}

/// The place of a code among all, both zeros at 0; `None` for NaN.
fn place(code: u8) -> Option<i32> {
    let magnitude = i32::from(code & 0x7F);
    (magnitude != 0x7F).then_some(if code & 0x80 == 0 { magnitude } else { -magnitude })
}

/// Whether a scale is right: exactly a power of two with `ue8m0`, else within 1e-5.
pub fn same_scale(format: &IndexFormat, got: f32, want: f64) -> bool {
    let got = f64::from(got);
    if want.is_nan() || format.ue8m0 {
        return got == want || got.is_nan() && want.is_nan();
    }
    (got - want).abs() <= ERROR * want
}

/// The scales that a row may have. With `ue8m0`, an amax that is next to 448 times a power of two, by less than a scale's tolerance, may
/// have come out on either side of it in f32; one that is exactly there has no other side.
fn scales_of(format: &IndexFormat, row: &[f64]) -> Vec<f64> {
    let scale = index_scale(format, row);
    let exact = index_scale(&IndexFormat { ue8m0: false, ..*format }, row);
    if !format.ue8m0 || scale.is_nan() || exact <= 1e-4 / 448.0 {
        return vec![scale];
    }
    if exact < scale && scale - exact <= ERROR * scale {
        vec![scale, 2.0 * scale]
    } else if exact > scale / 2.0 && exact - scale / 2.0 <= ERROR * scale {
        vec![scale, scale / 2.0]
    } else {
        vec![scale]
    }
}

/// Compares a row of codes, whose scale `is_scale` knows.
///
/// # Errors
/// What is wrong with it.
pub fn same_codes(
    format: &IndexFormat,
    want: &[f64],
    got: &[u8],
    is_scale: impl Fn(f64) -> bool,
    codes: &mut Codes,
) -> Result<(), String> {
    let scales = scales_of(format, want);
    let Some(scale) = scales.iter().copied().find(|&scale| is_scale(scale)) else {
        return Err(format!("the scale is none of {scales:?}"));
    };
    let encoded: Vec<f32> = want.iter().map(|x| (x / scale) as f32).collect();
    codes.add(got, &Dtype::E4m3.encode_all(&encoded))
}

/// Compares a row of elements: the error of f32, and half of a last place of the dtype.
///
/// # Errors
/// The first that is wrong.
pub fn same_elements(dtype: Dtype, want: &[f64], got: &[u8]) -> Result<(), String> {
    let amax = want.iter().fold(0.0f64, |amax, x| amax.max(x.abs()));
    let (rel, abs) = match dtype {
        Dtype::F16 => ((-11f64).exp2(), (-25f64).exp2()),
        Dtype::Bf16 => ((-8f64).exp2(), 1.2e-38),
        _ => (0.0, 1.2e-38),
    };
    for (column, (got, &want)) in dtype.decode_all(got).into_iter().zip(want).enumerate() {
        let allowed = ERROR * amax + want.abs() * rel * 1.001 + abs;
        let is_right = if want.is_nan() { got.is_nan() } else { (f64::from(got) - want).abs() <= allowed };
        if !is_right {
            return Err(format!("column {column} is {got:e}, expected {want:e} within {allowed:.1e}"));
        }
    }
    Ok(())
}
