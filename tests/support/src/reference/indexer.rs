//! The oracle of index keys and index queries.

use wgpu_mla::{IndexFormat, RopeLayout};

/// Elements of a key, and of a head of a query.
const DIM: usize = 128;
/// Pairs of them that rotate.
const PAIRS: usize = 32;

/// Arguments of [`index_keys`] and [`index_queries`], dense arrays.
#[derive(Debug, Clone, Copy)]
pub struct IndexRows<'a> {
    /// How rows are rotated.
    pub format: IndexFormat,
    /// `[tokens, heads, 128]`; keys have one head.
    pub x: &'a [f32],
    /// Heads of a token.
    pub num_heads: usize,
    /// `[tokens]`; unread without RoPE, as `cos_sin`.
    pub positions: &'a [i32],
    /// `[max_position, 64]`, in each row 32 cosines, then 32 sines.
    pub cos_sin: &'a [f32],
}

/// The LayerNorm of index keys.
#[derive(Debug, Clone, Copy)]
pub struct IndexNorm<'a> {
    /// `[128]`.
    pub weight: &'a [f32],
    /// `[128]`.
    pub bias: &'a [f32],
    /// Added to the variance.
    pub eps: f64,
}

/// Index keys before they are rounded or quantised, `[tokens, 128]`: LayerNorm, then as [`index_queries`].
///
/// # Panics
/// Where the arrays do not have these shapes.
pub fn index_keys(args: &IndexRows<'_>, norm: &IndexNorm<'_>) -> Vec<f64> {
    rows(args, |x| {
        let mean = x.iter().sum::<f64>() / DIM as f64;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / DIM as f64;
        let deviation = (variance + norm.eps).sqrt();
        for (i, x) in x.iter_mut().enumerate() {
            *x = (*x - mean) / deviation * f64::from(norm.weight[i]) + f64::from(norm.bias[i]);
        }
    })
}

/// Index queries before they are rounded or quantised, `[tokens, heads, 128]`: RoPE of the first 64 elements, then the Hadamard matrix.
/// A row of which an element is not finite becomes 128 NaNs. A position outside of the table counts as the nearest inside.
///
/// # Panics
/// Where the arrays do not have these shapes.
pub fn index_queries(args: &IndexRows<'_>) -> Vec<f64> {
    rows(args, |_| {})
}

fn rows(args: &IndexRows<'_>, first: impl Fn(&mut [f64])) -> Vec<f64> {
    let row = |(row, x): (usize, &[f32])| {
        if x.iter().any(|x| !x.is_finite()) {
            return vec![f64::NAN; DIM];
        }
        let mut x: Vec<f64> = x.iter().map(|&x| x.into()).collect();
        first(&mut x);
        if let Some(layout) = args.format.rope {
            let max_position = args.cos_sin.len() / (2 * PAIRS);
            let position = args.positions[row / args.num_heads].max(0) as usize;
            let angles = &args.cos_sin[position.min(max_position - 1) * 2 * PAIRS..][..2 * PAIRS];
            for pair in 0..PAIRS {
                let (re, im) = match layout {
                    RopeLayout::Interleaved => (2 * pair, 2 * pair + 1),
                    RopeLayout::HalfSplit => (pair, pair + PAIRS),
                };
                let [cos, sin] = [angles[pair], angles[pair + PAIRS]].map(f64::from);
                (x[re], x[im]) = (x[re] * cos - x[im] * sin, x[re] * sin + x[im] * cos);
            }
        }
        if args.format.hadamard { hadamard(&x) } else { x }
    };
    args.x.chunks(DIM).enumerate().flat_map(row).collect()
}

/// `x H 128^-1/2`: entry (i, j) of H is -1 where i and j have an odd number of bits in common.
fn hadamard(x: &[f64]) -> Vec<f64> {
    let entry = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    (0..DIM).map(|j| (0..DIM).map(|i| x[i] * entry(i, j)).sum::<f64>() / (DIM as f64).sqrt()).collect()
}

/// The scale of a row of codes: `max(amax, 1e-4) / 448`, or the least power of two from there on; NaN for a row of NaN.
pub fn index_scale(format: &IndexFormat, row: &[f64]) -> f64 {
    if row.iter().any(|x| x.is_nan()) {
        return f64::NAN;
    }
    let scale = row.iter().fold(1e-4f64, |amax, x| amax.max(x.abs())) / 448.0;
    let powers = || (-30..128).map(|e| f64::powi(2.0, e)).find(|&power| power >= scale);
    if format.ue8m0 { powers().expect("finite elements") } else { scale }
}
