//! A checkpoint's `kv_b_proj.weight` as the bytes that a [`crate::HeadProjectArgs`] reads.

mod e4m3;

pub use e4m3::{E4m3Weights, QuantisationError, ScaleSharing};

use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::ops::HeadDims;

/// Rows and columns of a block that shares one scale, as DeepSeek ships FP8 weights.
const BLOCK: usize = 128;

/// A layer's `kv_b_proj.weight`, `[H * (P + V), L]`, as a checkpoint has it: little-endian and dense.
///
/// [`KvBProj::prepare`] gives the bytes to upload, `[H, P + V, L]` in the dtype of choice. One buffer of them serves
/// [`crate::HeadProject::absorb`], `k_up` and `v_up`, through [`crate::WeightView::w_uk`] and `w_uv`. [`KvBProj::prepare_e4m3`]
/// gives half of the bytes of 16-bit weights, with scales and the error.
///
/// ```
/// use wgpu_mla::{Dtype, HeadDims, KvBProj};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// let dims = HeadDims { num_heads: 2, kv_lora_rank: 256, qk_nope_head_dim: 64, v_head_dim: 64 };
/// let weight = Dtype::Bf16.encode_all(&vec![0.25; 2 * 128 * 256]);
/// let bytes = KvBProj::new(dims, Dtype::Bf16, &weight)?.prepare(Dtype::F16)?;
/// assert_eq!(Dtype::F16.decode_at(&bytes, 0), 0.25);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct KvBProj<'a> {
    dims: HeadDims,
    dtype: Dtype,
    weight: &'a [u8],
    /// f32 `[ceil(rows / 128), ceil(L / 128)]`.
    scale_inv: Option<&'a [u8]>,
}

impl<'a> KvBProj<'a> {
    /// Weights of f32, f16 or bf16.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Length`] in elements, [`Error::DtypeUnsupported`] for e4m3, which has scales.
    pub fn new(dims: HeadDims, dtype: Dtype, weight: &'a [u8]) -> Result<Self> {
        if dtype.is_fp8() {
            let cure = "hand over its scales too: `KvBProj::with_block_scales`";
            return Err(Error::DtypeUnsupported {
                what: "kv_b_proj.weight without scales",
                got: dtype,
                cure,
            });
        }
        Self { dims, dtype, weight, scale_inv: None }.checked()
    }

    /// Weights of e4m3 with `weight_scale_inv`, f32 `[ceil(rows / 128), ceil(L / 128)]`: the factor of each block of 128 rows and
    /// 128 columns. Blocks may straddle heads.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Length`] in elements, and [`Error::Scale`] for a scale that is negative or not finite.
    pub fn with_block_scales(dims: HeadDims, weight: &'a [u8], weight_scale_inv: &'a [u8]) -> Result<Self> {
        let this = Self { dims, dtype: Dtype::E4m3, weight, scale_inv: Some(weight_scale_inv) }.checked()?;
        let (rows, columns) = this.blocks();
        length("weight_scale_inv", weight_scale_inv, 4, (rows * columns) as u64)?;
        let scales = weight_scale_inv.chunks_exact(4).map(|scale| Dtype::F32.decode_at(scale, 0));
        match { scales }.find(|scale| !(scale.is_finite() && *scale >= 0.0)) {
            Some(got) => Err(Error::Scale {
                what: "weight_scale_inv",
                got: got.into(),
                cure: "must be finite and at least 0",
            }),
            None => Ok(this),
        }
    }

    /// Its dims.
    #[must_use]
    pub fn dims(&self) -> HeadDims {
        self.dims
    }

