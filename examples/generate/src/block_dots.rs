//! Products of rows of Q8_0 and Q4_0 with rounded tokens, by AVX2 where the processor has it. candle's own are for instructions that are
//! known when it is compiled, which is those that all processors have.

use std::arch::x86_64::*;

/// Elements of a block.
const BLOCK: usize = 32;

/// `[tokens, columns]` in 8 bits, with a scale a block, which is NaN where an element is.
pub struct Rounded {
    blocks: Vec<(f32, [i8; BLOCK])>,
}

impl Rounded {
    /// Whole blocks.
    pub fn new(x: &[f32]) -> Self {
        let block = |x: &[f32]| {
            let largest = x.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
            // `max` and the codes lose a NaN.
            let largest = if x.iter().any(|x| x.is_nan()) { f32::NAN } else { largest };
            let by = if largest > 0.0 { 127.0 / largest } else { 0.0 };
            let mut codes = [0; BLOCK];
            codes.iter_mut().zip(x).for_each(|(code, x)| *code = (x * by).round() as i8);
            (largest / 127.0, codes)
        };
        Self { blocks: x.chunks_exact(BLOCK).map(block).collect() }
    }
}

/// The types that are here.
#[derive(Clone, Copy)]
pub enum Kind {
    Q4_0,
    Q8_0,
}

pub fn runs_here() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// `W . x^T`: `out` is `[rows, tokens]`.
///
/// # Safety
/// [`runs_here`].
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn products(kind: Kind, rows: &[u8], columns: usize, tokens: &Rounded, out: &mut [f32]) {
    match kind {
        Kind::Q4_0 => rows_of::<18>(rows, columns, tokens, out),
        Kind::Q8_0 => rows_of::<34>(rows, columns, tokens, out),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn rows_of<const BYTES: usize>(rows: &[u8], columns: usize, tokens: &Rounded, out: &mut [f32]) {
    let each = columns / BLOCK;
    let count = tokens.blocks.len() / each.max(1);
    for (row, out) in rows.as_chunks::<BYTES>().0.chunks_exact(each).zip(out.chunks_exact_mut(count)) {
        for (x, out) in tokens.blocks.chunks_exact(each).zip(out) {
            *out = dot(row, x);
        }
    }
}

/// A block is an f16 scale, then codes.
#[target_feature(enable = "avx2,fma,f16c")]
fn dot<const BYTES: usize>(row: &[[u8; BYTES]], x: &[(f32, [i8; BLOCK])]) -> f32 {
    let (ones, mut sums) = (_mm256_set1_epi16(1), _mm256_setzero_ps());
    for (block, (x_scale, x)) in row.iter().zip(x) {
        let w = if BYTES == 18 { nibbles(&block[2..]) } else { bytes(&block[2..]) };
        // SAFETY: `x` has 32 bytes.
        let x = unsafe { _mm256_loadu_si256(x.as_ptr().cast()) };
        // Bytes without a sign times bytes with one, at most 128 * 127 * 2 for a pair.
        let pairs = _mm256_maddubs_epi16(_mm256_sign_epi8(w, w), _mm256_sign_epi8(x, w));
        let fours = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones));
        let half = _mm_cvtsi32_si128(i32::from(u16::from_le_bytes([block[0], block[1]])));
        let scale = _mm_cvtss_f32(_mm_cvtph_ps(half)) * x_scale;
        sums = _mm256_fmadd_ps(_mm256_set1_ps(scale), fours, sums);
    }
    let mut all = [0.0; 8];
    // SAFETY: `all` has 8 elements.
    unsafe { _mm256_storeu_ps(all.as_mut_ptr(), sums) };
    all.iter().sum()
}

#[target_feature(enable = "avx2")]
fn bytes(codes: &[u8]) -> __m256i {
    let codes: &[u8; 32] = codes.first_chunk().unwrap_or(&[0; 32]);
    // SAFETY: it has 32 bytes.
    unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) }
}

