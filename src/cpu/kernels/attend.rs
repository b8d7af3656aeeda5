//! The decode kernel: one block of the cache against a tile of query rows, in f32.
//!
//! ```text
//! S = Q K^T            tiles of registers: rows x tokens, lanes over the dims
//! m' = max(m, max S);  a = 2^(scale * (m - m'));  P = 2^(scale * (S - m'));  l = l * a + sum P
//! O = O * a + P V      tiles of registers: rows x vectors of columns, over the tokens
//! ```
//! A running f32 sum of 8000 equal terms is off by 1e-4. So `P V` of a block is summed from 0 before it is added, and every
//! [`CARRY_BLOCKS`](super::tile::CARRY_BLOCKS) blocks the sums move to f64 ([`Tile::carry`]), where a split may be as long as it likes.
//!
//! A query row's result does not depend on the other rows of its tile: a tile of another shape does the same operations in the same
//! order for each of its elements.

use std::ops::Range;

use super::lanes::{Lanes, exp2};
use super::tile::{BLOCK, Tile};

/// Lets `rows` of a tile attend the first `tokens` tokens of its block. `scale` brings dot products to base 2. Meanwhile `next`, rows
/// of the cache, are fetched from memory.
///
/// Tiles of registers have `R` rows x `T` tokens of dot products, `RO` rows x `C` vectors of outputs. Such a tile, a row of it and one
/// more must fit the registers: one sum that is spilled halves the speed.
#[inline(always)]
pub(in crate::cpu) fn attend<V: Lanes, const R: usize, const T: usize, const RO: usize, const C: usize>(
    tile: &mut Tile<'_>,
    rows: Range<usize>,
    tokens: usize,
    scale: f32,
    next: &[&[u8]],
) {
    tile.check(V::LANES, &rows, tokens);
    let Tile { stride, dim, latent, value_at, .. } = *tile;
    let (first, num_rows) = (rows.start, rows.len());
    // SAFETY: `check` has found every array long enough for `rows` and a block. `p` is `BLOCK` floats a row, a multiple of the
    // lanes.
    unsafe {
        let kv = tile.kv.as_ptr();
        let (q, p) = (tile.q.as_ptr().add(first * stride), tile.p.as_mut_ptr().add(first * BLOCK));
        let next_bytes = next.first().map_or(0, |row| row.len()).div_ceil(num_rows.max(1));
        each_tile::<V, R, T>(&Dots { q, k: kv, p, stride, dim, next, next_bytes }, num_rows, tokens);
        for row in rows {
            weights::<V>(tile, row, tokens, scale);
        }
        let (p, rescale) = (tile.p.as_ptr().add(first * BLOCK), tile.rescale.as_ptr().add(first));
        let (v, o) = (kv.add(value_at), tile.o.as_mut_ptr().add(first * latent));
        each_tile::<V, RO, C>(
            &Values { p, rescale, v, o, tokens, stride, latent },
            num_rows,
            latent / V::LANES,
        );
    }
}

/// A product of two matrices, of which one has a row a query row. Its sums are computed a tile of registers at a time.
trait Product<V: Lanes> {
    /// The sums of `R` rows and `C` columns.
    ///
    /// # Safety
    /// The product's pointers reach as far as the last of them.
    unsafe fn tile<const R: usize, const C: usize>(&self, row: usize, column: usize);
}

/// All sums of a product, by tiles of up to `R` rows and of `C` columns or one. What a tile's columns need is read from memory
/// once, and for the other rows from the L1 cache.
///
/// # Safety
/// The product's pointers reach as far as `rows` and `columns`.
#[inline(always)]
unsafe fn each_tile<V: Lanes, const R: usize, const C: usize>(
    product: &impl Product<V>,
    rows: usize,
    columns: usize,
) {
    let mut column = 0;
    while column < columns {
        // SAFETY: as many columns are left.
        unsafe {
            if columns - column >= C {
                rows_of_tiles::<V, R, C>(product, rows, column);
                column += C;
            } else {
                rows_of_tiles::<V, R, 1>(product, rows, column);
                column += 1;
            }
        }
    }
}