    /// The bytes to upload, `[H, P + V, L]` of `dtype`: f32, f16 or bf16. Equal dtypes are copied; others are rounded to the nearest,
    /// ties to even, e4m3 after its product with the scale in f32.
    ///
    /// # Errors
    /// [`Error::DtypeUnsupported`] for e4m3; [`Error::WeightRange`] for a weight that is not finite, or that `dtype` has no finite
    /// number for, as f16 for those from 65,520 up; [`Error::OutOfMemory`].
    pub fn prepare(&self, dtype: Dtype) -> Result<Vec<u8>> {
        if dtype.is_fp8() {
            let cure = "use f32, f16 or bf16, which hold every e4m3 weight, or `KvBProj::prepare_e4m3`, which gives scales too";
            return Err(Error::DtypeUnsupported { what: "a prepared kv_b_proj", got: dtype, cure });
        }
        let mut bytes = Vec::new();
        let need = self.dims.elements() as usize * dtype.bytes();
        bytes.try_reserve_exact(need).map_err(|_| Error::OutOfMemory { what: "a prepared kv_b_proj" })?;
        for index in 0..self.dims.elements() as usize {
            let value = self.value(index);
            let at = bytes.len();
            dtype.encode(value, &mut bytes);
            if !dtype.decode_at(&bytes[at..], 0).is_finite() {
                return Err(Error::WeightRange { index: index as u64, value, dtype });
            }
        }
        Ok(bytes)
    }

    /// The largest magnitude: what decides whether f16 holds them all. A NaN is left out.
    #[must_use]
    pub fn largest(&self) -> f32 {
        (0..self.dims.elements() as usize).fold(0.0, |largest, index| self.value(index).abs().max(largest))
    }

    fn value(&self, index: usize) -> f32 {
        let value = self.dtype.decode_at(self.weight, index);
        self.block_scale(index).map_or(value, |scale| value * scale)
    }

    /// The scale of an element's block, where it is a code.
    fn block_scale(&self, index: usize) -> Option<f32> {
        let columns = self.dims.kv_lora_rank as usize;
        let (row, column) = (index / columns, index % columns);
        let block = row / BLOCK * self.blocks().1 + column / BLOCK;
        self.scale_inv.map(|scales| Dtype::F32.decode_at(scales, block))
    }

    /// Blocks along the rows and along the columns.
    fn blocks(&self) -> (usize, usize) {
        ((self.dims.rows() as usize).div_ceil(BLOCK), (self.dims.kv_lora_rank as usize).div_ceil(BLOCK))
    }

    fn checked(self) -> Result<Self> {
        self.dims.check()?;
        length("kv_b_proj.weight", self.weight, self.dtype.bytes(), self.dims.elements())?;
        Ok(self)
    }
}

