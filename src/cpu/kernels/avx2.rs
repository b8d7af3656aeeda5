//! The kernels with AVX2, FMA and F16C. Every `unsafe` here has one reason: this module's private [`Avx`] is used
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
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// [`super::attend::attend`].
///
/// # Safety
/// [`runs_here`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn attend(
    tile: &mut Tile<'_>,
    rows: Range<usize>,
    tokens: usize,
    scale: f32,
    next: &[&[u8]],
) {
    // With outputs of 4 x 3 the compiler spills a sum, though 16 registers would do.
    attend::attend::<Avx, 4, 3, 6, 2>(tile, rows, tokens, scale, next);
}

/// [`super::formats::widen`].
///
/// # Safety
/// [`runs_here`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn widen(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    if dtype != Dtype::F16 {
        return super::formats::widen(dtype, bytes, out);
    }
    let (mut from, mut to) = (bytes.chunks_exact(16), out.chunks_exact_mut(8));
    for (from, to) in from.by_ref().zip(to.by_ref()) {
        // SAFETY: 16 bytes are read from a slice of 16 and 8 floats written to one of 8, both unaligned.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast()))) }
    }
    super::formats::widen(dtype, from.remainder(), to.into_remainder());
}

/// Eight floats in one register.
#[derive(Clone, Copy)]
struct Avx(__m256);

impl Lanes for Avx {
    const LANES: usize = 8;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { _mm256_set1_ps(x) })
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: see the top of the file; the caller vouches for the pointer.
        Self(unsafe { _mm256_loadu_ps(from) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: see the top of the file; the caller vouches for the pointer.
        unsafe { _mm256_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { _mm256_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { _mm256_sub_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { _mm256_mul_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { _mm256_max_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { _mm256_fmadd_ps(self.0, factor.0, addend.0) })
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see the top of the file.
        unsafe {
            let half = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)))
        }
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        // SAFETY: see the top of the file.
        unsafe {
            let half = _mm_max_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)))
        }
    }

    #[inline(always)]
    fn shift_exponent(self, bits: Self) -> Self {
        // SAFETY: see the top of the file.
        unsafe {
            let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(bits.0));
            Self(_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(self.0), exponent)))
        }
    }

    #[inline(always)]
    fn zero_below(self, x: Self, floor: Self) -> Self {
        // SAFETY: see the top of the file.
        Self(unsafe { _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x.0, floor.0), self.0) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::formats::tests::check_widen;
    use super::super::lanes::{exp2, tests::check_exp2};
    use super::*;

    #[test]
    fn avx2_exp2_and_widen_are_those_of_the_plain_form() {
        if !runs_here() {
            eprintln!("skipped: this processor lacks AVX2, FMA or F16C");
            return;
        }
        #[target_feature(enable = "avx2,fma,f16c")]
        fn one(x: f32) -> f32 {
            exp2(Avx::splat(x)).largest()
        }
        // SAFETY: the processor was asked above.
        check_exp2(|x| unsafe { one(x) });
        // SAFETY: the processor was asked above.
        check_widen(|dtype, bytes, out| unsafe { widen(dtype, bytes, out) });
    }
}
