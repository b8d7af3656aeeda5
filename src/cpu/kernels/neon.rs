//! The kernels with NEON, which aarch64 processors have. The plain form serves them badly: its eight floats are two registers, so sums of
//! 4 x 4 are spilled, and where rows are few LLVM vectorises across tokens, with shuffles.
//!
//! Every `unsafe` here has one reason: this module's private [`Neon`] is used only below functions with that target feature, and
//! [`super::VARIANTS`] offers them only where [`runs_here`] has seen the processor.

use std::arch::aarch64::*;
use std::arch::asm;
use std::ops::Range;

use super::attend;
use super::lanes::Lanes;
use super::tile::Tile;
use crate::base::dtype::Dtype;

/// Whether this processor has what the kernels are compiled for.
pub(super) fn runs_here() -> bool {
    std::arch::is_aarch64_feature_detected!("neon")
}

/// [`super::attend::attend`].
///
/// # Safety
/// [`runs_here`].
#[target_feature(enable = "neon")]
pub(super) unsafe fn attend(
    tile: &mut Tile<'_>,
    rows: Range<usize>,
    tokens: usize,
    scale: f32,
    next: &[&[u8]],
) {
    // 24 sums, 4 keys and a query take 29 of 32 registers. Blocks and latents are whole tiles of 4 columns.
    attend::attend::<Neon, 6, 4, 6, 4>(tile, rows, tokens, scale, next);
}

/// [`super::formats::widen`].
///
/// # Safety
/// [`runs_here`].
#[target_feature(enable = "neon")]
pub(super) unsafe fn widen(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    if dtype == Dtype::F32 {
        return super::formats::widen(dtype, bytes, out);
    }
    let (mut from, mut to) = (bytes.chunks_exact(8 * dtype.bytes()), out.chunks_exact_mut(8));
    for (from, to) in from.by_ref().zip(to.by_ref()) {
        let from = from.as_ptr();
        // SAFETY: `from` has 8 elements of the dtype, and `to` 8 floats.
        unsafe {
            let [low, high] = match dtype {
                Dtype::E4m3 => e4m3_values(vld1_u8(from)),
                Dtype::Bf16 => bf16_values(vreinterpretq_u16_u8(vld1q_u8(from))),
                Dtype::F16 | Dtype::F32 => f16_values(vreinterpretq_u16_u8(vld1q_u8(from))),
            };
            vst1q_f32(to.as_mut_ptr(), low);
            vst1q_f32(to.as_mut_ptr().add(4), high);
        }
    }
    super::formats::widen(dtype, from.remainder(), to.into_remainder());
}

#[inline]
#[target_feature(enable = "neon")]
fn f16_values(codes: uint16x8_t) -> [float32x4_t; 2] {
    let (low, high): (float32x4_t, float32x4_t);
    // SAFETY: the instructions read and write these registers only. Their intrinsics are not in the oldest Rust that builds this crate.
    unsafe {
        asm!(
            "fcvtl {low:v}.4s, {codes:v}.4h",
            "fcvtl2 {high:v}.4s, {codes:v}.8h",
            codes = in(vreg) codes,
            low = out(vreg) low,
            high = out(vreg) high,
            options(pure, nomem, nostack),
        );
    }
    [low, high]
}

/// A code is the upper half of its f32.
#[inline]
#[target_feature(enable = "neon")]
fn bf16_values(codes: uint16x8_t) -> [float32x4_t; 2] {
    let zeros = vdupq_n_u16(0);
    [vreinterpretq_f32_u16(vzip1q_u16(zeros, codes)), vreinterpretq_f32_u16(vzip2q_u16(zeros, codes))]
}

/// With its exponent and mantissa at f16's places, a code is an f16 of 2^-8 times its value, also where it is subnormal.
#[inline]
#[target_feature(enable = "neon")]
fn e4m3_values(codes: uint8x8_t) -> [float32x4_t; 2] {
    // The sign is extended: what it leaves in the highest bit of the exponent is removed.
    let wide = vreinterpretq_u16_s16(vshll_n_s8::<7>(vreinterpret_s8_u8(codes)));
    let moved = vandq_u16(wide, vdupq_n_u16(0xBFFF));
    // All bits are set where the code is NaN, which gives one.
    let nan = vceqq_u16(vandq_u16(moved, vdupq_n_u16(0x7FFF)), vdupq_n_u16(0x7F << 7));
    let [low, high] = f16_values(vorrq_u16(moved, nan));
    [vmulq_n_f32(low, 256.0), vmulq_n_f32(high, 256.0)]
}

/// Four floats in one register.
#[derive(Clone, Copy)]
struct Neon(float32x4_t);

impl Lanes for Neon {
    const LANES: usize = 4;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { vdupq_n_f32(x) })
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: see the top of the file; the caller vouches for the pointer.
        Self(unsafe { vld1q_f32(from) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: see the top of the file; the caller vouches for the pointer.
        unsafe { vst1q_f32(to, self.0) }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { vaddq_f32(self.0, other.0) })
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { vsubq_f32(self.0, other.0) })
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { vmulq_f32(self.0, other.0) })
    }

    /// A comparison and a choice: the instruction for it would keep a NaN of `self`.
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { vbslq_f32(vcgtq_f32(self.0, other.0), self.0, other.0) })
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { vfmaq_f32(addend.0, self.0, factor.0) })
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see the top of the file.
        unsafe { vaddvq_f32(self.0) }
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        // SAFETY: see the top of the file.
        unsafe { vmaxvq_f32(self.0) }
    }

    #[inline(always)]
    fn shift_exponent(self, bits: Self) -> Self {
        // SAFETY: see the top of the file.
        unsafe {
            let exponent = vshlq_n_u32::<23>(vreinterpretq_u32_f32(bits.0));
            Self(vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(self.0), exponent)))
        }
    }

    #[inline(always)]
    fn zero_below(self, x: Self, floor: Self) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe {
            vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(self.0), vcltq_f32(x.0, floor.0)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::formats::tests::check_widen;
    use super::super::lanes::{exp2, tests::check_exp2};
    use super::*;

    #[test]
    fn neon_exp2_and_widen_are_those_of_the_plain_form() {
        #[target_feature(enable = "neon")]
        fn one(x: f32) -> f32 {
            exp2(Neon::splat(x)).largest()
        }
        assert!(runs_here());
        // SAFETY: the processor was asked above.
        check_exp2(|x| unsafe { one(x) });
        // SAFETY: the processor was asked above.
        check_widen(|dtype, bytes, out| unsafe { widen(dtype, bytes, out) });
    }

    #[test]
    fn neon_sums_add_every_lane_once() {
        let load = |lanes: [f32; 4]| {
            // SAFETY: four floats.
            unsafe { Neon::load(lanes.as_ptr()) }
        };
        assert_eq!(load([1., 2., 4., 8.]).sum(), 15.0);
        assert_eq!(load([1., 20., 4., 8.]).largest(), 20.0);
        let (nan, two) = (load([f32::NAN; 4]), load([2.0; 4]));
        assert_eq!(nan.max(two).sum(), 8.0);
        assert!(two.max(nan).largest().is_nan());
    }
}
