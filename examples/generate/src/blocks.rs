//! The quantised types of GGUF. candle has their layouts and products of two rows; their bytes stay where the mapped file has them.

use candle_core::quantized::k_quants::{
    BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0,
};
use candle_core::quantized::{GgmlDType, GgmlType};
use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use crate::block_dots::{self, Kind, Rounded};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocks {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
}

/// What is done with the blocks of a type.
macro_rules! of_type {
    ($blocks:expr, $block:ident => $what:expr) => {
        of_type!($blocks, $block => $what, Q4_0 BlockQ4_0, Q4_1 BlockQ4_1, Q5_0 BlockQ5_0, Q5_1 BlockQ5_1, Q8_0 BlockQ8_0,
            Q2K BlockQ2K, Q3K BlockQ3K, Q4K BlockQ4K, Q5K BlockQ5K, Q6K BlockQ6K)
    };
    ($blocks:expr, $block:ident => $what:expr, $($name:ident $type:ident),*) => {
        match $blocks {
            $(Self::$name => {
                type $block = $type;
                $what
            })*
        }
    };
}

impl Blocks {
    /// `None` for a type that has no blocks, and for those of activations.
    pub fn of(dtype: GgmlDType) -> Option<Self> {
        let all =
            [Self::Q4_0, Self::Q4_1, Self::Q5_0, Self::Q5_1, Self::Q8_0, Self::Q2K, Self::Q3K, Self::Q4K];
        all.into_iter().chain([Self::Q5K, Self::Q6K]).find(|blocks| blocks.dtype() == dtype)
    }

    fn dtype(self) -> GgmlDType {
        of_type!(self, Block => Block::DTYPE)
    }

    /// Elements of a block.
    pub fn elems(self) -> usize {
        of_type!(self, Block => Block::BLCK_SIZE)
    }

    /// Bytes of a block.
    pub fn bytes(self) -> usize {
        of_type!(self, Block => size_of::<Block>())
    }

    /// The elements of some blocks.
    pub fn decode(self, bytes: &[u8], values: &mut [f32]) {
        assert!(values.len() == bytes.len() / self.bytes() * self.elems());
        of_type!(self, Block => Block::to_float(blocks::<Block>(bytes), values));
    }

    /// Whether candle multiplies rows of so many elements: of some types it takes two blocks at a time.
    pub fn multiplies(self, columns: usize) -> bool {
        let at_once = if matches!(self, Self::Q4_1 | Self::Q5_0 | Self::Q5_1) { 2 } else { 1 };
        columns.is_multiple_of(at_once * self.elems())
    }

    /// `W . x^T` of `[tokens, columns]`: `[rows, tokens]`. `x` is rounded to 8 bits, with a scale a block, as in llama.cpp.
    pub fn product(self, bytes: &[u8], columns: usize, x: &[f32], tokens: usize) -> Vec<f32> {
        assert!(self.multiplies(columns) && x.len() == tokens * columns);
        #[cfg(target_arch = "x86_64")]
        if let Some(out) = self.product_by_avx2(bytes, columns, x, tokens) {
            return out;
        }
        of_type!(self, Block => product::<Block>(blocks(bytes), columns, x, tokens))
    }
}

#[cfg(target_arch = "x86_64")]
impl Blocks {
    /// `None` where there is none.
    fn product_by_avx2(self, bytes: &[u8], columns: usize, x: &[f32], tokens: usize) -> Option<Vec<f32>> {
        let kind = match self {
            Self::Q4_0 => Kind::Q4_0,
            Self::Q8_0 => Kind::Q8_0,
            _ => return None,
        };
        if !block_dots::runs_here() {
            return None;
        }
        let (row_bytes, rounded) = (columns / self.elems() * self.bytes(), Rounded::new(x));
        let rows = bytes.len() / row_bytes.max(1);
        let mut out = vec![0.0; rows * tokens];
        let at_once = LEAST.div_ceil(columns.max(1));
        let some = |(rows, out): (&[u8], &mut [f32])| {
            // SAFETY: it runs here.
            unsafe { block_dots::products(kind, rows, columns, &rounded, out) };
        };
        match rows > at_once {
            true => {
                bytes.par_chunks(at_once * row_bytes).zip(out.par_chunks_mut(at_once * tokens)).for_each(some)
            }
            false => some((bytes, &mut out)),
        }
        Some(out)
    }
}

/// Elements that one thread multiplies in some 10 us, about what it takes to wake another.
const LEAST: usize = 1 << 16;

/// candle's own product has threads of its own, all of which a caller waits for, also where others keep the cores busy.
fn product<B: GgmlType>(weight: &[B], columns: usize, x: &[f32], tokens: usize) -> Vec<f32> {
    let each = columns / B::BLCK_SIZE;
    let mut rounded = vec![B::VecDotType::zeros(); tokens * each];
    for (x, rounded) in x.chunks_exact(columns).zip(rounded.chunks_exact_mut(each)) {
        B::VecDotType::from_float(x, rounded);
    }
    let some = |(rows, out): (&[B], &mut [f32])| {
        for (four, out) in rows.chunks(4 * each).zip(out.chunks_mut(4 * tokens)) {
            let row = |at: usize| &four[at * each..][..each];
            for (token, x) in rounded.chunks_exact(each).enumerate() {
                if four.len() == 4 * each {
                    let (a, b, c, d) = B::vec_dot_4(columns, row(0), row(1), row(2), row(3), x);
                    for (at, dot) in [a, b, c, d].into_iter().enumerate() {
                        out[at * tokens + token] = dot;
                    }
                } else {
                    (0..four.len() / each)
                        .for_each(|at| out[at * tokens + token] = B::vec_dot(columns, row(at), x));
                }
            }
        }
    };
    let rows = weight.len() / each.max(1);
    let mut out = vec![0.0; rows * tokens];
    let at_once = LEAST.div_ceil(columns.max(1)).next_multiple_of(4);
    match rows > at_once {
        true => weight.par_chunks(at_once * each).zip(out.par_chunks_mut(at_once * tokens)).for_each(some),
        false => some((weight, &mut out)),
    }
    out
}

/// Bytes as the blocks that they are.
fn blocks<B: GgmlType>(bytes: &[u8]) -> &[B] {
    assert!(
        bytes.as_ptr().addr().is_multiple_of(align_of::<B>()) && bytes.len().is_multiple_of(size_of::<B>())
    );
    // SAFETY: the bytes are aligned and whole blocks, and those of candle are `repr(C)` of plain numbers without padding, for which any
    // bits are values.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<B>()) }
}
