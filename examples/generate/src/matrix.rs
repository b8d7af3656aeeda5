//! A weight that tokens are multiplied with, as its file holds it: f32, f16, bf16, or a quantised type of GGUF.

use std::cell::Cell;
use std::ops::Range;

use candle_core::{Device, Tensor};
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use pulp::Arch;
use rayon::prelude::*;
use wgpu_mla::Dtype;

use crate::Result;
use crate::bytes::Bytes;
use crate::dot::{Dots, Tokens};
use crate::encoding::Encoding;
use crate::layer::values;

/// `[rows, columns]`.
#[derive(Clone)]
pub struct Matrix {
    file: Bytes,
    /// In the file, a multiple of 4 in memory.
    begin: usize,
    rows: usize,
    /// An even number but for f32, so that every row is whole words; whole blocks of a quantised type.
    columns: usize,
    encoding: Encoding,
}

/// So many tokens are multiplied with blocks of the weight in f32; fewer with each row of it as it is. A page is compiled for its size, and
/// only gemm in it for speed.
const MANY: usize = if cfg!(target_arch = "wasm32") { 1 } else { 7 };

/// Elements of such a block, 16 MB: with fewer rows gemm packs tokens more often, and its threads have less to share.
const BLOCK: usize = 1 << 22;

/// Elements that one thread multiplies in some 10 us, about what it takes to wake another.
const LEAST: usize = 1 << 16;

impl Matrix {
    /// From a part of a file. Where its elements are not whole, aligned words, which is rare, they are copied: blocks as they are, others
    /// as f32.
    pub fn new(file: &Bytes, part: Range<usize>, encoding: Encoding, rows: usize, columns: usize) -> Self {
        let bytes = &file.all()[part.clone()];
        let is_aligned = bytes.as_ptr().addr().is_multiple_of(4);
        let is_kept = match encoding {
            Encoding::Plain(Dtype::F32) | Encoding::Blocks(_) => true,
            // A page has no instructions that widen f16, and its weights are few.
            Encoding::Plain(_) => columns.is_multiple_of(2) && cfg!(not(target_arch = "wasm32")),
        };
        let copied = |file, encoding| Self { file, begin: 0, rows, columns, encoding };
        match (is_aligned && is_kept, encoding) {
            (true, _) => Self { file: file.clone(), begin: part.start, rows, columns, encoding },
            (_, Encoding::Plain(dtype)) => copied(dtype.decode_all(bytes).into(), Dtype::F32.into()),
            (_, Encoding::Blocks(_)) => copied(Bytes::aligned(bytes), encoding),
        }
    }

