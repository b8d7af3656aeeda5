//! `kv_b_proj` as e4m3 codes with scales of their own.

use super::KvBProj;
use crate::base::dtype::{Dtype, E4M3_MAX, e4m3_decode, e4m3_encode};
use crate::base::error::{Error, Result};

/// Which weights share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleSharing {
    /// `W_UK` of a head, and `W_UV` of a head.
    PerHead,
    /// All.
    PerTensor,
}

/// What [`KvBProj::prepare_e4m3`] gives: codes and scales to upload, and how far they are from the weights.
#[derive(Debug, Clone, PartialEq)]
pub struct E4m3Weights {
    /// Codes, `[H, P + V, L]`: for [`WeightView::w_uk`](crate::WeightView::w_uk) and `w_uv`.
    pub codes: Vec<u8>,
    /// `[2, H]`: the scale of each head's `W_UK`, then of each head's `W_UV`, all equal with [`ScaleSharing::PerTensor`]. Uploaded as
    /// little-endian f32 they are for [`WeightScales::w_uk`](crate::WeightScales::w_uk) and `w_uv`.
    pub scales: Vec<f32>,
    /// What the codes lose.
    pub error: QuantisationError,
}

/// How far quantised weights are from those that they were made of, in f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QuantisationError {
    /// `sqrt(sum (code * scale - w)^2 / sum w^2)` over all weights. Codes that are copied give 0, one rounding to e4m3 about 0.026. Much
    /// more means that weights of one scale differ so much in size that small ones fall below e4m3's normal numbers.
    pub rms: f32,
    /// The largest `|code * scale - w|`, as a share of the largest `|w|` with the same scale. One rounding gives at most 1/28 (0.036).
    pub largest: f32,
}

impl KvBProj<'_> {
    /// e4m3 codes, `[H, P + V, L]`, and their scales. A scale is the largest magnitude of the weights that share it over 448, and codes are
    /// the nearest, ties to even.
    ///
    /// Where the blocks of a checkpoint's e4m3 weights have one scale all through what shares one here, that is the scale and codes are
    /// copied. Other blocks are scaled in f32 and rounded once more: [`E4m3Weights::error`] says how much that costs.
    ///
    /// ```
    /// use wgpu_mla::{Dtype, HeadDims, KvBProj, ScaleSharing};
    ///
    /// # fn main() -> wgpu_mla::Result<()> {
    /// let dims = HeadDims { num_heads: 2, kv_lora_rank: 256, qk_nope_head_dim: 64, v_head_dim: 64 };
    /// let weight = Dtype::Bf16.encode_all(&vec![0.25; 2 * 128 * 256]);
    /// let e4m3 = KvBProj::new(dims, Dtype::Bf16, &weight)?.prepare_e4m3(ScaleSharing::PerHead)?;
    /// assert_eq!((e4m3.codes[0], e4m3.scales[0]), (0x7E, 0.25 / 448.0));
    /// assert!(e4m3.error.rms < 1e-6);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::WeightRange`] for a weight that is not finite, and [`Error::OutOfMemory`].
    pub fn prepare_e4m3(&self, sharing: ScaleSharing) -> Result<E4m3Weights> {
        let out_of_memory = |_| Error::OutOfMemory { what: "a prepared kv_b_proj" };
        let (heads, elements) = (self.dims.num_heads as usize, self.dims.elements() as usize);
        let mut groups = Vec::new();
        groups.try_reserve_exact(2 * heads).map_err(out_of_memory)?;
        groups.resize(2 * heads, Group::default());
        for index in 0..elements {
            let value = self.value(index);
            if !value.is_finite() {
                return Err(Error::WeightRange { index: index as u64, value, dtype: Dtype::E4m3 });
            }
            groups[self.group(index)].add(value.abs(), self.block_scale(index));
        }
        if sharing == ScaleSharing::PerTensor {
            let whole = groups.iter().fold(Group::default(), |whole, group| whole.with(group));
            groups.fill(whole);
        }

        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        codes.try_reserve_exact(elements).map_err(out_of_memory)?;
        scales.try_reserve_exact(2 * heads).map_err(out_of_memory)?;
        scales.extend(groups.iter().map(Group::scale));
        let (mut squares, mut errors, mut largest) = (0f64, 0f64, 0f32);
        for index in 0..elements {
            let (value, group) = (self.value(index), self.group(index));
            let code = match groups[group].copied {
                Copied::With(_) => self.weight[index],
                _ => e4m3_encode(value / scales[group]),
            };
            let error = (e4m3_decode(code) * scales[group] - value).abs();
            if error > 0.0 {
                largest = largest.max(error / groups[group].amax);
            }
            squares += f64::from(value) * f64::from(value);
            errors += f64::from(error) * f64::from(error);
            codes.push(code);
        }
        let rms = if errors > 0.0 { (errors / squares).sqrt() as f32 } else { 0.0 };
        Ok(E4m3Weights { codes, scales, error: QuantisationError { rms, largest } })
    }

    /// Which scale of `[2, H]` an element has.
    fn group(&self, index: usize) -> usize {
        let [nope, value, latent] =
            [self.dims.qk_nope_head_dim, self.dims.v_head_dim, self.dims.kv_lora_rank]
                .map(|dim| dim as usize);
        let row = index / latent;
        let (head, row) = (row / (nope + value), row % (nope + value));
        if row < nope { head } else { self.dims.num_heads as usize + head }
    }
}

