//! The spec of a decode, and the scale of its logits.

use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::view::logit_scale;
use crate::cache::{KvSpec, MlaShape};

/// The attention of a decode in absorbed form, over a paged cache: `s = softmax_scale * (q . k)`, `out = sum softmax(s) * latent`,
/// `lse = ln(sum exp(s))`. Each sequence's keys are split over work items; partial results are merged by LSE (FlashDecoding).
///
/// Arguments of a layer: [`crate::MlaDecodeArgs`]. Input of a step: a [`crate::Plan`] and a [`crate::PageTable`]. Options:
/// [`crate::DecodeOptions`].
///
/// Room of a binding: `u32`, query tokens. Capacity of a step: [`crate::Capacity`], that of a plan: [`crate::Capacity::of`].
///
/// `prepare` refuses a plan of another spec or tiling ([`Error::OtherSpec`], [`Error::Shape`]) and what [`crate::write_tables`] does, such
/// as [`Error::PageOutOfRange`]; [`Error::LayoutMismatch`] is [`crate::PageTable::Device`] without
/// [`crate::DecodeOptions::device_page_list`].
///
/// ```
/// use wgpu_mla::{Batch, Device, MlaDecode, MlaDecodeArgs, PageTable, Plan, SplitPolicy, cpu::Cpu};
/// # use wgpu_mla::{Dtype, KvSpec, MlaShape};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// let shape = MlaShape { num_heads: 2, kv_lora_rank: 256, qk_rope_head_dim: 32 };
/// let kv = KvSpec { layout: Dtype::F32.into(), page_size: 4, num_pages: 8 };
/// let spec = MlaDecode { shape, kv, query: Dtype::F32, out: Dtype::F32 };
/// let cpu = Cpu::new();
/// let mla = cpu.compile(spec)?;
/// let (q, cache) = (cpu.buffer(spec.query_bytes(1))?, cpu.buffer(spec.cache_bytes())?);
/// let (out, lse) = (cpu.buffer(spec.out_bytes(1))?, cpu.buffer(spec.lse_bytes(1))?);
/// let layer = mla.bind(&MlaDecodeArgs::dense(&spec, &q, &cache, &out, &lse, 0.1), 1)?;
///
/// // One query token of a sequence of 6 tokens, in pages 5 and 2.
/// let plan = Plan::new(&spec, &mla.tiling(), &Batch::new(&[6], &[0, 1]), SplitPolicy::Auto)?;
/// let mut step = mla.step(Default::default())?;
/// mla.prepare(&mut step, (&plan, PageTable::Dense { block_table: &[5, 2], max_pages: 2 }))?;
/// mla.run(&step, &layer)?;
///
/// // Six logits of 0.
/// let lse = Dtype::F32.decode_all(&cpu.download(&lse, spec.lse_bytes(1))?);
/// assert!(lse.iter().all(|x| (x - 6f32.ln()).abs() < 1e-6));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MlaDecode {
    /// Dims of the attention.
    pub shape: MlaShape,
    /// The paged cache.
    pub kv: KvSpec,
    /// Dtype of the query: any.
    pub query: Dtype,
    /// Dtype of the output: f32, f16 or bf16. f16 ends at 65,504: a larger output becomes infinity, as it does with a cache in bf16 of
    /// such values.
    pub out: Dtype,
}

/// Numbers of bytes saturate: if a spec that no op supports makes one too large for 64 bits, it is `u64::MAX`, more than any buffer has.
impl MlaDecode {
    /// Checks that these dims and dtypes are supported.
    ///
    /// # Errors
    /// [`Error::Shape`] as [`MlaShape::check`] and [`KvSpec::check`], [`Error::DtypeUnsupported`] for an e4m3 output.
    pub fn check(&self) -> Result<()> {
        self.shape.check()?;
        self.kv.check()?;
        self.kv.layout.check(&self.shape)?;
        if self.out.is_fp8() {
            return Err(Error::DtypeUnsupported { what: "out", got: self.out, cure: "use f32, f16 or bf16" });
        }
        Ok(())
    }

    /// Bytes of the cache of one layer, `[num_pages, page_size, L + R]`.
    #[must_use]
    pub const fn cache_bytes(&self) -> u64 {
        self.slab_bytes(self.kv.num_pages)
    }

    /// Pages of a slab in bindings of at most `largest_binding` bytes, such as [`crate::Device::largest_binding`]: all pages where they
    /// fit, else as many as fit, at least 1. See [`crate::Slabs`].
    #[must_use]
    pub fn slab_pages(&self, largest_binding: u64) -> u32 {
        let fit = largest_binding.checked_div(self.slab_bytes(1)).unwrap_or(u64::MAX);
        fit.clamp(1, self.kv.num_pages.max(1).into()) as u32
    }

