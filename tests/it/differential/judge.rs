//! What is allowed: the tolerances of `docs/numbers.md`, and a comparison that names the element.

use wgpu_mla::Dtype;

/// The error that an element may have: `abs`, `rel` of it or `share` of its row's largest; and the angle of the whole array.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub abs: f64,
    pub rel: f64,
    pub share: f64,
    pub one_minus_cos: f64,
}

/// The largest |latent|, or 1.
pub fn largest(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().filter(|x| x.is_finite()).fold(1.0, |largest, x| largest.max(x.abs()))
}

/// A weight that is rounded to bf16 may be off by 2^-9 of itself, which few keys of the largest size do not average out: an H200 had
/// 1.5015e-3 u over 4 keys of +-300, and 1.5e-3 u is allowed for other dtypes.
const BF16_WEIGHTS: f64 = 1.0 / 512.0;

pub fn of_attention(dtypes: [Dtype; 3], rounds_weights: bool, u: f64) -> Limits {
    if dtypes == [Dtype::F32; 3] && !rounds_weights {
        return Limits { abs: 0.0, rel: 0.0, share: 1e-5, one_minus_cos: 1e-9 };
    }
    let abs = match dtypes[0] {
        _ if !rounds_weights => 8e-4,
        Dtype::Bf16 => BF16_WEIGHTS,
        _ => 1.5e-3,
    } * u;
    Limits { abs, rel: 2.01 / 128.0, share: 0.0, one_minus_cos: 5e-6 }
}

/// A layer of f32 sums three times. One of f16 has the limits of rounded weights, `u` being the largest expanded value. One of bf16 rounds
/// queries, keys, values and what each chunk of a prompt leaves to the 8 bits of its dtype, where a decode does so once.
pub fn of_layer(dtype: Dtype, rounds_weights: bool, u: f64) -> Limits {
    let rounded = of_attention([dtype; 3], true, u);
    match (of_attention([dtype; 3], rounds_weights, u), dtype) {
        (Limits { share, .. }, _) if share > 0.0 => {
            Limits { abs: 0.0, rel: 0.0, share: 2e-5, one_minus_cos: 1e-9 }
        }
        (_, Dtype::Bf16) => Limits { abs: 3e-3 * u, one_minus_cos: 2e-5, ..rounded },
        _ => rounded,
    }
}

pub const LSE: Limits = Limits { abs: 1e-5, rel: 8.01 / 65536.0, share: 0.0, one_minus_cos: f64::INFINITY };
pub const MERGED_LSE: Limits = Limits { abs: 2e-6, rel: 2e-6, share: 0.0, one_minus_cos: f64::INFINITY };

pub fn of_merge(dtype: Dtype) -> Limits {
    let error = match dtype {
        Dtype::F32 => 2e-6,
        Dtype::F16 => 1e-3,
        Dtype::Bf16 | Dtype::E4m3 => 2e-2,
    };
    Limits { abs: error, rel: error, share: 0.0, one_minus_cos: f64::INFINITY }
}

/// A projection's f32 sum, and half of the output's last place.
pub fn of_projection(output: Dtype) -> Limits {
    let (abs, rel, share, one_minus_cos) = match output {
        Dtype::F32 => (0.0, 0.0, 1e-5, 1e-9),
        Dtype::F16 => (6e-8, 1.01 / 1024.0, 2e-5, 5e-6),
        Dtype::Bf16 | Dtype::E4m3 => (0.0, 1.01 / 256.0, 2e-5, 5e-6),
    };
    Limits { abs, rel, share, one_minus_cos }
}

/// Compares `[tokens, heads, dim]`; says the element, what was expected, what came and what is allowed.
pub fn judge(what: &str, dims: [usize; 3], got: &[f64], want: &[f64], limits: &Limits) -> Result<(), String> {
    let [_, heads, dim] = dims;
    let count: usize = dims.iter().product();
    if [got.len(), want.len()] != [count; 2] {
        return Err(format!("{what}: expected {count} elements got {}", got.len()));
    }
    let (mut both, mut squares, mut apart) = (0.0, [0.0; 2], 0.0);
    for (row, (got, want)) in got.chunks(dim.max(1)).zip(want.chunks(dim.max(1))).enumerate() {
        let top = want.iter().filter(|x| x.is_finite()).fold(0.0f64, |top, x| top.max(x.abs()));
        for (column, (&got, &want)) in got.iter().zip(want).enumerate() {
            let allowed = (limits.abs + limits.share * top).max(limits.rel * want.abs());
            // An empty row of an output is exactly 0; NaN never compares.
            let is_fine = if got.is_finite() && want.is_finite() {
                // A NaN of a difference cannot be: both are finite.
                (got - want).abs() <= allowed
            } else {
                got == want || got.is_nan() && want.is_nan()
            };
            if !is_fine {
                let at = [row / heads, row % heads, column];
                return Err(format!("{what}{at:?} expected {want:e} got {got:e} tolerance {allowed:.1e}"));
            }
            if got.is_finite() && want.is_finite() {
                both += got * want;
                squares = [squares[0] + got * got, squares[1] + want * want];
                apart += (got - want) * (got - want);
            }
        }
    }
    let distance = if apart == 0.0 { 0.0 } else { 1.0 - both / (squares[0] * squares[1]).sqrt() };
    if distance > limits.one_minus_cos {
        return Err(format!(
            "{what}: 1 - cos expected 0 got {distance:.1e} tolerance {:.0e}",
            limits.one_minus_cos
        ));
    }
    Ok(())
}

/// Compares bytes of elements of a dtype; any NaN is as good as another.
pub fn same(what: &str, dtype: Dtype, row: usize, got: &[u8], want: &[u8]) -> Result<(), String> {
    let elem = dtype.bytes();
    if got.len() != want.len() {
        return Err(format!("{what}: expected {} bytes got {}", want.len(), got.len()));
    }
    for (index, (got, want)) in got.chunks(elem).zip(want.chunks(elem)).enumerate() {
        if got != want {
            let is_nan = |bytes| super::draw::values(dtype, bytes)[0].is_nan();
            if !(is_nan(got) && is_nan(want)) {
                let at = [index / row, index % row];
                return Err(format!("{what}{at:?} expected bytes {want:02x?} got {got:02x?} tolerance 0"));
            }
        }
    }
    Ok(())
}
