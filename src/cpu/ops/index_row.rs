//! What index keys and index queries have in common on host memory: a row of 128 elements, rotated and quantised.

use crate::base::dtype::Dtype;
use crate::base::error::Result;
use crate::base::memory::room_for;
use crate::cpu::buffer::store_elements;
use crate::cpu::kernels::formats::{bits_of, widen};
use crate::ops::{INDEX_ROPE_DIM, IndexFormat, RopeLayout};
use std::sync::atomic::AtomicU32;

/// Elements of a row.
pub(super) const DIM: usize = 128;
const PAIRS: usize = INDEX_ROPE_DIM as usize / 2;

/// A key, or a head's query.
pub(super) type Row = [f32; DIM];

/// Where the angles of tokens are.
pub(super) struct Angles<'a> {
    pub(super) positions: &'a [i32],
    /// f32 `[max_position, 64]`.
    pub(super) cos_sin: &'a [f32],
    pub(super) max_position: u32,
}

impl Angles<'_> {
    /// Cosines and sines of a token's position, which counts as the nearest inside of the table.
    fn of(&self, token: usize) -> (&[f32], &[f32]) {
        let last = i64::from(self.max_position) - 1;
        let position = i64::from(self.positions[token]).clamp(0, last) as usize;
        self.cos_sin[position * 2 * PAIRS..][..2 * PAIRS].split_at(PAIRS)
    }
}

/// The row at an element of an array, and whether all of it is finite.
pub(super) fn read(dtype: Dtype, bytes: &[u8], at: usize) -> (Row, bool) {
    let mut row = [0.0; DIM];
    widen(dtype, &bytes[at * dtype.bytes()..][..DIM * dtype.bytes()], &mut row);
    let is_finite = row.iter().all(|x| x.is_finite());
    (row, is_finite)
}

/// The sum, in eight parts that the compiler adds in vectors.
fn sum(row: &Row, of: impl Fn(f32) -> f32) -> f32 {
    let mut parts = [0.0; 8];
    for chunk in row.chunks_exact(8) {
        parts.iter_mut().zip(chunk).for_each(|(part, &x)| *part += of(x));
    }
    parts.iter().sum()
}

/// LayerNorm.
pub(super) fn normalise(row: &mut Row, weight: &[f32], bias: &[f32], eps: f32) {
    let mean = sum(row, |x| x) / DIM as f32;
    let variance = sum(row, |x| (x - mean) * (x - mean)) / DIM as f32;
    let factor = 1.0 / (variance + eps).sqrt();
    for ((x, weight), bias) in row.iter_mut().zip(weight).zip(bias) {
        *x = (*x - mean) * factor * weight + bias;
    }
}

/// RoPE of the first 64 elements, then the Hadamard rotation, as the format has them.
pub(super) fn rotate(format: &IndexFormat, row: &mut Row, angles: &Angles<'_>, token: usize) {
    if let Some(layout) = format.rope {
        let (cos, sin) = angles.of(token);
        for pair in 0..PAIRS {
            let [a, b] = match layout {
                RopeLayout::Interleaved => [2 * pair, 2 * pair + 1],
                RopeLayout::HalfSplit => [pair, PAIRS + pair],
            };
            let [x, y] = [row[a], row[b]];
            (row[a], row[b]) = (x * cos[pair] - y * sin[pair], y * cos[pair] + x * sin[pair]);
        }
    }
    if format.hadamard {
        let mut half = 1;
        while half < DIM {
            for block in row.chunks_exact_mut(2 * half) {
                let (first, second) = block.split_at_mut(half);
                for (a, b) in first.iter_mut().zip(second) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        let factor = (1.0 / DIM as f64).sqrt() as f32;
        row.iter_mut().for_each(|x| *x *= factor);
    }
}

/// The scale of a row of codes: `max(amax, 1e-4) / 448`, or the power of two from there on.
fn scale_of(format: &IndexFormat, row: &Row) -> f32 {
    let amax = row.iter().fold(1e-4f32, |amax, x| amax.max(x.abs()));
    if !format.ue8m0 {
        return amax / 448.0;
    }
    // 448 is 1.75 * 2^8: the exponent of amax is 8 more, or 7 where its mantissa is past 1.75.
    let past_448 = 0x7F_FFFF - 0x60_0000;
    f32::from_bits((((amax.to_bits() + past_448) >> 23) - 8) << 23)
}

/// Stores a row at an element of an array of the format's dtype, and returns its scale: 1 where elements are no codes. One of which an
/// element was not finite becomes NaN, its scale too.
pub(super) fn store(format: &IndexFormat, words: &[AtomicU32], at: usize, row: &Row, is_finite: bool) -> f32 {
    let dtype = format.dtype;
    let scale = match (dtype.is_fp8(), is_finite) {
        (false, _) => 1.0,
        (true, false) => f32::NAN,
        (true, true) => scale_of(format, row),
    };
    let element = |i: usize| if is_finite { row[i] / scale } else { f32::NAN };
    store_elements(words, dtype.bytes(), at, DIM, |i| bits_of(dtype, element(i)));
    scale
}

/// A step's own positions, kept.
pub(super) fn kept(positions: Option<&[i32]>) -> Result<Option<Vec<i32>>> {
    let Some(positions) = positions else { return Ok(None) };
    let mut kept = room_for(positions.len(), "the positions of a step")?;
    kept.extend_from_slice(positions);
    Ok(Some(kept))
}
