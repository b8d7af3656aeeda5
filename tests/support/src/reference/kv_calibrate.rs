//! The oracle of `kv_calibrate`.

use wgpu_mla::CalibrationStats;

/// The largest finite magnitude, how many finite elements are above `448 * k_scale`, how many are not finite, and how many
/// there are.
pub fn kv_calibrate(data: &[f32], k_scale: f32) -> CalibrationStats {
    let finite: Vec<f64> = data.iter().filter(|x| x.is_finite()).map(|x| f64::from(x.abs())).collect();
    // The product is made in f32, where it is infinite for a large scale.
    let limit = f64::from(448.0 * k_scale);
    CalibrationStats {
        amax: finite.iter().copied().fold(0.0, f64::max) as f32,
        saturated: finite.iter().filter(|&&x| x > limit).count() as u64,
        non_finite: (data.len() - finite.len()) as u64,
        elements: data.len() as u64,
    }
}
