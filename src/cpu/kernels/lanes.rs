//! Several floats at once: what a kernel needs of them, and the form in plain Rust.
//!
//! The kernels are written once over [`Lanes`]. Every function here and there is `inline(always)` and free of
//! closures, so that it is compiled for its caller's instruction set.

/// Floats in the widest [`Lanes`]: the rows of a tile are padded with zeros to a multiple.
pub(in crate::cpu) const MAX_LANES: usize = 16;

/// Several f32.
pub(in crate::cpu) trait Lanes: Copy {
    /// How many: 4, 8 or 16.
    const LANES: usize;
    /// The same value in every lane.
    fn splat(x: f32) -> Self;
    /// # Safety
    /// `from` is readable for `LANES` floats; it need not be aligned.
    unsafe fn load(from: *const f32) -> Self;
    /// # Safety
    /// `to` is writable for `LANES` floats; it need not be aligned.
    unsafe fn store(self, to: *mut f32);
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    /// `self * factor + addend`.
    fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// All lanes, added pairwise.
    fn sum(self) -> f32;
    /// The largest lane.
    fn largest(self) -> f32;
    /// `self * 2^n`, where `n` is in the low 9 bits of `bits`, by addition to the exponent.
    fn shift_exponent(self, bits: Self) -> Self;
    /// 0 where `x < floor`, `self` elsewhere (also where `x` is NaN).
    fn zero_below(self, x: Self, floor: Self) -> Self;
}

/// `2^x` for `x` up to about 1, or NaN: within 2e-7 of it, exactly 1 at 0, and 0 below -125.
#[inline(always)]
pub(super) fn exp2<V: Lanes>(x: V) -> V {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln(2)^k / k!: the series is within 6e-9 on -0.5..=0.5.
    const C: [f32; 7] = [
        1.525_273_4e-5,
        1.540_353e-4,
        1.333_355_8e-3,
        9.618_129e-3,
        5.550_411e-2,
        2.402_265e-1,
        std::f32::consts::LN_2,
    ];
    let shifted = x.add(V::splat(ROUND));
    let f = x.sub(shifted.sub(V::splat(ROUND)));
    let mut y = V::splat(C[0]);
    for c in &C[1..] {
        y = y.mul_add(f, V::splat(*c));
    }
    y = y.mul_add(f, V::splat(1.0));
    // A NaN keeps its bits out of the exponent: added to them, some would be a number.
    V::splat(1.0).shift_exponent(shifted).mul(y).zero_below(x, V::splat(-125.0))
}

/// [`Lanes`] in plain Rust, which the compiler vectorises for the target.
#[derive(Clone, Copy)]
#[repr(align(32))]
pub(super) struct Plain([f32; 8]);

/// Fused where the target has the instruction: elsewhere `mul_add` is a library call for each element.
#[inline(always)]
fn fma(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_arch = "aarch64", target_feature = "fma")) { a.mul_add(b, c) } else { a * b + c }
}

impl Lanes for Plain {
    const LANES: usize = 8;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; 8])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for 8 floats.
        Self(unsafe { from.cast::<[f32; 8]>().read() })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for 8 floats; an array of floats is aligned as one.
        unsafe { to.cast::<[f32; 8]>().write(self.0) }
    }

    #[inline(always)]
    fn add(mut self, other: Self) -> Self {
        for (a, b) in self.0.iter_mut().zip(&other.0) {
            *a += *b;
        }
        self
    }

    #[inline(always)]
    fn sub(mut self, other: Self) -> Self {
        for (a, b) in self.0.iter_mut().zip(&other.0) {
            *a -= *b;
        }
        self
    }

    #[inline(always)]
    fn mul(mut self, other: Self) -> Self {
        for (a, b) in self.0.iter_mut().zip(&other.0) {
            *a *= *b;
        }
        self
    }

    #[inline(always)]
    fn max(mut self, other: Self) -> Self {
        for (a, b) in self.0.iter_mut().zip(&other.0) {
            *a = if *a > *b { *a } else { *b };
        }
        self
    }

    #[inline(always)]
    fn mul_add(mut self, factor: Self, addend: Self) -> Self {
        for ((a, b), c) in self.0.iter_mut().zip(&factor.0).zip(&addend.0) {
            *a = fma(*a, *b, *c);
        }
        self
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        let x = self.0;
        let half = [x[0] + x[4], x[1] + x[5], x[2] + x[6], x[3] + x[7]];
        (half[0] + half[2]) + (half[1] + half[3])
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        let mut largest = self.0[0];
        for &x in &self.0[1..] {
            largest = if x > largest { x } else { largest };
        }
        largest
    }

    #[inline(always)]
    fn shift_exponent(mut self, bits: Self) -> Self {
        for (a, b) in self.0.iter_mut().zip(&bits.0) {
            *a = f32::from_bits(a.to_bits().wrapping_add(b.to_bits() << 23));
        }
        self
    }

    #[inline(always)]
    fn zero_below(mut self, x: Self, floor: Self) -> Self {
        for ((a, x), floor) in self.0.iter_mut().zip(&x.0).zip(&floor.0) {
            *a = if *x < *floor { 0.0 } else { *a };
        }
        self
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Checks one form of [`exp2`] through `call`, which maps one value.
    pub(in crate::cpu) fn check_exp2(call: impl Fn(f32) -> f32) {
        assert_eq!(call(0.0).to_bits(), 1f32.to_bits());
        assert_eq!(call(-0.0).to_bits(), 1f32.to_bits());
        for x in [f32::NEG_INFINITY, -1e30, -200.0, -125.1] {
            assert_eq!(call(x).to_bits(), 0, "{x}");
        }
        for bits in [0x7FC0_0000, 0xFFFF_FFFF, 0x7F80_0001, 0xFFC0_0001] {
            assert!(call(f32::from_bits(bits)).is_nan(), "{bits:#x}");
        }
        for i in 0..=1_000_000u32 {
            let x = 0.25 - i as f32 * 1.252e-4;
            let want = f64::from(x).exp2();
            let error = (f64::from(call(x)) - want).abs() / want;
            assert!(error < 2e-7, "2^{x}: relative error {error}");
        }
    }

    #[test]
    fn plain_exp2_is_exact_at_zero_and_close_elsewhere() {
        check_exp2(|x| exp2(Plain::splat(x)).0[3]);
    }

    #[test]
    fn sums_add_every_lane_once() {
        assert_eq!(Plain([1., 2., 4., 8., 16., 32., 64., 128.]).sum(), 255.0);
        assert_eq!(Plain([1., 2., 4., 8., 160., 32., 64., 128.]).largest(), 160.0);
    }
}
