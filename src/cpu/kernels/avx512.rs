//! The kernels with AVX-512F and VL. Without VL, sums are added up across lanes in the lower 16 registers only, and one is spilled.
//!
//! Every `unsafe` here has one reason: this module's private [`Avx512`] is used
//! only below functions with those target features, and [`super::VARIANTS`] offers them only where
//! [`runs_here`] has seen the processor.

use std::arch::x86_64::*;
use std::ops::Range;

use super::attend;
use super::lanes::Lanes;
use super::tile::Tile;
use crate::base::dtype::Dtype;

/// Whether this processor has what the kernels are compiled for.
pub(super) fn runs_here() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl")
}

/// [`super::attend::attend`].
///
/// # Safety
/// [`runs_here`].
#[target_feature(enable = "avx512f,avx512vl")]
pub(super) unsafe fn attend(
    tile: &mut Tile<'_>,
    rows: Range<usize>,
    tokens: usize,
    scale: f32,
    next: &[&[u8]],
) {
    // Larger tiles have more sums to add up across lanes at once, which takes longer than their loads.
    attend::attend::<Avx512, 4, 4, 4, 4>(tile, rows, tokens, scale, next);
}

/// [`super::formats::widen`].
///
/// # Safety
/// [`runs_here`].
#[target_feature(enable = "avx512f,avx512vl")]
pub(super) unsafe fn widen(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    if dtype != Dtype::F16 {
        return super::formats::widen(dtype, bytes, out);
    }
    let (mut from, mut to) = (bytes.chunks_exact(32), out.chunks_exact_mut(16));
    for (from, to) in from.by_ref().zip(to.by_ref()) {
        // SAFETY: 32 bytes are read from a slice of 32 and 16 floats written to one of 16, both unaligned.
        unsafe {
            _mm512_storeu_ps(to.as_mut_ptr(), _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
        }
    }
    super::formats::widen(dtype, from.remainder(), to.into_remainder());
}

/// Sixteen floats in one register.
#[derive(Clone, Copy)]
struct Avx512(__m512);

impl Lanes for Avx512 {
    const LANES: usize = 16;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { _mm512_set1_ps(x) })
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: see the top of the file; the caller vouches for the pointer.
        Self(unsafe { _mm512_loadu_ps(from) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: see the top of the file; the caller vouches for the pointer.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { _mm512_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { _mm512_sub_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { _mm512_mul_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { _mm512_max_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { _mm512_fmadd_ps(self.0, factor.0, addend.0) })
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see the top of the file.
        unsafe { _mm512_reduce_add_ps(self.0) }
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        // SAFETY: see the top of the file.
        unsafe { _mm512_reduce_max_ps(self.0) }
    }

    #[inline(always)]
    fn shift_exponent(self, bits: Self) -> Self {
        // SAFETY: see the top of the file.
        unsafe {
            let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(bits.0));
            Self(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(self.0), exponent)))
        }
    }

    #[inline(always)]
    fn zero_below(self, x: Self, floor: Self) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x.0, floor.0), self.0) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::formats::tests::check_widen;
    use super::super::lanes::{exp2, tests::check_exp2};
    use super::*;

    #[test]
    fn avx512_exp2_and_widen_are_those_of_the_plain_form() {
        if !runs_here() {
            eprintln!("skipped: this processor lacks AVX-512F or VL");
            return;
        }
        #[target_feature(enable = "avx512f,avx512vl")]
        fn one(x: f32) -> f32 {
            exp2(Avx512::splat(x)).largest()
        }
        // SAFETY: the processor was asked above.
        check_exp2(|x| unsafe { one(x) });
        // SAFETY: the processor was asked above.
        check_widen(|dtype, bytes, out| unsafe { widen(dtype, bytes, out) });
    }
}