fn length(what: &'static str, bytes: &[u8], element_bytes: usize, want: u64) -> Result<()> {
    if bytes.len() as u64 != want * element_bytes as u64 {
        let got = bytes.len() as u64 / element_bytes as u64;
        let cure =
            "hand over the whole tensor of these dims, little-endian and dense, in the dtype that is named";
        return Err(Error::Length { what, got, want, cure });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::dtype::e4m3_decode;

    const DIMS: HeadDims = HeadDims { num_heads: 3, kv_lora_rank: 136, qk_nope_head_dim: 40, v_head_dim: 56 };

    fn count() -> usize {
        DIMS.elements() as usize
    }

    #[test]
    fn floats_are_copied_or_rounded_once() {
        let values: Vec<f32> = (0..count()).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
        for from in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let weight = from.encode_all(&values);
            let proj = KvBProj::new(DIMS, from, &weight).expect("right");
            assert_eq!(proj.prepare(from).expect("held"), weight);
            for to in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
                assert_eq!(proj.prepare(to).expect("held"), to.encode_all(&from.decode_all(&weight)));
            }
        }
    }

    #[test]
    fn each_block_has_its_scale_and_blocks_straddle_heads() {
        let codes: Vec<u8> = (0..count()).map(|i| (i * 7 % 0x7F) as u8 | (i as u8 & 0x80)).collect();
        let scales: Vec<f32> = (0..3 * 2).map(|i| 0.013 * (i + 1) as f32).collect();
        let scale_inv = Dtype::F32.encode_all(&scales);
        let proj = KvBProj::with_block_scales(DIMS, &codes, &scale_inv).expect("right");
        for to in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let got = proj.prepare(to).expect("held");
            for (row, codes) in codes.chunks(136).enumerate() {
                for (column, &code) in codes.iter().enumerate() {
                    // 4 bits times 24 are 28: f64 holds that exactly, and rounds once to f32.
                    let scale = scales[row / 128 * 2 + column / 128];
                    let exact = (f64::from(e4m3_decode(code)) * f64::from(scale)) as f32;
                    let mut want = Vec::new();
                    to.encode(exact, &mut want);
                    let at = (row * 136 + column) * to.bytes();
                    assert_eq!(got[at..at + to.bytes()], want, "row {row}, column {column}");
                }
            }
        }
    }

    #[test]
    fn what_a_dtype_does_not_hold_is_refused() {
        let mut values = vec![0.0f32; count()];
        values[77] = -65_520.0;
        let weight = Dtype::F32.encode_all(&values);
        let proj = KvBProj::new(DIMS, Dtype::F32, &weight).expect("right");
        let refused = Err(Error::WeightRange { index: 77, value: -65_520.0, dtype: Dtype::F16 });
        assert_eq!(proj.prepare(Dtype::F16), refused);
        assert_eq!(proj.largest(), 65_520.0);
        proj.prepare(Dtype::Bf16).expect("held");
        for bad in [f32::NAN, f32::INFINITY] {
            values[77] = bad;
            let weight = Dtype::F32.encode_all(&values);
            let error = KvBProj::new(DIMS, Dtype::F32, &weight).expect("right").prepare(Dtype::F32);
            assert!(matches!(error, Err(Error::WeightRange { index: 77, .. })), "{error:?}");
        }
        // A NaN code, and what a scale makes too large.
        let (mut codes, mut scales) = (vec![0x7Eu8; count()], vec![1f32; 6]);
        scales[5] = 1e38;
        let scale_inv = Dtype::F32.encode_all(&scales);
        let proj = KvBProj::with_block_scales(DIMS, &codes, &scale_inv).expect("right");
        assert!(
            matches!(proj.prepare(Dtype::F32), Err(Error::WeightRange { index, .. }) if index == 256 * 136 + 128)
        );
        codes[3] = 0xFF;
        let proj = KvBProj::with_block_scales(DIMS, &codes, &scale_inv).expect("right");
        assert!(matches!(proj.prepare(Dtype::Bf16), Err(Error::WeightRange { index: 3, .. })));
    }

    #[test]
    fn wrong_arrays_are_refused() {
        let weight = vec![0; count() * 2];
        let error = KvBProj::new(DIMS, Dtype::F32, &weight).expect_err("half of it");
        assert!(error.to_string().contains("kv_b_proj.weight has"), "{error}");
        let error = KvBProj::new(DIMS, Dtype::E4m3, &weight[..count()]).expect_err("no scales");
        assert!(error.to_string().contains("with_block_scales"), "{error}");
        let odd = HeadDims { kv_lora_rank: 100, ..DIMS };
        assert!(matches!(
            KvBProj::new(odd, Dtype::F16, &weight),
            Err(Error::Shape { what: "kv_lora_rank", .. })
        ));
        let proj = KvBProj::new(DIMS, Dtype::F16, &weight).expect("right");
        assert!(matches!(proj.prepare(Dtype::E4m3), Err(Error::DtypeUnsupported { .. })));

        let codes = &weight[..count()];
        assert!(matches!(
            KvBProj::with_block_scales(DIMS, codes, &[0; 20]),
            Err(Error::Length { what: "weight_scale_inv", want: 6, .. })
        ));
        for bad in [f32::NAN, f32::INFINITY, -1.0] {
            let scales = Dtype::F32.encode_all(&[1.0, 1.0, 0.0, 1.0, bad, 1.0]);
            let error = KvBProj::with_block_scales(DIMS, codes, &scales).expect_err("a bad scale");
            assert!(matches!(error, Error::Scale { what: "weight_scale_inv", .. }));
        }
    }
}
