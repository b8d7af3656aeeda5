//! The guard: what rounding to a narrow dtype loses, counted by the kernel that rounds. Pure.

use std::sync::atomic::{AtomicU32, Ordering};

use super::op::Use;
use crate::base::dtype::{Dtype, E4M3_MAX};
use crate::base::error::{Error, Result};

/// Where an op counts what its rounding loses: a row of counters. Of an op with `guard` in its spec, such as
/// [`KvAppend::guard`](crate::KvAppend::guard); without it a kernel has no counters, and no instruction of them.
///
/// Counted is each element that the op writes, as it is before it is rounded and divided by its scale:
///
/// | counter | of codes (e4m3 with a scale) | of f16 and bf16 |
/// |---|---|---|
/// | saturated | past 448 times the scale, infinities too | what becomes infinite, infinities too |
/// | NaN | NaN | NaN |
/// | flushed | not 0, and its code is | not 0, and the nearest number is |
/// | amax | the largest finite magnitude | the same |
///
/// In an f32 output infinities and NaN are counted. A token with scales of its own
/// ([`KvLayout::Ds656`](crate::KvLayout::Ds656) and `Ds528`) is written with scales that are made from it, so that no number
/// saturates: in its latent only infinities and NaN are counted.
///
/// ```
/// use wgpu_mla::{Device, Dtype, GuardCounts, GuardView, HeadDims, HeadProject, HeadProjectArgs, View, WeightView, cpu::Cpu};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// let dims = HeadDims { num_heads: 1, kv_lora_rank: 16, qk_nope_head_dim: 8, v_head_dim: 8 };
/// let cpu = Cpu::new();
/// let (x, y, weights) = (cpu.buffer(8 * 4)?, cpu.buffer(16)?, cpu.buffer(dims.elements() * 4)?);
/// cpu.upload(&x, 0, &Dtype::F32.encode_all(&[1.0; 8]))?;
/// cpu.upload(&weights, 0, &Dtype::F32.encode_all(&[[40.0; 8 * 8], [112.0; 8 * 8]].concat()))?;
/// let counters = cpu.buffer(GuardCounts::BYTES)?;
///
/// // Sums of 320 and of 896, in codes of which the largest is 448.
/// let op = HeadProject { guard: true, ..HeadProject::absorb(&dims, Dtype::F32, Dtype::F32, Dtype::E4m3) };
/// let (x, y, weight) = (View::dense(&x, 1, 8), View::dense(&y, 1, 16), WeightView::w_uk(&dims, &weights));
/// # let weight = WeightView { row_stride: 8, ..weight };
/// # let op = op.transposed();
/// let guard = Some(GuardView { counters: &counters, row: 0 });
/// cpu.once(op, 0..1, &HeadProjectArgs { x, weight, y, scale: 1.0, out_scale: 1.0, saturates: false, guard })?;
/// let counts = GuardCounts::decode_all(&cpu.download(&counters, GuardCounts::BYTES)?)[0];
/// assert_eq!((counts.saturated, counts.nan, counts.flushed, counts.amax), (8, 0, 0, 896.0));
/// assert_eq!(counts.fitting_scale(), 2.0);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuardView<B> {
    /// Rows of [`GuardCounts::BYTES`], zeros before the first call, in a buffer that holds nothing else that the op reads or writes.
    /// Calls add to them until the host zeroes them again.
    pub counters: B,
    /// The row of this op, counted from 0. A [`RopeAppend`](crate::RopeAppend) counts keys there, and queries that are codes in the next.
    pub row: u32,
}

/// A row of counters.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct GuardCounts {
    /// Elements past the range of what they were rounded to. Each counter starts again at 0 after 2^32 elements.
    pub saturated: u32,
    /// NaN.
    pub nan: u32,
    /// Elements other than 0 that became 0.
    pub flushed: u32,
    /// The largest finite magnitude.
    pub amax: f32,
}

impl GuardCounts {
    /// Bytes of a row.
    pub const BYTES: u64 = 16;

    /// Rows as they were downloaded: four little-endian words each, which are three counts and amax as f32. Bytes behind the last whole
    /// row are ignored.
    #[must_use]
    pub fn decode_all(bytes: &[u8]) -> Vec<Self> {
        let row = |row: &[u8]| {
            let word = |i: usize| Dtype::F32.decode_at(row, i);
            let count = |i: usize| word(i).to_bits();
            Self { saturated: count(0), nan: count(1), flushed: count(2), amax: word(3) }
        };
        bytes.chunks_exact(Self::BYTES as usize).map(row).collect()
    }