    /// Bytes of one layer's pages in a slab of `slab_pages` pages.
    #[must_use]
    pub const fn slab_bytes(&self, slab_pages: u32) -> u64 {
        self.kv.page_bytes(&self.shape).saturating_mul(slab_pages as u64)
    }

    /// Bytes of the query, `[tokens, H, L + R]`.
    #[must_use]
    pub const fn query_bytes(&self, tokens: u32) -> u64 {
        bytes_of(self.rows(tokens), self.shape.row_elems(), self.query)
    }

    /// Bytes of the output, `[tokens, H, L]`.
    #[must_use]
    pub const fn out_bytes(&self, tokens: u32) -> u64 {
        bytes_of(self.rows(tokens), self.shape.kv_lora_rank, self.out)
    }

    /// Bytes of the LSE, f32 `[tokens, H]`.
    #[must_use]
    pub const fn lse_bytes(&self, tokens: u32) -> u64 {
        bytes_of(self.rows(tokens), 1, Dtype::F32)
    }

    const fn rows(&self, tokens: u32) -> u64 {
        tokens as u64 * self.shape.num_heads as u64
    }
}

/// Bytes of `rows` rows of `elems` elements, at most `u64::MAX`.
pub(crate) const fn bytes_of(rows: u64, elems: u32, dtype: Dtype) -> u64 {
    rows.saturating_mul(elems as u64).saturating_mul(dtype.bytes() as u64)
}

/// `(P + R)^-1/2 * mscale^2` with YaRN's `mscale = 0.1 * m * ln(factor) + 1`.
///
/// `qk_nope_head_dim` and `qk_rope_head_dim` are the dims of a head before absorption (128 and 64 in
/// DeepSeek-V3), `factor` the rotary scaling factor (1 for none) and `m` the checkpoint's `mscale_all_dim`.
/// `1/sqrt(L + R)` is wrong for every released model, so `softmax_scale` has no default anywhere.
///
/// ```
/// # fn main() -> wgpu_mla::Result<()> {
/// let v3 = wgpu_mla::softmax_scale(128, 64, 40.0, 1.0)?;
/// assert!((v3 - 0.135_234).abs() < 1e-6);
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`Error::Shape`] for dims of 0; [`Error::Scale`] for a factor that is below 1 or not finite, and for an `m` with which nothing is left
/// of the scale, or too much.
pub fn softmax_scale(qk_nope_head_dim: u32, qk_rope_head_dim: u32, factor: f64, m: f64) -> Result<f32> {
    let dim = u64::from(qk_nope_head_dim) + u64::from(qk_rope_head_dim);
    if dim == 0 {
        let cure = "must be at least 1: a head's dims before absorption";
        return Err(Error::Shape { what: "qk_nope_head_dim + qk_rope_head_dim", got: 0, cure });
    }
    if !(factor.is_finite() && factor >= 1.0) {
        let cure = "must be finite and at least 1, which is none";
        return Err(Error::Scale { what: "rope factor", got: factor, cure });
    }
    let mscale = 0.1 * m * factor.ln() + 1.0;
    let scale = ((dim as f64).powf(-0.5) * mscale * mscale) as f32;
    if logit_scale("softmax_scale", &[scale]).is_err() {
        let cure = "must be the checkpoint's, such as 1, or 0 for none: it leaves no scale of logits";
        return Err(Error::Scale { what: "mscale_all_dim", got: m, cure });
    }
    Ok(scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn softmax_scales_are_those_of_models_or_refused() {
        let of = |nope, rope, factor, m| softmax_scale(nope, rope, factor, m);
        assert_eq!(of(128, 64, 1.0, 0.0), Ok(192f32.powf(-0.5)));
        assert_eq!(of(128, 64, 1.0, 1.0), of(128, 64, 40.0, 0.0));
        assert!((of(128, 64, 40.0, 1.0).unwrap() - 0.135_234).abs() < 1e-6);
        assert_eq!(of(u32::MAX, u32::MAX, 1.0, 0.0), Ok((2.0 * f64::from(u32::MAX)).powf(-0.5) as f32));
        for (factor, m, why) in [
            (0.5, 1.0, "rope factor 0.5: must be finite and at least 1"),
            (f64::NAN, 1.0, "rope factor NaN"),
            (f64::INFINITY, 1.0, "rope factor inf"),
            (40.0, f64::NAN, "mscale_all_dim NaN"),
            (40.0, 1e60, "mscale_all_dim 1e60"),
            (std::f64::consts::E, -10.0, "mscale_all_dim -10.0"),
        ] {
            let error = of(128, 64, factor, m).expect_err("refused").to_string();
            assert!(error.starts_with(why), "{error}");
        }
        let error = of(0, 0, 1.0, 0.0).expect_err("refused").to_string();
        assert!(error.contains("qk_nope_head_dim + qk_rope_head_dim 0: must be at least 1"), "{error}");
    }
}
