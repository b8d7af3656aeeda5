//! `kv_calibrate`: the largest magnitude of new rows, and how many elements an e4m3 cache would saturate, counted on the device. Arguments,
//! checks and results.

use std::ops::Range;

use super::op::{Op, Use};
use super::samples::{FLOATS, SHAPE};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::step_table::{StepTable, TableOp};
use super::variants::OpOptions;
use crate::base::dtype::{Calibration, Dtype, E4M3_MAX, k_scale_of};
use crate::base::error::{Error, Result};
use crate::base::view::{View, distinct, fits, normal, wide};
use crate::cache::decode_spec::MlaDecode;
use crate::cache::{KvSpec, MlaShape};

/// Finds the largest magnitude in the rows that a [`KvAppend`](crate::KvAppend) would write, and counts the elements that an e4m3 cache
/// would saturate. The results are accumulated in a buffer, as [`CalibrationStats`]. The host downloads those 32 bytes when it likes, and
/// computes a `k_scale` from them. It is for caches of [`Dtype::E4m3`]: tokens of [`KvLayout::Ds656`](crate::KvLayout::Ds656) and
/// `Ds528` have scales of their own, which an append finds by itself.
///
/// Arguments of a layer: [`KvCalibrateArgs`]. Input of a step: a `Range<u32>`: the tokens that are looked at. [`Error::Shape`] is a range
/// that ends before it begins.
///
/// Room of a binding: `u32`, one past the last token. Capacity of a step: `()`.
///
/// ```
/// use wgpu_mla::{CalibrationStats, Device, Dtype, KvCalibrate, KvCalibrateArgs, MlaShape, View, cpu::Cpu};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// let shape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };
/// let cpu = Cpu::new();
/// let (kv_c, k_pe) = (cpu.buffer(256 * 4)?, cpu.buffer(32 * 4)?);
/// cpu.upload(&k_pe, 0, &Dtype::F32.encode_all(&[896.0; 32]))?;
/// let stats = cpu.buffer(CalibrationStats::BYTES)?;
/// let (kv_c, k_pe) = (View::dense(&kv_c, 1, 256), View::dense(&k_pe, 1, 32));
/// let layer = KvCalibrateArgs { kv_c, k_pe, k_scale: 1.0, stats: &stats };
///
/// cpu.once(KvCalibrate { shape, input: Dtype::F32 }, 0..1, &layer)?;
/// let stats = CalibrationStats::from_bytes(&cpu.download(&stats, CalibrationStats::BYTES)?)?;
/// assert_eq!((stats.amax, stats.saturated, stats.elements), (896.0, 32, 288));
/// assert_eq!(stats.calibration(false).k_scale, 896.0 / 448.0);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvCalibrate {
    /// `kv_lora_rank` and `qk_rope_head_dim`; the heads do not matter.
    pub shape: MlaShape,
    /// Dtype of `kv_c` and `k_pe`: f32, f16 or bf16.
    pub input: Dtype,
}

/// One layer of a [`KvCalibrate`]: new rows, as a [`KvAppend`](crate::KvAppend) gets them, and where what is in them is counted.
#[derive(Debug, Clone, Copy)]
pub struct KvCalibrateArgs<B> {
    /// Latent rows `[tokens, L]`; offset and `token_stride` are multiples of 4 elements, `head_stride` is unread. No two rows overlap: an
    /// element would be counted more than once.
    pub kv_c: View<B>,
    /// Rotary rows `[tokens, R]`, the same; unread where `R` is 0.
    pub k_pe: View<B>,
    /// The scale in use: elements above `448 * k_scale` count as saturated. Finite and at least 2^-126, as that of an append.
    pub k_scale: f32,
    /// [`CalibrationStats::BYTES`] at the front of a buffer, zeros before the first call. Every call adds to them.
    pub stats: B,
}

/// What a [`KvCalibrate`] has counted since its buffer was zeroed.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CalibrationStats {
    /// The largest magnitude of a finite element.
    pub amax: f32,
    /// Finite elements whose magnitude is above `448 * k_scale`, with the scale that each call was given.
    pub saturated: u64,
    /// Infinities and NaN.
    pub non_finite: u64,
    /// Elements, those included.
    pub elements: u64,
}

impl CalibrationStats {
    /// Bytes of the device's counters.
    pub const BYTES: u64 = 32;