    /// The smallest scale of codes with which none of the finite elements saturates: `amax / 448`.
    #[must_use]
    pub fn fitting_scale(&self) -> f32 {
        let scale = self.amax / E4M3_MAX;
        // The quotient may have been rounded down.
        if f64::from(scale) * f64::from(E4M3_MAX) < f64::from(self.amax) { scale.next_up() } else { scale }
    }
}

/// The bounds between which a magnitude is rounded to a number other than 0, as bits: those of numbers from 0 up are in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GuardBounds {
    /// The largest that becomes 0.
    pub(crate) flushed: u32,
    /// The largest that does not saturate.
    pub(crate) top: u32,
}

impl GuardBounds {
    /// The bounds of a dtype, whose codes have a scale.
    pub(crate) fn of(dtype: Dtype, scale: f32) -> Self {
        let scale = f64::from(scale);
        let [flushed, top] = match dtype {
            Dtype::F32 => [0.0, f64::from(f32::MAX)],
            // Half of the smallest subnormal is a tie, and goes to 0. What is half a unit past the largest goes to infinity.
            Dtype::F16 => [(-25f64).exp2(), f64::from(65_520f32.next_down())],
            Dtype::Bf16 => [(-134f64).exp2(), f64::from(f32::from_bits(0x7F7F_7FFF))],
            Dtype::E4m3 => [(-10f64).exp2() * scale, f64::from(E4M3_MAX) * scale],
        };
        Self { flushed: bits_at_most(flushed), top: bits_at_most(top) }
    }

    /// The bounds of codes whose scales are made from the elements.
    pub(crate) const fn of_own_scales() -> Self {
        Self { flushed: 0, top: f32::MAX.to_bits() }
    }

    /// Counts an element.
    pub(crate) fn note(&self, lost: &mut Lost, x: f32) {
        let bits = x.abs().to_bits();
        lost.nan += u32::from(x.is_nan());
        lost.saturated += u32::from(bits > self.top && !x.is_nan());
        lost.flushed += u32::from(bits != 0 && bits <= self.flushed);
        if x.is_finite() {
            lost.amax = lost.amax.max(bits);
        }
    }
}

/// The bits of the largest f32 up to a number from 0 on.
fn bits_at_most(number: f64) -> u32 {
    let near = (number as f32).min(f32::MAX);
    near.to_bits() - u32::from(f64::from(near) > number)
}

/// What a thread has counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Lost {
    saturated: u32,
    nan: u32,
    flushed: u32,
    /// Bits.
    amax: u32,
}

impl Lost {
    /// Adds it to a row of counters.
    pub(crate) fn add_to(self, words: &[AtomicU32], row: u32) {
        let [saturated, nan, flushed, amax] = std::array::from_fn(|i| &words[row as usize * 4 + i]);
        saturated.fetch_add(self.saturated, Ordering::Relaxed);
        nan.fetch_add(self.nan, Ordering::Relaxed);
        flushed.fetch_add(self.flushed, Ordering::Relaxed);
        amax.fetch_max(self.amax, Ordering::Relaxed);
    }
}

impl<B> GuardView<B> {
    /// The same row of another handle.
    pub(crate) fn map<'a, C>(&'a self, mut f: impl FnMut(Use, &'a B) -> Result<C>) -> Result<GuardView<C>> {
        Ok(GuardView { counters: f(Use::Write("guard"), &self.counters)?, row: self.row })
    }

    /// Bytes of the buffer before the row, and up to the end of so many rows.
    pub(crate) fn bytes(&self, rows: u32) -> std::ops::Range<u64> {
        let row = |row: u64| row * GuardCounts::BYTES;
        row(self.row.into())..row(u64::from(self.row) + u64::from(rows))
    }
}

/// A row behind another one.
pub(crate) fn step_row<B>(guard: GuardView<B>, by: u32) -> GuardView<B> {
    GuardView { row: guard.row.saturating_add(by), ..guard }
}

/// The same counters on other handles, if an op has them.
///
/// # Errors
/// The errors of `f`.
pub(crate) fn map_guard<'a, B, C>(
    guard: &'a Option<GuardView<B>>,
    f: impl FnMut(Use, &'a B) -> Result<C>,
) -> Result<Option<GuardView<C>>> {
    match guard {
        Some(guard) => guard.map(f).map(Some),
        None => Ok(None),
    }
}

