//! The oracle of `head_project`.

use wgpu_mla::{Dtype, WeightOrder};

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
    /// By what a head's products are multiplied: `[H]`, one for all, or nothing.
    pub scales: &'a [f32],
}

/// `y[t,h,j] = scales[h] * sum_i x[t,h,i] * W[h][i,j]`: `[tokens, H, n]`.
pub fn head_project(args: &Projection<'_>) -> Vec<f64> {
    let Projection { num_heads, k, n, order, x, weight, scales } = *args;
    let mut y = Vec::with_capacity(x.len() / k * n);
    for (row, x) in x.chunks_exact(k).enumerate() {
        let matrix = &weight[row % num_heads * k * n..][..k * n];
        let scale = scales.get(row % num_heads).or(scales.first()).map_or(1.0, |&scale| f64::from(scale));
        for j in 0..n {
            let w = |i: usize| match order {
                WeightOrder::Kn => matrix[i * n + j],
                WeightOrder::Nk => matrix[j * k + i],
            };
            let sum: f64 = x.iter().enumerate().map(|(i, &x)| f64::from(x) * f64::from(w(i))).sum();
            y.push(scale * sum);
        }
    }
    y
}

/// The bytes of values as GGUF's `Q8_0`: blocks of an f16 scale, the largest magnitude over 127, and 32 `i8`.
pub fn q8_0_bytes(values: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(values.len() / 32 * 34);
    for block in values.chunks_exact(32) {
        let scale = block.iter().fold(0f32, |most, x| most.max(x.abs())) / 127.0;
        let scale = Dtype::F16.encode_all(&[scale]);
        let rounded = Dtype::F16.decode_at(&scale, 0);
        bytes.extend(scale);
        bytes.extend(block.iter().map(|x| (x / rounded.max(1e-30)).round() as i8 as u8));
    }
    bytes
}

/// The values of `Q8_0` blocks: exact, since a product has 19 bits.
pub fn q8_0_values(bytes: &[u8]) -> Vec<f32> {
    let block = |block: &[u8]| {
        let scale = Dtype::F16.decode_at(block, 0);
        block[2..].iter().map(|&code| scale * f32::from(code as i8)).collect::<Vec<_>>()
    };
    bytes.chunks_exact(34).flat_map(block).collect()
}
