//! Compares results by three criteria: non-finite values must match, each element must be within abs OR rel, and the cosine
//! distance of the whole array must be small. Never panics. docs/numbers.md has the tolerances.

use std::fmt;

use wgpu_mla::Dtype;

/// The allowed error of an array.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    /// Absolute error of an element.
    pub abs: f64,
    /// Relative error of an element: either of both suffices.
    pub rel: f64,
    /// If set, `(elements of a row, error as a share of the row's largest magnitude)` stands in for `abs`.
    pub row: Option<(usize, f64)>,
    /// `1 - cos` of the angle between both arrays.
    pub cos: f64,
}

impl Tolerance {
    /// A decode's output. `u` is the largest |latent| in the case, `latent` the elements of a row, and
    /// `rounds_p` says that the variant rounds the weights to f16.
    pub fn decode(cache: Dtype, query: Dtype, out: Dtype, rounds_p: bool, u: f64, latent: usize) -> Self {
        let exact = [cache, query, out] == [Dtype::F32; 3] && !rounds_p;
        if exact {
            return Self { abs: 0.0, rel: 0.0, row: Some((latent, 1e-5)), cos: 1e-9 };
        }
        let abs = if rounds_p { 1.5e-3 } else { 8e-4 } * u.max(1.0);
        Self { abs, rel: 2.01 / 128.0, row: None, cos: 5e-6 }
    }

    /// A decode's LSE, natural.
    pub fn lse() -> Self {
        // The cosine of an array of logarithms says nothing.
        Self { abs: 1e-5, rel: 8.01 / 65536.0, row: None, cos: f64::INFINITY }
    }

    /// The output of a `merge_state`.
    pub fn merge(dtype: Dtype) -> Self {
        let error = match dtype {
            Dtype::F32 => 2e-6,
            Dtype::F16 => 1e-3,
            Dtype::Bf16 | Dtype::E4m3 => 2e-2,
        };
        Self { abs: error, rel: error, row: None, cos: f64::INFINITY }
    }

    /// The LSE of a `merge_state`.
    pub fn merge_lse() -> Self {
        Self { abs: 2e-6, rel: 2e-6, row: None, cos: f64::INFINITY }
    }
}

/// What a comparison found.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// What was compared.
    pub what: String,
    /// Elements compared.
    pub elements: usize,
    /// Largest absolute error of a finite element.
    pub worst_abs: f64,
    /// Largest error as a share of what is allowed there: above 1 is a failure.
    pub worst_ratio: f64,
    /// Cosine distance of the finite elements.
    pub one_minus_cos: f64,
    /// The first difference that is not allowed.
    pub failure: Option<String>,
}

impl Report {
    /// Whether everything is within its tolerance.
    pub fn ok(&self) -> bool {
        self.failure.is_none()
    }

    /// The report as an error where something is wrong.
    pub fn into_result(self) -> Result<Self, String> {
        if self.ok() { Ok(self) } else { Err(self.to_string()) }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, elements, worst_abs, worst_ratio, one_minus_cos, failure } = self;
        write!(
            f,
            "{what}: {elements} elements, max error {worst_abs:.2e} ({worst_ratio:.3} of the allowed), "
        )?;
        write!(f, "1 - cos {one_minus_cos:.1e}")?;
        match failure {
            Some(failure) => write!(f, ", WRONG: {failure}"),
            None => f.write_str(", ok"),
        }
    }
}

/// Compares `got` with `want`.
pub fn close(what: &str, got: &[f32], want: &[f64], tolerance: &Tolerance) -> Report {
    let mut report = Report {
        what: what.to_owned(),
        elements: want.len(),
        worst_abs: 0.0,
        worst_ratio: 0.0,
        one_minus_cos: 0.0,
        failure: None,
    };
    if got.len() != want.len() {
        report.failure = Some(format!("{} elements, expected {}", got.len(), want.len()));
        return report;
    }
    let (row_len, row_share) = tolerance.row.unwrap_or((want.len(), 0.0));
    let row_len = row_len.max(1);
    let mut angle = Angle::default();
    for (row, (got, want)) in got.chunks(row_len).zip(want.chunks(row_len)).enumerate() {
        let row_max = want.iter().filter(|x| x.is_finite()).fold(0f64, |max, x| max.max(x.abs()));
        let abs = tolerance.abs + row_share * row_max;
        for (column, (&got, &want)) in got.iter().zip(want).enumerate() {
            let (got, index) = (f64::from(got), row * row_len + column);
            if !(got.is_finite() && want.is_finite()) {
                if got != want && !(got.is_nan() && want.is_nan()) {
                    report.fail(|| format!("[{index}] is {got}, expected {want}"));
                }
                continue;
            }
            angle.add(got, want);
            let (error, allowed) = ((got - want).abs(), abs.max(tolerance.rel * want.abs()));
            // Nothing is allowed beside an expected 0 of a row of zeros: an empty row is exact.
            let ratio = if error == 0.0 { 0.0 } else { error / allowed };
            report.worst_abs = report.worst_abs.max(error);
            report.worst_ratio = report.worst_ratio.max(ratio);
            if ratio > 1.0 {
                report.fail(|| format!("[{index}] is {got:e}, expected {want:e}: off by {error:.2e}"));
            }
        }
    }
    report.one_minus_cos = angle.one_minus_cos();
    if report.one_minus_cos > tolerance.cos {
        let distance = report.one_minus_cos;
        report.fail(|| format!("1 - cos is {distance:.2e}, allowed {:.0e}", tolerance.cos));
    }
    report
}

impl Report {
    fn fail(&mut self, describe: impl FnOnce() -> String) {
        self.failure.get_or_insert_with(describe);
    }
}

/// Sums for the angle between two arrays.
#[derive(Default)]
struct Angle {
    got: f64,
    want: f64,
    difference: f64,
    dot: f64,
}

impl Angle {
    fn add(&mut self, got: f64, want: f64) {
        self.got += got * got;
        self.want += want * want;
        self.difference += (got - want) * (got - want);
        self.dot += got * want;
    }

    fn one_minus_cos(&self) -> f64 {
        let product = (self.got * self.want).sqrt();
        if self.difference == 0.0 {
            0.0
        } else if product == 0.0 {
            1.0
        } else {
            (1.0 - self.dot / product).max(0.0)
        }
    }
}
