//! The oracle of e4m3 codes with a scale.

use wgpu_mla::e4m3_decode;

/// The code nearest to `value / scale`, ties to the even one, saturating at 448, with the sign of the value; 0x7F for NaN.
///
/// The quotient of two f32 in f64 is on the same side of every tie as the exact one.
pub fn e4m3_code(value: f64, scale: f32) -> u8 {
    let quotient = value / f64::from(scale);
    if quotient.is_nan() {
        return 0x7F;
    }
    let magnitude = |code: u8| f64::from(e4m3_decode(code));
    let near = quotient.abs().min(448.0);
    let below = (0..=0x7E).rev().find(|&code| magnitude(code) <= near).expect("0 is below");
    let up = below < 0x7E && {
        let tie = f64::midpoint(magnitude(below), magnitude(below + 1));
        near > tie || (near == tie && below % 2 == 1)
    };
    (if quotient.is_sign_negative() { 0x80 } else { 0 }) | (below + u8::from(up))
}

/// [`e4m3_code`] of each.
pub fn e4m3_codes(values: &[f32], scale: f32) -> Vec<u8> {
    values.iter().map(|&value| e4m3_code(value.into(), scale)).collect()
}
