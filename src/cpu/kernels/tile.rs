//! The state of a tile of query rows between blocks of the cache, and what its rows weigh at the end.

use std::ops::Range;

/// Tokens that are widened and attended at a time.
pub(in crate::cpu) const BLOCK: usize = 32;

/// Query rows of the largest tile.
pub(in crate::cpu) const MAX_ROWS: usize = 32;

/// Blocks after which the sums of a tile move to f64: 64 additions in f32 are off by less than 2e-6 at the worst.
pub(in crate::cpu) const CARRY_BLOCKS: usize = 32;

/// The state of one tile: its query rows, a block of the cache, and each row's running softmax state and output.
pub(in crate::cpu) struct Tile<'a> {
    /// `[rows, stride]`, of which `dim` are used.
    pub q: &'a mut [f32],
    /// `[BLOCK, stride]`: a key of `dim` elements at the front, and its value of `latent` from `value_at` on.
    pub kv: &'a mut [f32],
    /// `[rows, BLOCK]`: dot products, then weights.
    pub p: &'a mut [f32],
    /// `[rows, latent]`, not yet divided by `sum`.
    pub o: &'a mut [f32],
    /// `[rows]`: the largest dot product.
    pub max: &'a mut [f32],
    /// `[rows]`: the sum of the weights, relative to `max`.
    pub sum: &'a mut [f32],
    /// `[rows]`: the factor that brings `o` to a new `max`.
    pub rescale: &'a mut [f32],
    /// `[rows, latent]`: what [`Tile::carry`] has moved out of `o`.
    pub carried_o: &'a mut [f64],
    /// `[rows]`: what it has moved out of `sum`.
    pub carried_sum: &'a mut [f64],
    /// `[rows]`: the `max` to which both are relative.
    pub carried_max: &'a mut [f32],
    /// Whether they hold anything.
    pub has_carried: bool,
    /// Floats from a row of `q` or `kv` to the next.
    pub stride: usize,
    /// Elements of a row: `L + R`, and zeros up to a multiple of `MAX_LANES`.
    pub dim: usize,
    /// Elements of a value: `L` in a decode, and zeros up to a multiple of `MAX_LANES`.
    pub latent: usize,
    /// Where in a row of `kv` the value is: at 0 it is part of the key.
    pub value_at: usize,
}

impl Tile<'_> {
    /// Asserts what the kernels' pointers rely on.
    pub(super) fn check(&self, lanes: usize, rows: &Range<usize>, tokens: usize) {
        let Self { stride, dim, latent, value_at, .. } = *self;
        assert!(dim % lanes == 0 && latent % lanes == 0 && value_at + latent <= stride && dim <= stride);
        assert!(tokens <= BLOCK && self.kv.len() >= BLOCK * stride);
        assert!(self.q.len() >= rows.end * stride && self.p.len() >= rows.end * BLOCK);
        assert!(self.o.len() >= rows.end * latent);
        assert!(self.max.len().min(self.sum.len()).min(self.rescale.len()) >= rows.end);
    }

    /// Empties the sums of the first `rows` rows.
    pub(in crate::cpu) fn clear(&mut self, rows: usize) {
        self.o[..rows * self.latent].fill(0.0);
        self.max[..rows].fill(f32::NEG_INFINITY);
        self.sum[..rows].fill(0.0);
        self.has_carried = false;
    }

    /// Moves the sums of the first `rows` rows to f64.
    pub(in crate::cpu) fn carry(&mut self, rows: usize, scale: f32) {
        for row in 0..rows {
            let factor = self.carried_factor(row, scale);
            let columns = row * self.latent..(row + 1) * self.latent;
            for (carried, o) in self.carried_o[columns.clone()].iter_mut().zip(&mut self.o[columns]) {
                *carried = factor.map_or(0.0, |factor| *carried * factor) + f64::from(*o);
                *o = 0.0;
            }
            let before = factor.map_or(0.0, |factor| self.carried_sum[row] * factor);
            self.carried_sum[row] = before + f64::from(self.sum[row]);
            (self.sum[row], self.carried_max[row]) = (0.0, self.max[row]);
        }
        self.has_carried = true;
    }

    /// The factor that brings the carried sums of a row to its current `max`; `None` if nothing was carried.
    fn carried_factor(&self, row: usize, scale: f32) -> Option<f64> {
        let (from, to) = (self.carried_max[row], self.max[row]);
        // Where both are -inf the difference would be NaN.
        let exponent = if from == to { 0.0 } else { f64::from(from - to) * f64::from(scale) };
        self.has_carried.then(|| exponent.exp2())
    }

    /// Ends a row that saw a key: divides its output by its sum. An output whose dots are all -inf is not divided.
    pub(in crate::cpu) fn finish(&mut self, row: usize, scale: f32) -> Weight {
        let factor = self.carried_factor(row, scale);
        let carried_sum = factor.map_or(0.0, |factor| self.carried_sum[row] * factor);
        let sum = f64::from(self.sum[row]) + carried_sum;
        let divisor = if sum == 0.0 { 1.0 } else { sum };
        let columns = row * self.latent..(row + 1) * self.latent;
        match factor {
            // If no block came after the only move, this gives the same bits as a division in f32.
            Some(factor) => {
                for (o, carried) in self.o[columns.clone()].iter_mut().zip(&self.carried_o[columns]) {
                    *o = ((carried * factor + f64::from(*o)) / divisor) as f32;
                }
            }
            None => self.o[columns].iter_mut().for_each(|x| *x /= divisor as f32),
        }
        Weight { max: self.max[row], sum: sum as f32 }
    }

    /// Like [`Tile::finish`], for a row with no other part to merge with: if no key has weight, the output is NaN. Returns half the row's
    /// LSE: see [`Weight::half_lse`].
    pub(in crate::cpu) fn finish_alone(&mut self, row: usize, scale: f32) -> f32 {
        let weight = self.finish(row, scale);
        if weight.is_nothing() {
            self.o[row * self.latent..][..self.latent].fill(f32::NAN);
        }
        weight.half_lse(scale)
    }
}

/// What a part of a row weighs: `sum * 2^(scale * max)`. The two are kept apart, since at a large maximum their LSE rounds the sum away.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub(in crate::cpu) struct Weight {
    /// The largest dot product.
    pub max: f32,
    /// The sum of the softmax weights relative to `max`; 0 where each dot product is -inf, below 0 where no key was seen.
    pub sum: f32,
}

impl Weight {
    /// The weight of a part that saw no key.
    pub const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: -1.0 };

    /// Whether the part saw no key.
    pub fn is_empty(self) -> bool {
        self.sum < 0.0
    }

    /// Whether the part saw keys, each with a logit of -inf: beside other parts it weighs 0, without any the row is NaN.
    pub fn is_nothing(self) -> bool {
        self.sum == 0.0
    }

    /// *Half* the LSE in base 2, since twice as much may be beyond f32.
    pub fn half_lse(self, scale: f32) -> f32 {
        match self {
            _ if self.is_empty() => f32::NEG_INFINITY,
            _ if self.is_nothing() => f32::NAN,
            Self { max, sum } => (max * (0.5 * scale) + 0.5 * sum.log2()).clamp(f32::MIN, f32::MAX),
        }
    }
}