/// The low halves of 16 bytes, then the high ones, each 8 more than the code.
#[target_feature(enable = "avx2")]
fn nibbles(codes: &[u8]) -> __m256i {
    let codes: &[u8; 16] = codes.first_chunk().unwrap_or(&[0; 16]);
    // SAFETY: it has 16 bytes.
    let packed = unsafe { _mm_loadu_si128(codes.as_ptr().cast()) };
    let both = _mm256_set_m128i(_mm_srli_epi16::<4>(packed), packed);
    _mm256_sub_epi8(_mm256_and_si256(both, _mm256_set1_epi8(15)), _mm256_set1_epi8(8))
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::GgmlType;
    use candle_core::quantized::k_quants::{BlockQ4_0, BlockQ8_0};

    use super::*;

    /// A row's blocks as their bytes, and their values.
    fn blocks<B: GgmlType>(values: &[f32]) -> (Vec<u8>, Vec<f32>) {
        let mut blocks = vec![B::zeros(); values.len() / BLOCK];
        B::from_float(values, &mut blocks);
        let mut decoded = vec![0.0; values.len()];
        B::to_float(&blocks, &mut decoded);
        // SAFETY: blocks are plain numbers without padding.
        let bytes = unsafe { std::slice::from_raw_parts(blocks.as_ptr().cast(), size_of_val(&blocks[..])) };
        (bytes.to_vec(), decoded)
    }

    /// Tokens are rounded to a 254th of the largest of a block at most; sums of the rounded ones are exact but for f32.
    #[test]
    fn products_are_those_of_f64() {
        if !runs_here() {
            return eprintln!("NOT TESTED: the processor lacks AVX2, FMA or F16C");
        }
        let wave =
            |count: usize, by: f32| (0..count).map(|i| (i as f32 * by).sin() * 3.0).collect::<Vec<f32>>();
        for (rows, columns, tokens) in [(1, 32, 1), (3, 64, 2), (5, 416, 6)] {
            let (w, x) = (wave(rows * columns, 0.37), wave(tokens * columns, 0.11));
            let rounded = Rounded::new(&x);
            let values = rounded.blocks.iter().flat_map(|(scale, x)| x.map(|code| scale * f32::from(code)));
            let values: Vec<f32> = values.collect();
            assert!(values.iter().zip(&x).all(|(got, want)| (got - want).abs() <= 3.0 / 253.0));
            for (kind, (bytes, w)) in
                [(Kind::Q4_0, blocks::<BlockQ4_0>(&w)), (Kind::Q8_0, blocks::<BlockQ8_0>(&w))]
            {
                let mut out = vec![f32::NAN; rows * tokens];
                // SAFETY: it runs here.
                unsafe { products(kind, &bytes, columns, &rounded, &mut out) };
                for (at, got) in out.into_iter().enumerate() {
                    let (row, token) = (at / tokens, at % tokens);
                    let terms = w[row * columns..][..columns].iter().zip(&values[token * columns..]);
                    let want: f64 = terms.map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                    assert!(
                        (f64::from(got) - want).abs() < 1e-3,
                        "{rows} {columns} {row} {token}: {got}, not {want}"
                    );
                }
            }
        }
        // The largest codes, and zeros.
        let row: Vec<u8> = [&[0, 0x3C][..], &[0x80; 32]].concat();
        let mut out = [f32::NAN];
        for (x, want) in [(-1.0, 4096.0), (1.0, -4096.0), (0.0, 0.0)] {
            // SAFETY: it runs here.
            unsafe { products(Kind::Q8_0, &row, 32, &Rounded::new(&[x; 32]), &mut out) };
            assert_eq!(out, [want]);
        }
        // What is not finite stays.
        for lost in [f32::NAN, f32::INFINITY] {
            let mut x = [1.0; 32];
            x[5] = lost;
            // SAFETY: it runs here.
            unsafe { products(Kind::Q8_0, &row, 32, &Rounded::new(&x), &mut out) };
            assert!(out[0].is_nan(), "{lost} gives {}", out[0]);
        }
    }
}