/// The tiles of `C` columns, with about as many rows each: one with few rows waits for its own sums.
///
/// # Safety
/// The same holds as for [`each_tile`].
#[inline(always)]
unsafe fn rows_of_tiles<V: Lanes, const R: usize, const C: usize>(
    product: &impl Product<V>,
    rows: usize,
    column: usize,
) {
    let mut row = 0;
    while row < rows {
        let left = rows - row;
        let many = left.div_ceil(left.div_ceil(R));
        // SAFETY: no more rows than are left. What is beyond `R` is not compiled.
        unsafe {
            match many {
                1 => product.tile::<1, C>(row, column),
                2 if R >= 2 => product.tile::<2, C>(row, column),
                3 if R >= 3 => product.tile::<3, C>(row, column),
                4 if R >= 4 => product.tile::<4, C>(row, column),
                5 if R >= 5 => product.tile::<5, C>(row, column),
                _ => product.tile::<R, C>(row, column),
            }
        }
        row += many;
    }
}

/// `p[r][t] = q[r] . k[t]`: the columns are tokens.
struct Dots<'a> {
    /// `[rows, stride]`, of which `dim` are used.
    q: *const f32,
    /// `[tokens, stride]`, of which `dim` are used.
    k: *const f32,
    /// `[rows, BLOCK]`.
    p: *mut f32,
    stride: usize,
    dim: usize,
    /// Rows to be fetched, `next_bytes` of each with every query row: all at once they would wait for each other.
    next: &'a [&'a [u8]],
    next_bytes: usize,
}

impl<V: Lanes> Product<V> for Dots<'_> {
    #[inline(always)]
    unsafe fn tile<const R: usize, const C: usize>(&self, row: usize, token: usize) {
        let Self { stride, dim, next, next_bytes, .. } = *self;
        for next in next.get(token..).unwrap_or_default().iter().take(C) {
            prefetch(next, row * next_bytes..(row + R) * next_bytes);
        }
        // SAFETY: the caller vouches for these rows and tokens.
        let (q, k, p) = unsafe {
            (self.q.add(row * stride), self.k.add(token * stride), self.p.add(row * BLOCK + token))
        };
        let mut sums = [[V::splat(0.0); C]; R];
        let mut d = 0;
        while d < dim {
            let mut keys = [V::splat(0.0); C];
            for (t, key) in keys.iter_mut().enumerate() {
                // SAFETY: row t of `k`, in its `dim`.
                *key = unsafe { V::load(k.add(t * stride + d)) };
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                // SAFETY: row r of `q`, in its `dim`.
                let query = unsafe { V::load(q.add(r * stride + d)) };
                for (sum, key) in sums.iter_mut().zip(&keys) {
                    *sum = query.mul_add(*key, *sum);
                }
            }
            d += V::LANES;
        }
        for (r, sums) in sums.iter().enumerate() {
            for (t, sum) in sums.iter().enumerate() {
                // SAFETY: row r of `p`, one of its tokens.
                unsafe { *p.add(r * BLOCK + t) = sum.sum() }
            }
        }
    }
}

/// Prefetches some bytes of a row, where the target has an instruction for it.
#[inline(always)]
fn prefetch(row: &[u8], bytes: Range<usize>) {
    let mut at = bytes.start;
    while at < bytes.end {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a hint, which reads nothing whatever the address.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T1>(row.as_ptr().wrapping_add(at).cast());
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: a hint, which reads nothing whatever the address. Its intrinsic is not in stable Rust.
        unsafe {
            let address = row.as_ptr().wrapping_add(at);
            std::arch::asm!("prfm pldl2keep, [{}]", in(reg) address, options(readonly, nostack, preserves_flags));
        }
        #[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
        let _ = row;
        at += 64;
    }
}