/// Checks that an op that counts has room for so many rows, and that another has none.
///
/// # Errors
/// [`Error::LayoutMismatch`] and [`Error::BufferTooSmall`].
pub(crate) fn check_guard<B>(
    is_guarded: bool,
    guard: Option<&GuardView<&B>>,
    rows: u32,
    size: impl Fn(&B) -> u64,
) -> Result<()> {
    let detail = match (is_guarded, guard) {
        (false, None) => return Ok(()),
        (true, Some(guard)) => {
            let (what, end, size) = ("guard", guard.bytes(rows).end, size(guard.counters));
            return if end > size { Err(Error::BufferTooSmall { what, end, size }) } else { Ok(()) };
        }
        (true, None) => "it was compiled with a guard: its arguments need counters, `guard: Some(..)`",
        (false, Some(_)) => "its arguments have counters: compile it with `guard: true`, or give it none",
    };
    Err(Error::LayoutMismatch { detail })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::dtype::{e4m3_decode, e4m3_encode};

    fn counted(bounds: GuardBounds, x: f32) -> [u32; 3] {
        let mut lost = Lost::default();
        bounds.note(&mut lost, x);
        [lost.saturated, lost.nan, lost.flushed]
    }

    /// At each bound and beside it, what is counted is what rounding does.
    #[test]
    fn bounds_are_those_of_rounding() {
        let rounded = |dtype: Dtype, x: f32| {
            let code = dtype.encode_all(&[x]);
            dtype.decode_all(&code)[0]
        };
        for dtype in [Dtype::F16, Dtype::Bf16, Dtype::E4m3] {
            let bounds = GuardBounds::of(dtype, 1.0);
            for bound in [bounds.flushed, bounds.top] {
                for bits in [bound - 1, bound, bound + 1] {
                    let x = f32::from_bits(bits);
                    let [saturated, _, flushed] = counted(bounds, -x);
                    let lost = if dtype.is_fp8() { x > 448.0 } else { rounded(dtype, x).is_infinite() };
                    assert_eq!(
                        (saturated == 1, flushed == 1),
                        (lost, rounded(dtype, x) == 0.0),
                        "{dtype} {x:e}"
                    );
                }
            }
            assert_eq!(counted(bounds, 0.0), [0; 3]);
            assert_eq!(counted(bounds, -f32::INFINITY), [1, 0, 0]);
            assert_eq!(counted(bounds, f32::NAN), [0, 1, 0]);
        }
        assert_eq!(counted(GuardBounds::of(Dtype::F32, 1.0), f32::INFINITY), [1, 0, 0]);
        assert_eq!(counted(GuardBounds::of(Dtype::F32, 1.0), f32::MAX), [0; 3]);
        assert_eq!(counted(GuardBounds::of_own_scales(), 1e-45), [0; 3]);
    }

    #[test]
    fn bounds_of_codes_follow_the_scale() {
        for scale in [0.37f32, 1.0, 1.5, f32::MIN_POSITIVE, 1e30, f32::MAX] {
            let bounds = GuardBounds::of(Dtype::E4m3, scale);
            for bits in [bounds.flushed, bounds.flushed + 1, bounds.top, bounds.top.saturating_add(1)] {
                let x = f32::from_bits(bits);
                let quotient = f64::from(x) / f64::from(scale);
                let code = e4m3_encode(quotient as f32);
                let [saturated, _, flushed] = counted(bounds, x);
                assert_eq!(saturated == 1, quotient > 448.0, "{x:e} / {scale:e}");
                assert_eq!(flushed == 1, bits != 0 && quotient <= (-10f64).exp2(), "{x:e} / {scale:e}");
                assert!(flushed == 0 || e4m3_decode(code) == 0.0, "{x:e} / {scale:e}");
            }
        }
    }

    #[test]
    fn the_scale_that_fits_saturates_nothing() {
        for amax in [1.0f32, 449.0, 0.1, 1e-30, 3e38] {
            let scale = GuardCounts { amax, ..GuardCounts::default() }.fitting_scale();
            assert_eq!(counted(GuardBounds::of(Dtype::E4m3, scale), amax)[0], 0, "{amax:e}");
            assert!(scale <= (amax / 448.0).next_up());
        }
    }
}
