//! Dot products of rows of weights, as their file has them, and of tokens in f32.

use pulp::{Simd, WithSimd};

/// Tokens, as rows of one dtype are multiplied with them.
pub enum Tokens<'a> {
    /// `[T, columns]`, for rows of f32.
    Plain(&'a [f32]),
    /// `[T, 2, columns / 2]`, elements at even places and then those at odd ones, for rows of bf16: two of them are one word.
    Parted(Vec<f32>),
}

impl<'a> Tokens<'a> {
    pub fn parted(x: &[f32], columns: usize) -> Self {
        let of_token =
            |row: &[f32]| [0, 1].map(|first| row.iter().skip(first).step_by(2).copied().collect::<Vec<_>>());
        Self::Parted(x.chunks_exact(columns.max(1)).flat_map(of_token).flatten().collect())
    }
}

/// Some rows, all tokens: `out` is `[rows, T]`.
pub struct Dots<'a> {
    pub tokens: &'a Tokens<'a>,
    /// Rows of f32, or of pairs of bf16.
    pub rows: &'a [u32],
    /// Words of a row.
    pub words: usize,
    pub out: &'a mut [f32],
}

impl WithSimd for Dots<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { tokens, rows, words, out } = self;
        let count = out.len() / (rows.len() / words).max(1);
        for (row, out) in rows.chunks_exact(words).zip(out.chunks_exact_mut(count.max(1))) {
            match tokens {
                Tokens::Plain(x) => {
                    for (out, x) in out.iter_mut().zip(x.chunks_exact(words)) {
                        *out = dot(simd, row, x);
                    }
                }
                Tokens::Parted(x) => {
                    for (out, x) in out.iter_mut().zip(x.chunks_exact(2 * words)) {
                        let (even, odd) = x.split_at(words);
                        *out = dot_of_pairs(simd, row, even, odd);
                    }
                }
            }
        }
    }
}

/// Sums at a time, so that no addition waits for the one before it.
const SUMS: usize = 4;

#[inline(always)]
fn dot<S: Simd>(simd: S, row: &[u32], x: &[f32]) -> f32 {
    let (row, row_end) = S::as_simd_u32s(row);
    let (x, x_end) = S::as_simd_f32s(x);
    let mut sums = [simd.splat_f32s(0.0); SUMS];
    let (rows, xs) = (row.chunks_exact(SUMS), x.chunks_exact(SUMS));
    for (w, x) in rows.remainder().iter().zip(xs.remainder()) {
        sums[0] = simd.mul_add_e_f32s(simd.transmute_f32s_u32s(*w), *x, sums[0]);
    }
    for (w, x) in rows.zip(xs) {
        for at in 0..SUMS {
            sums[at] = simd.mul_add_e_f32s(simd.transmute_f32s_u32s(w[at]), x[at], sums[at]);
        }
    }
    let end: f32 = row_end.iter().zip(x_end).map(|(w, x)| f32::from_bits(*w) * x).sum();
    sum(simd, sums) + end
}

/// A word's low half is the element at an even place. A bf16 is the upper half of its f32.
#[inline(always)]
fn dot_of_pairs<S: Simd>(simd: S, row: &[u32], even: &[f32], odd: &[f32]) -> f32 {
    let (row, row_end) = S::as_simd_u32s(row);
    let ((even, even_end), (odd, odd_end)) = (S::as_simd_f32s(even), S::as_simd_f32s(odd));
    let (half, upper) = (simd.splat_u32s(16), simd.splat_u32s(0xffff_0000));
    let mut sums = [simd.splat_f32s(0.0); SUMS];
    let add = |at: usize, sums: &mut [S::f32s; SUMS], w: S::u32s, even: S::f32s, odd: S::f32s| {
        let low = simd.transmute_f32s_u32s(simd.wrapping_dyn_shl_u32s(w, half));
        let high = simd.transmute_f32s_u32s(simd.and_u32s(w, upper));
        sums[at] = simd.mul_add_e_f32s(low, even, sums[at]);
        sums[at + 1] = simd.mul_add_e_f32s(high, odd, sums[at + 1]);
    };
    let (rows, evens, odds) = (row.chunks_exact(2), even.chunks_exact(2), odd.chunks_exact(2));
    for ((w, even), odd) in rows.remainder().iter().zip(evens.remainder()).zip(odds.remainder()) {
        add(0, &mut sums, *w, *even, *odd);
    }
    for ((w, even), odd) in rows.zip(evens).zip(odds) {
        add(0, &mut sums, w[0], even[0], odd[0]);
        add(2, &mut sums, w[1], even[1], odd[1]);
    }
    let pair = |((w, even), odd): ((&u32, &f32), &f32)| {
        f32::from_bits(w << 16) * even + f32::from_bits(w & 0xffff_0000) * odd
    };
    sum(simd, sums) + row_end.iter().zip(even_end).zip(odd_end).map(pair).sum::<f32>()
}

#[inline(always)]
fn sum<S: Simd>(simd: S, [a, b, c, d]: [S::f32s; SUMS]) -> f32 {
    simd.reduce_sum_f32s(simd.add_f32s(simd.add_f32s(a, b), simd.add_f32s(c, d)))
}
