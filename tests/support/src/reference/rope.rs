//! The oracle of rotary embeddings.

use wgpu_mla::RopeLayout;

/// Arguments of [`rope`], dense arrays.
#[derive(Debug, Clone, Copy)]
pub struct Rotation<'a> {
    /// `[tokens, heads, R]`.
    pub x: &'a [f32],
    /// `[tokens]`.
    pub positions: &'a [i32],
    /// `[max_position, R]`, in each row `R / 2` cosines, then `R / 2` sines.
    pub cos_sin: &'a [f32],
    /// Heads of a token.
    pub num_heads: usize,
    /// `R`.
    pub rope_dim: usize,
    /// Which elements make a pair.
    pub layout: RopeLayout,
}

/// Each pair of `x`, as a complex number, times that of its position and place in the row: `[tokens, heads, R]`.
///
/// A position outside of the table counts as the nearest inside. A pair that holds an infinity or a NaN becomes two NaNs.
///
/// # Panics
/// Where the arrays do not have these shapes.
pub fn rope(args: &Rotation<'_>) -> Vec<f64> {
    let dim = args.rope_dim;
    let max_position = args.cos_sin.len() / dim;
    let mut y = vec![0.0; args.x.len()];
    for (row, (x, y)) in args.x.chunks(dim).zip(y.chunks_mut(dim)).enumerate() {
        let position = args.positions[row / args.num_heads].max(0) as usize;
        let angles = &args.cos_sin[position.min(max_position - 1) * dim..][..dim];
        for pair in 0..dim / 2 {
            let (re, im) = match args.layout {
                RopeLayout::Interleaved => (2 * pair, 2 * pair + 1),
                RopeLayout::HalfSplit => (pair, pair + dim / 2),
            };
            let [a, b] = [x[re], x[im]].map(f64::from);
            let [cos, sin] = [angles[pair], angles[pair + dim / 2]].map(f64::from);
            let is_number = a.is_finite() && b.is_finite();
            y[re] = if is_number { a * cos - b * sin } else { f64::NAN };
            y[im] = if is_number { a * sin + b * cos } else { f64::NAN };
        }
    }
    y
}