/// Weights that share a scale.
#[derive(Debug, Clone, Copy, Default)]
struct Group {
    amax: f32,
    copied: Copied,
}

/// Whether codes can be copied.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
enum Copied {
    /// No weight was seen.
    #[default]
    Unknown,
    /// All have this scale.
    With(f32),
    /// They are no codes, or have several scales.
    Not,
}

impl Group {
    fn add(&mut self, magnitude: f32, scale: Option<f32>) {
        *self = self.with(&Self { amax: magnitude, copied: scale.map_or(Copied::Not, Copied::With) });
    }

    fn with(self, other: &Self) -> Self {
        let copied = match (self.copied, other.copied) {
            (Copied::Unknown, one) | (one, Copied::Unknown) => one,
            (one, other) if one == other => one,
            _ => Copied::Not,
        };
        Self { amax: self.amax.max(other.amax), copied }
    }

    /// Its scale: a normal number, so that weights can be divided by it.
    fn scale(&self) -> f32 {
        match self.copied {
            Copied::With(scale) => scale,
            _ if self.amax == 0.0 => 1.0,
            _ => (self.amax / E4M3_MAX).max(f32::MIN_POSITIVE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::HeadDims;

    const DIMS: HeadDims =
        HeadDims { num_heads: 3, kv_lora_rank: 256, qk_nope_head_dim: 128, v_head_dim: 128 };

    fn values() -> Vec<f32> {
        (0..DIMS.elements())
            .map(|i| (i as f32 * 0.37).sin() * [1.0, 0.01, 30.0][i as usize / (256 * 256)])
            .collect()
    }

    #[test]
    fn each_part_of_a_head_has_its_scale_and_the_nearest_codes() {
        let weight = Dtype::F32.encode_all(&values());
        let proj = KvBProj::new(DIMS, Dtype::F32, &weight).expect("right");
        let [by_head, whole] = [ScaleSharing::PerHead, ScaleSharing::PerTensor]
            .map(|sharing| proj.prepare_e4m3(sharing).expect("finite"));
        for (index, value) in values().into_iter().enumerate() {
            let (head, row) = (index / (256 * 256), index / 256 % 256);
            let scale = by_head.scales[if row < 128 { head } else { 3 + head }];
            assert_eq!(by_head.codes[index], e4m3_encode(value / scale), "{index}");
            assert!(
                (e4m3_decode(by_head.codes[index]) * scale - value).abs() <= scale * 448.0 / 28.0 * 1.0001
            );
        }
        assert!((0.02..0.03).contains(&by_head.error.rms), "{:?}", by_head.error);
        assert!((0.02..0.0358).contains(&by_head.error.largest), "{:?}", by_head.error);
        let amax = values().iter().fold(0f32, |most, x| most.max(x.abs()));
        assert_eq!(whole.scales, [amax / 448.0; 6]);
    }

    #[test]
    fn codes_of_one_scale_are_copied_and_others_tell_their_error() {
        let codes: Vec<u8> = (0..DIMS.elements()).map(|i| (i * 7 % 0x7F) as u8 | (i as u8 & 0x80)).collect();
        // Blocks are rows of 128 and columns of 128: a part of a head has two.
        let prepared = |scales: [f32; 12], sharing| {
            let scales = Dtype::F32.encode_all(&scales);
            let proj = KvBProj::with_block_scales(DIMS, &codes, &scales).expect("right");
            proj.prepare_e4m3(sharing).expect("finite")
        };
        let none = QuantisationError { rms: 0.0, largest: 0.0 };
        let by_head = std::array::from_fn(|block| 0.01 * (1 + block / 2) as f32);
        let exact = prepared(by_head, ScaleSharing::PerHead);
        assert_eq!((&exact.codes, exact.error), (&codes, none));
        assert_eq!(exact.scales, [0, 2, 4, 1, 3, 5].map(|part| 0.01 * (1 + part) as f32));
        let one = prepared([0.3; 12], ScaleSharing::PerTensor);
        assert_eq!((&one.codes, one.error, one.scales), (&codes, none, vec![0.3; 6]));

        let rounded = prepared(by_head, ScaleSharing::PerTensor).error;
        assert!(rounded.rms > 0.005 && rounded.largest <= 0.0358, "{rounded:?}");
        let mut apart = by_head;
        apart[0] = 1e-6;
        assert!(prepared(apart, ScaleSharing::PerHead).error.rms > 0.0);
    }

    #[test]
    fn zeros_have_a_scale_and_what_is_not_finite_is_refused() {
        let mut values = vec![0f32; DIMS.elements() as usize];
        let prepared = |values: &[f32]| {
            let weight = Dtype::F32.encode_all(values);
            KvBProj::new(DIMS, Dtype::F32, &weight).expect("right").prepare_e4m3(ScaleSharing::PerHead)
        };
        let zeros = prepared(&values).expect("finite");
        assert_eq!((zeros.scales, zeros.error.rms), (vec![1.0; 6], 0.0));
        values[5] = f32::MIN_POSITIVE;
        assert_eq!(prepared(&values).expect("finite").scales[0], f32::MIN_POSITIVE);
        values[5] = f32::NAN;
        assert!(matches!(prepared(&values), Err(Error::WeightRange { index: 5, dtype: Dtype::E4m3, .. })));
    }
}
