//! The oracle of `head_project`.

use wgpu_mla::WeightOrder;

/// Arguments of [`head_project`], dense arrays.
#[derive(Debug, Clone, Copy)]
pub struct Projection<'a> {
    /// `H`.
    pub num_heads: usize,
    /// Elements of a row of `x`.
    pub k: usize,
    /// Elements of a row of the result.
    pub n: usize,
    /// How each head's matrix lies.
    pub order: WeightOrder,
    /// `[tokens, H, k]`.
    pub x: &'a [f32],
    /// `[H, k, n]` or `[H, n, k]`.
    pub weight: &'a [f32],
}

/// `y[t,h,j] = sum_i x[t,h,i] * W[h][i,j]`: `[tokens, H, n]`.
pub fn head_project(args: &Projection<'_>) -> Vec<f64> {
    let Projection { num_heads, k, n, order, x, weight } = *args;
    let mut y = Vec::with_capacity(x.len() / k * n);
    for (row, x) in x.chunks_exact(k).enumerate() {
        let matrix = &weight[row % num_heads * k * n..][..k * n];
        for j in 0..n {
            let w = |i: usize| match order {
                WeightOrder::Kn => matrix[i * n + j],
                WeightOrder::Nk => matrix[j * k + i],
            };
            y.push(x.iter().enumerate().map(|(i, &x)| f64::from(x) * f64::from(w(i))).sum());
        }
    }
    y
}
