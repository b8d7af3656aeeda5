//! Arguments, checks and results of `kv_calibrate`.

use std::ops::Range;

use crate::dtype::k_scale_of;
use crate::layer::{View, fits, no_aliases};
use crate::{Calibration, Dtype, E4M3_MAX, Error, KvSpec, MlaShape, MlaSpec, Result};

/// What a `kv_calibrate` is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CalibrateSpec {
    /// `kv_lora_rank` and `qk_rope_head_dim`; the heads do not matter.
    pub shape: MlaShape,
    /// Dtype of `kv_c` and `k_pe`: f32, f16 or bf16.
    pub input: Dtype,
}

/// One layer's new rows, as `kv_append` gets them, and where what is in them is counted.
#[derive(Debug, Clone, Copy)]
pub struct Calibrate<B> {
    /// Latent rows `[tokens, L]`; offset and `token_stride` are multiples of 4 elements, `head_stride` is unread.
    pub kv_c: View<B>,
    /// Rotary rows `[tokens, R]`, the same; unread where `R` is 0.
    pub k_pe: View<B>,
    /// The scale in use: elements above `448 * k_scale` count as saturated. Finite and above 0.
    pub k_scale: f32,
    /// [`CalibrationStats::BYTES`] at the front of a buffer, zeros before the first call. Every call adds to them.
    pub stats: B,
}

/// What `kv_calibrate` has counted since its buffer was zeroed.
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
    pub fn calibration(&self, power_of_two: bool) -> Calibration {
        Calibration { k_scale: k_scale_of(self.amax, power_of_two), saturated: 0 }
    }
}

impl CalibrateSpec {
    /// # Errors
    /// [`Error::Shape`] and [`Error::DtypeUnsupported`].
    pub fn check(&self) -> Result<()> {
        let kv = KvSpec { dtype: Dtype::E4m3, page_size: 1, num_pages: 1 };
        MlaSpec { shape: self.shape, kv, query: self.input, out: Dtype::F32 }.check()?;
        if self.input == Dtype::E4m3 {
            let cure = "use f32, f16 or bf16";
            return Err(Error::DtypeUnsupported { what: "kv_c and k_pe", got: self.input, cure });
        }
        Ok(())
    }
}

/// # Errors
/// [`Error::Shape`] for a range that ends before it begins.
pub(crate) fn check_tokens(tokens: &Range<u32>) -> Result<u32> {
    tokens.end.checked_sub(tokens.start).ok_or(Error::Shape {
        what: "the end of a token range",
        got: tokens.end.into(),
        cure: "must not be before its start",
    })
}

impl<'a, B> Calibrate<&'a B> {
    /// # Errors
    /// [`Error::Scale`], [`Error::Alignment`], [`Error::BufferTooSmall`], given each buffer's bytes.
    pub(crate) fn check(&self, spec: &CalibrateSpec, tokens: u32, size: impl Fn(&B) -> u64) -> Result<()> {
        spec.check()?;
        if !(self.k_scale.is_finite() && self.k_scale > 0.0) {
            return Err(Error::Scale { what: "k_scale", got: self.k_scale });
        }
        let rows =
            [("kv_c", self.kv_c, spec.shape.kv_lora_rank), ("k_pe", self.k_pe, spec.shape.qk_rope_head_dim)];
        for (what, view, dim) in rows.into_iter().filter(|(.., dim)| *dim > 0) {
            for got in [view.offset, view.token_stride] {
                if got % 4 != 0 {
                    return Err(Error::Alignment { what, got, of: 4, unit: "elements" });
                }
            }
            let end = view.end(tokens.into(), 1, dim.into()).saturating_mul(spec.input.bytes() as u64);
            fits(what, end, size(view.buffer))?;
        }
        fits("stats", CalibrationStats::BYTES, size(self.stats))
    }

    /// The rotary rows. Without a rotary part they are unread, whatever they are, and the latent ones stand in for them.
    pub(crate) fn rotary(&self, spec: &CalibrateSpec) -> View<&'a B> {
        if spec.shape.qk_rope_head_dim == 0 { self.kv_c } else { self.k_pe }
    }

    /// # Errors
    /// [`Error::Aliased`].
    pub(crate) fn check_aliases(&self, spec: &CalibrateSpec, is_same: impl Fn(&B, &B) -> bool) -> Result<()> {
        let inputs = [("kv_c", self.kv_c.buffer), ("k_pe", self.rotary(spec).buffer)];
        no_aliases(&inputs, &[("stats", self.stats)], is_same)
    }

    /// The largest magnitude that does not saturate; infinite where none does.
    pub(crate) fn limit(&self) -> f32 {
        E4M3_MAX * self.k_scale
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