    /// The counters as they were downloaded: 8 little-endian words, which are amax as f32, one unused, and three counts of
    /// 64 bits.
    ///
    /// # Errors
    /// [`Error::Length`] for fewer than [`CalibrationStats::BYTES`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let Some(bytes) = bytes.get(..Self::BYTES as usize) else {
            let (got, want) = (bytes.len() as u64, Self::BYTES);
            let cure = "download `CalibrationStats::BYTES` bytes";
            return Err(Error::Length { what: "the bytes of CalibrationStats", got, want, cure });
        };
        let count = |at: usize| {
            let half = |at: usize| u64::from(Dtype::F32.decode_at(bytes, at).to_bits());
            half(at) | half(at + 1) << 32
        };
        let (saturated, non_finite, elements) = (count(2), count(4), count(6));
        Ok(Self { amax: Dtype::F32.decode_at(bytes, 0), saturated, non_finite, elements })
    }

    /// The `k_scale` that holds all that was counted: `amax / 448`, or the next power of two; 1 where all was zero, as
    /// [`crate::calibrate_k_scale`]. With it none of these elements saturates.
    #[must_use]
    pub fn calibration(&self, power_of_two: bool) -> Calibration {
        Calibration { k_scale: k_scale_of(self.amax, power_of_two), saturated: 0 }
    }
}

impl<B: Copy> KvCalibrateArgs<B> {
    /// The rotary rows. Without a rotary part they are unread, whatever they are, and the latent ones stand in for them.
    pub(crate) fn rotary(&self, spec: &KvCalibrate) -> View<B> {
        if spec.shape.qk_rope_head_dim == 0 { self.kv_c } else { self.k_pe }
    }

    /// The largest magnitude that does not saturate; infinite where none does.
    pub(crate) fn limit(&self) -> f32 {
        E4M3_MAX * self.k_scale
    }
}

impl Op for KvCalibrate {
    const NAME: &'static str = "kv_calibrate";
    type Options = OpOptions;
    type Facts = ();
    /// Which tokens are looked at: those of a padded batch that are real.
    type Input<'a> = Range<u32>;
    type Args<B> = KvCalibrateArgs<B>;
    /// Where the tokens end.
    type Extent = u32;
    type Capacity = ();

    fn samples() -> Vec<Self> {
        FLOATS.map(|input| KvCalibrate { shape: SHAPE, input }).into()
    }

    fn check(&self) -> Result<()> {
        let kv = KvSpec { layout: Dtype::E4m3.into(), page_size: 1, num_pages: 1 };
        MlaDecode { shape: self.shape, kv, query: self.input, out: Dtype::F32 }.check()?;
        wide("kv_c and k_pe", self.input)
    }

    fn map<'a, B: 'a, C>(
        &self,
        args: &'a KvCalibrateArgs<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<KvCalibrateArgs<C>> {
        let rotary = if self.shape.qk_rope_head_dim > 0 { Use::Read("k_pe") } else { Use::Unread("k_pe") };
        Ok(KvCalibrateArgs {
            kv_c: args.kv_c.map(|buffer| f(Use::Read("kv_c"), buffer))?,
            k_pe: args.k_pe.map(|buffer| f(rotary, buffer))?,
            k_scale: args.k_scale,
            stats: f(Use::Write("stats"), &args.stats)?,
        })
    }

    fn check_args<B>(
        &self,
        args: &KvCalibrateArgs<&B>,
        max_tokens: u32,
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        normal("k_scale", args.k_scale)?;
        let MlaShape { kv_lora_rank, qk_rope_head_dim, .. } = self.shape;
        for (what, view, dim) in [("kv_c", args.kv_c, kv_lora_rank), ("k_pe", args.k_pe, qk_rope_head_dim)] {
            view.check(what, [max_tokens, 1, dim], self.input.bytes(), 4, size(view.buffer))?;
            distinct(what, &view, max_tokens.into(), 1, dim.into())?;
        }
        fits("stats", CalibrationStats::BYTES, size(args.stats))
    }

    fn fits(end: u32, max_tokens: u32) -> Result<(), &'static str> {
        if end > max_tokens { Err("the step's tokens end after the binding's max_tokens") } else { Ok(()) }
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl TableOp for KvCalibrate {
    fn table(&self, tokens: Range<u32>, check: impl FnOnce(u64) -> Result<()>) -> Result<StepTable<u32>> {
        let (count, extent) = crate::base::view::check_tokens(&tokens)?;
        check(count.into())?;
        Ok(StepTable { count, words: vec![tokens.start], extent })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_words_of_both_halves() {
        let words = [2.5f32.to_bits(), 0, 7, 1, 0, 2, u32::MAX, 0];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let stats = CalibrationStats::from_bytes(&bytes).expect("32 bytes");
        let want = CalibrationStats {
            amax: 2.5,
            saturated: (1 << 32) + 7,
            non_finite: 2 << 32,
            elements: 0xFFFF_FFFF,
        };
        assert_eq!(stats, want);
        assert!(matches!(CalibrationStats::from_bytes(&bytes[..31]), Err(Error::Length { got: 31, .. })));
        assert_eq!(stats.calibration(false).k_scale, 2.5 / 448.0);
        assert_eq!(stats.calibration(true).k_scale, 1.0 / 128.0);
        assert_eq!(CalibrationStats::default().calibration(true).k_scale, 1.0);
    }
}