/// One query row's online softmax over a block: dot products to weights.
///
/// # Safety
/// The tile passes [`Tile::check`] for this row.
#[inline(always)]
unsafe fn weights<V: Lanes>(tile: &mut Tile<'_>, row: usize, tokens: usize, scale: f32) {
    let p = &mut tile.p[row * BLOCK..][..BLOCK];
    let end = tokens.next_multiple_of(V::LANES);
    // Lanes past the last token weigh exactly nothing, and lose every comparison.
    p[tokens..end].fill(f32::NEG_INFINITY);
    let p = p.as_mut_ptr();

    let mut largest = V::splat(f32::NEG_INFINITY);
    let mut t = 0;
    while t < end {
        // SAFETY: `end` is at most BLOCK.
        largest = unsafe { V::load(p.add(t)) }.max(largest);
        t += V::LANES;
    }
    let (old, here) = (tile.max[row], largest.largest());
    let max = if here > old { here } else { old };
    // Where every dot so far is -inf it weighs nothing, and a later key may still be finite.
    let at = if max == f32::NEG_INFINITY { 0.0 } else { max };

    // Dots are subtracted before they are scaled. That rounds no large product, so the largest weighs exactly 1.
    let (factor, minus_max) = (V::splat(scale), V::splat(-at));
    let mut sum = V::splat(0.0);
    let mut t = 0;
    while t < end {
        // SAFETY: `end` is at most BLOCK.
        unsafe {
            let weight = exp2(V::load(p.add(t)).add(minus_max).mul(factor));
            weight.store(p.add(t));
            sum = sum.add(weight);
        }
        t += V::LANES;
    }
    let rescale = exp2(V::splat((old - at) * scale)).largest();
    tile.max[row] = max;
    tile.sum[row] = tile.sum[row] * rescale + sum.sum();
    tile.rescale[row] = rescale;
}

/// `o[r][c] = o[r][c] * rescale[r] + sum over t of p[r][t] * v[t][c]`: a column is a vector of columns.
struct Values {
    /// `[rows, BLOCK]`.
    p: *const f32,
    /// `[rows]`.
    rescale: *const f32,
    /// `[tokens, stride]`, of which `latent` are used.
    v: *const f32,
    /// `[rows, latent]`.
    o: *mut f32,
    tokens: usize,
    stride: usize,
    latent: usize,
}