    /// Rows and columns.
    pub fn dims(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// `None` of a quantised weight.
    pub fn dtype(&self) -> Option<Dtype> {
        match self.encoding {
            Encoding::Plain(dtype) => Some(dtype),
            Encoding::Blocks(_) => None,
        }
    }

    /// Some of the rows.
    pub fn part(&self, rows: Range<usize>) -> Self {
        let begin = self.begin + self.encoding.bytes(rows.start * self.columns);
        Self { begin, rows: rows.len(), ..self.clone() }
    }

    /// The elements as the file has them.
    pub fn bytes(&self) -> &[u8] {
        &self.file.all()[self.begin..][..self.encoding.bytes(self.rows * self.columns)]
    }

    /// All elements.
    pub fn values(&self) -> Vec<f32> {
        self.encoding.decode(self.bytes())
    }

    /// One row for each index, `[indices, columns]`.
    ///
    /// # Errors
    /// The errors of candle.
    pub fn select(&self, indices: &[u32]) -> Result<Tensor> {
        let each = self.encoding.bytes(self.columns);
        let row = |&index: &u32| self.encoding.decode(&self.bytes()[index as usize * each..][..each]);
        let rows: Vec<f32> = indices.iter().flat_map(row).collect();
        Ok(Tensor::from_vec(rows, (indices.len(), self.columns), &Device::Cpu)?)
    }

    /// `x . W^T` of `[T, columns]`: `[T, rows]`.
    ///
    /// # Errors
    /// The errors of candle.
    pub fn of(&self, x: &Tensor) -> Result<Tensor> {
        let tokens = x.dim(0)?;
        Ok(Tensor::from_vec(self.product(&values(x)?, tokens)?, (tokens, self.rows), &Device::Cpu)?)
    }

    /// The same of tokens that are not in a tensor.
    ///
    /// # Errors
    /// [`candle_core::Error::Msg`] where they are not `[tokens, columns]`.
    pub fn product(&self, x: &[f32], tokens: usize) -> Result<Vec<f32>> {
        if x.len() != tokens * self.columns {
            let what = format!("{} elements, not {tokens} rows of {}", x.len(), self.columns);
            return Err(candle_core::Error::Msg(what).into());
        }
        Ok(match tokens {
            0 => Vec::new(),
            many if many >= MANY => self.of_many(x, tokens),
            _ => match self.encoding {
                Encoding::Plain(dtype) => by_token(self.of_few(dtype, x, tokens), tokens),
                Encoding::Blocks(blocks) if blocks.multiplies(self.columns) => {
                    by_token(blocks.product(self.bytes(), self.columns, x, tokens), tokens)
                }
                Encoding::Blocks(_) => self.of_many(x, tokens),
            },
        })
    }

    fn words(&self) -> &[u32] {
        bytemuck::cast_slice(self.bytes())
    }

    /// `[rows, T]`.
    fn of_few(&self, dtype: Dtype, x: &[f32], tokens: usize) -> Vec<f32> {
        let words = self.columns * dtype.bytes() / 4;
        let parted = match dtype {
            Dtype::Bf16 => Tokens::parted(x, self.columns),
            _ => Tokens::Plain(x),
        };
        let arch = Arch::new();
        let some = |(rows, out): (&[u32], &mut [f32])| match dtype {
            Dtype::F16 => {
                let mut wide = vec![0.0; self.columns];
                for (row, out) in rows.chunks_exact(words).zip(out.chunks_exact_mut(tokens)) {
                    widen(dtype.into(), bytemuck::cast_slice(row), &mut wide);
                    arch.dispatch(Dots {
                        tokens: &parted,
                        rows: bytemuck::cast_slice(&wide),
                        words: self.columns,
                        out,
                    });
                }
            }
            _ => arch.dispatch(Dots { tokens: &parted, rows, words, out }),
        };
        let mut by_row = vec![0.0; self.rows * tokens];
        let at_once = LEAST.div_ceil(self.columns).max(1);
        match self.rows > at_once {
            true => {
                let rows = self.words().par_chunks(at_once * words);
                rows.zip(by_row.par_chunks_mut(at_once * tokens)).for_each(some);
            }
            false => some((self.words(), &mut by_row)),
        }
        by_row
    }

    fn of_many(&self, x: &[f32], tokens: usize) -> Vec<f32> {
        thread_local! {
            static BUFFER: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
        }
        let mut out = vec![0.0; tokens * self.rows];
        if self.encoding == Dtype::F32.into() {
            multiply(x, bytemuck::cast_slice(self.words()), self.columns, &mut out, 0..self.rows);
            return out;
        }
        let row_bytes = self.encoding.bytes(self.columns);
        let at_once = (BLOCK / self.columns).max(1);
        let mut buffer = BUFFER.take();
        buffer.resize(buffer.len().max(at_once.min(self.rows) * self.columns), 0.0);
        for (block, rows) in self.bytes().chunks(at_once * row_bytes).enumerate() {
            let (first, count) = (block * at_once, rows.len() / row_bytes);
            let wide = &mut buffer[..count * self.columns];
            // Whole blocks of every type.
            let pieces = rows.par_chunks(self.encoding.bytes(LEAST)).zip(wide.par_chunks_mut(LEAST));
            pieces.for_each(|(rows, wide)| widen(self.encoding, rows, wide));
            multiply(x, wide, self.columns, &mut out, first..first + count);
        }
        BUFFER.set(buffer);
        out
    }
}

/// From `[rows, T]` to `[T, rows]`.
fn by_token(by_row: Vec<f32>, tokens: usize) -> Vec<f32> {
    if tokens == 1 {
        return by_row;
    }
    let mut by_token = Vec::with_capacity(by_row.len());
    (0..tokens).for_each(|token| by_token.extend(by_row.iter().skip(token).step_by(tokens)));
    by_token
}

/// Elements of 16 bits, or of blocks, as f32.
fn widen(encoding: Encoding, bytes: &[u8], wide: &mut [f32]) {
    match encoding {
        Encoding::Blocks(blocks) => blocks.decode(bytes, wide),
        Encoding::Plain(Dtype::F16) => {
            let halves: &[u16] = bytemuck::cast_slice(bytes);
            halves.reinterpret_cast::<half::f16>().convert_to_f32_slice(wide);
        }
        Encoding::Plain(_) => {
            let halves: &[u16] = bytemuck::cast_slice(bytes);
            Arch::new().dispatch(|| {
                for (wide, half) in wide.iter_mut().zip(halves) {
                    *wide = f32::from_bits(u32::from(*half) << 16);
                }
            });
        }
    }
}

/// The columns `rows` of `out = x . weight^T`, where `weight` has just these rows.
fn multiply(x: &[f32], weight: &[f32], columns: usize, out: &mut [f32], rows: Range<usize>) {
    let (count, tokens) = (rows.len(), x.len() / columns);
    let width = out.len() / tokens;
    assert!(x.len() == tokens * columns && weight.len() == count * columns);
    assert!(out.len() == tokens * width && rows.end <= width);
    let [columns_step, width_step] = [columns, width].map(|step| step as isize);
    #[cfg(not(target_arch = "wasm32"))]
    let parallelism = gemm::Parallelism::Rayon(0);
    #[cfg(target_arch = "wasm32")]
    let parallelism = gemm::Parallelism::None;
    // SAFETY: `gemm` reads `[tokens, columns]` of `x` and `[count, columns]` of `weight` and writes `[tokens, count]` of `out` from the
    // column `rows.start` on, each with the steps that are given; the assertions say that all of it is inside. Nothing else borrows `out`.
    unsafe {
        gemm::gemm(
            tokens,
            count,
            columns,
            out.as_mut_ptr().add(rows.start),
            1,
            width_step,
            false,
            x.as_ptr(),
            1,
            columns_step,
            weight.as_ptr(),
            columns_step,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(count: usize, by: f32) -> Vec<f32> {
        (0..count).map(|i| (i as f32 * by).sin()).collect()
    }

    /// Every dtype, ends of every length, one token, a few and many; rows enough for several threads and blocks.
    #[test]
    fn products_are_those_of_f64() {
        for (rows, columns) in [(1, 1), (3, 2), (5, 7), (4, 34), (37, 130), (300, 258), (9000, 250)] {
            for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
                let bytes = [vec![0; 4], dtype.encode_all(&wave(rows * columns, 0.37))].concat();
                let part = 4..bytes.len();
                // Also where the elements begin between two words.
                for skew in [0, 2] {
                    let mut moved = vec![0; skew];
                    moved.extend(&bytes);
                    let file = Bytes::from(moved);
                    let matrix =
                        Matrix::new(&file, part.start + skew..part.end + skew, dtype.into(), rows, columns);
                    let weights = matrix.values();
                    for tokens in [0, 1, 2, MANY] {
                        let x = wave(tokens * columns, 0.11);
                        let got = matrix.product(&x, tokens).expect("a product");
                        assert_eq!(got.len(), tokens * rows);
                        for at in (0..got.len()).step_by(1 + got.len() / 97) {
                            let (token, row) = (at / rows, at % rows);
                            let terms = x[token * columns..][..columns].iter().zip(&weights[row * columns..]);
                            let want: f64 = terms.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                            let apart = (f64::from(got[at]) - want).abs();
                            assert!(
                                apart < 1e-4,
                                "{dtype}, {rows} x {columns}, {tokens} tokens, {at}: {apart}"
                            );
                        }
                    }
                }
            }
        }
    }

    /// Many tokens are multiplied with the values themselves; of a few tokens the elements are rounded to 8 bits.
    #[test]
    fn products_of_blocks_are_those_of_their_values() {
        use crate::encoding::Blocks;
        use candle_core::quantized::{GgmlDType, QTensor};
        for (dtype, (rows, columns)) in [
            (GgmlDType::Q4_0, (5, 96)),
            (GgmlDType::Q4_1, (5, 96)),
            (GgmlDType::Q4_1, (5, 128)),
            (GgmlDType::Q5_0, (300, 32)),
            (GgmlDType::Q8_0, (2050, 288)),
            (GgmlDType::Q2K, (7, 256)),
            (GgmlDType::Q6K, (33, 768)),
        ] {
            let weight = Tensor::from_vec(wave(rows * columns, 0.37), (rows, columns), &Device::Cpu);
            let weight = QTensor::quantize(&weight.expect("a tensor"), dtype).expect("blocks");
            let values = weight.dequantize(&Device::Cpu).and_then(|it| it.flatten_all()?.to_vec1::<f32>());
            let (values, data) = (values.expect("values"), weight.data().expect("bytes"));
            let encoding = Encoding::Blocks(Blocks::of(dtype).expect("a type"));
            for skew in [0, 2] {
                let bytes = [&vec![0; skew][..], &data].concat();
                let part = skew..bytes.len();
                let matrix = Matrix::new(&bytes.into(), part, encoding, rows, columns);
                assert_eq!(matrix.values(), values);
                let part = matrix.part(1..3);
                assert_eq!(part.values(), values[columns..3 * columns]);
                for tokens in [1, 2, MANY] {
                    let x = wave(tokens * columns, 0.11);
                    let got = matrix.product(&x, tokens).expect("a product");
                    assert_eq!(got.len(), tokens * rows);
                    for (at, got) in got.iter().enumerate().step_by(1 + got.len() / 97) {
                        let (token, row) = (at / rows, at % rows);
                        let terms = x[token * columns..][..columns].iter().zip(&values[row * columns..]);
                        let want: f64 = terms.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                        let apart = (f64::from(*got) - want).abs();
                        let bound = if tokens == MANY { 1e-4 } else { 0.01 * (columns as f64).sqrt() };
                        assert!(apart < bound, "{dtype:?}, {rows} x {columns}, {tokens} tokens: {apart}");
                    }
                }
            }
        }
    }

    #[test]
    fn parts_and_rows() {
        let file = Bytes::from(Dtype::Bf16.encode_all(&wave(6 * 4, 0.3)));
        let matrix = Matrix::new(&file, 0..48, Dtype::Bf16.into(), 6, 4);
        let part = matrix.part(2..4);
        assert_eq!((part.dtype(), part.values()), (Some(Dtype::Bf16), matrix.values()[8..16].to_vec()));
        let rows = matrix.select(&[5, 0]).expect("rows").to_vec2::<f32>().expect("rows");
        assert_eq!(rows, [&matrix.values()[20..], &matrix.values()[..4]]);
    }
}