impl<V: Lanes> Product<V> for Values {
    #[inline(always)]
    unsafe fn tile<const R: usize, const C: usize>(&self, row: usize, column: usize) {
        let Self { tokens, stride, latent, .. } = *self;
        // SAFETY: the caller vouches for these rows and columns.
        let (p, rescale, v, o) = unsafe {
            let (v, o) = (self.v.add(column * V::LANES), self.o.add(row * latent + column * V::LANES));
            (self.p.add(row * BLOCK), self.rescale.add(row), v, o)
        };
        let mut sums = [[V::splat(0.0); C]; R];
        let mut t = 0;
        while t < tokens {
            let mut values = [V::splat(0.0); C];
            for (c, value) in values.iter_mut().enumerate() {
                // SAFETY: row t of `v`, in its columns.
                *value = unsafe { V::load(v.add(t * stride + c * V::LANES)) };
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                // SAFETY: row r of `p`, one of its tokens.
                let weight = V::splat(unsafe { *p.add(r * BLOCK + t) });
                for (sum, value) in sums.iter_mut().zip(&values) {
                    *sum = weight.mul_add(*value, *sum);
                }
            }
            t += 1;
        }
        for (r, sums) in sums.iter().enumerate() {
            for (c, sum) in sums.iter().enumerate() {
                // SAFETY: row r of `rescale` and of `o`, in its columns.
                unsafe {
                    let o = o.add(r * latent + c * V::LANES);
                    V::load(o).mul_add(V::splat(*rescale.add(r)), *sum).store(o);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::VARIANTS;
    use super::super::lanes::MAX_LANES;
    use super::*;
    use crate::ops::variants::{candidates, choose};

    /// Keys of one element each, against the query 1: `(half the base-2 LSE, the first value column)`. Sums that move to f64 after
    /// each block are the same.
    fn one_row(variant: &str, dots: &[f32], scale: f32) -> (f32, f32) {
        let [kept, carried] = [false, true].map(|carries| row_of(variant, dots, scale, carries));
        let same = |a: f32, b: f32| a == b || (a.is_nan() && b.is_nan());
        assert!(same(kept.0, carried.0) && same(kept.1, carried.1), "{variant}: {kept:?} {carried:?}");
        kept
    }

    fn row_of(variant: &str, dots: &[f32], scale: f32, carries: bool) -> (f32, f32) {
        let (kernels, _) = choose(VARIANTS, &(), &(), Some(variant)).expect("it runs here");
        let (mut kv, mut p) = ([0f32; BLOCK * 2 * MAX_LANES], [0f32; BLOCK]);
        let (mut o, [mut max, mut sum, mut rescale]) = ([0f32; MAX_LANES], [[0f32]; 3]);
        max[0] = f32::NEG_INFINITY;
        let (mut carried_o, mut carried_sum, mut carried_max) = ([0f64; MAX_LANES], [0f64], [0f32]);
        let mut query = [0f32; 2 * MAX_LANES];
        query[0] = 1.0;
        let mut tile = Tile {
            q: &mut query,
            kv: &mut kv,
            p: &mut p,
            o: &mut o,
            max: &mut max,
            sum: &mut sum,
            rescale: &mut rescale,
            carried_o: &mut carried_o,
            carried_sum: &mut carried_sum,
            carried_max: &mut carried_max,
            has_carried: false,
            stride: 2 * MAX_LANES,
            dim: MAX_LANES,
            latent: MAX_LANES,
            value_at: MAX_LANES,
        };
        for (block, dots) in dots.chunks(3).enumerate() {
            for (t, &dot) in dots.iter().enumerate() {
                tile.kv[t * 2 * MAX_LANES] = dot;
                tile.kv[t * 2 * MAX_LANES + MAX_LANES] = (block * 3 + t + 1) as f32;
            }
            // SAFETY: `choose` gives what runs here.
            unsafe { (kernels.attend)(&mut tile, 0..1, dots.len(), scale, &[]) }
            if carries {
                tile.carry(1, scale);
            }
        }
        let half = tile.finish_alone(0, scale);
        (half, o[0])
    }

    #[test]
    fn finite_logits_of_any_size_give_finite_results() {
        for variant in candidates(VARIANTS, &(), &()).iter().filter(|one| one.lacks.is_none()) {
            for logit in [1e10f32, 1e30, 3e38, f32::MAX] {
                // 0.3: a product that is not exact.
                for scale in [std::f32::consts::LOG2_E, 0.3, 1.0] {
                    let run = |dots: &[f32]| one_row(variant.name, dots, scale);
                    let what = format!("{}: {logit:e} times {scale}", variant.name);
                    let half = |dot: f32| (0.5 * scale) * dot;
                    for place in 0..5 {
                        let mut dots = [0.0, 1.0, -3.0, 0.5, -logit];
                        dots[place] = logit;
                        assert_eq!(run(&dots), (half(logit), place as f32 + 1.0), "{what} at {place}");
                        assert_eq!(run(&[logit; 5]).1, 3.0, "{what} everywhere");
                        assert_eq!(run(&[-logit; 5]), (half(-logit), 3.0), "-{what} everywhere");
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_nan_where_it_has_weight() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        for variant in candidates(VARIANTS, &(), &()).iter().filter(|one| one.lacks.is_none()) {
            let run = |dots: &[f32]| one_row(variant.name, dots, 1.0);
            for odd in [nan, inf, f32::from_bits(u32::MAX), f32::from_bits(0x7F80_0001)] {
                for place in 0..5 {
                    let mut dots = [-inf; 5];
                    dots[place] = odd;
                    let (half, out) = run(&dots);
                    assert!(half.is_nan() && out.is_nan(), "{}: {odd} at {place}", variant.name);
                    let mut dots = [1.0; 5];
                    dots[place] = odd;
                    let (half, out) = run(&dots);
                    assert!(half.is_nan() && out.is_nan(), "{}: {odd} at {place}", variant.name);
                }
            }
            assert_eq!(run(&[-inf, -inf, -inf, 2.0]), (1.0, 4.0), "a block without weight");
            assert_eq!(run(&[2.0, 2.0, -inf, -inf]), (1.5, 1.5), "{}", variant.name);
            assert!(run(&[-inf; 4]).0.is_nan() && run(&[-inf; 4]).1.is_nan(), "all are -inf");
        }
    }
}
