//! The layout of a token of the cache in bytes, and the description that every layout gives of itself. Pure.

use std::fmt;

use super::shape::MlaShape;
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::view::scale_of;

/// How a token's bytes lie in a page. `Dtype` converts into it: `Dtype::Bf16.into()`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvLayout {
    /// `L + R` elements of one dtype, the latent first: vLLM's `concat_and_cache_mla`.
    Plain(Dtype),
    /// 656 bytes for dims 512/64: 512 e4m3 codes, 4 f32 scales of 128 codes each, then 64 bf16 rotary elements. vLLM's `fp8_ds_mla`,
    /// FlashMLA's V3.2.
    Ds656,
    /// 528 bytes for dims 512/0: [`KvLayout::Ds656`] without the rotary part.
    Ds528,
    /// A key of a lightning indexer: 128 elements of a dtype. With e4m3 a page is the codes of its tokens, then one f32 scale a token, 132
    /// bytes a token in all: the index cache of DeepGEMM, vLLM and SGLang. Other dtypes have no scales. See
    /// [`IndexSpec`](crate::IndexSpec): no attention reads it.
    Index(Dtype),
}

/// Elements of an index key.
pub(crate) const INDEX_DIM: u32 = 128;
/// The same as dims, as views check them: no attention has this shape.
pub(crate) const INDEX_SHAPE: MlaShape =
    MlaShape { num_heads: 1, kv_lora_rank: INDEX_DIM, qk_rope_head_dim: 0 };

/// Codes that share a scale in [`KvLayout::Ds656`] and [`KvLayout::Ds528`].
const GROUP: u32 = 128;
/// Latent and rotary elements of these.
const DS_LATENT: u32 = 512;
const DS_ROPE: u32 = 64;

impl From<Dtype> for KvLayout {
    fn from(dtype: Dtype) -> Self {
        Self::Plain(dtype)
    }
}

impl KvLayout {
    /// A token of `kv_lora_rank` latent elements and `qk_rope_head_dim` rotary ones.
    #[must_use]
    pub const fn token(self, kv_lora_rank: u32, qk_rope_head_dim: u32) -> TokenLayout {
        match self {
            Self::Plain(dtype) => TokenLayout::plain(dtype, kv_lora_rank, qk_rope_head_dim),
            Self::Ds656 => TokenLayout::in_groups(DS_ROPE),
            Self::Ds528 => TokenLayout::in_groups(0),
            Self::Index(dtype) => TokenLayout::index(dtype),
        }
    }

    /// The dtype of the latent's elements.
    #[must_use]
    pub const fn dtype(self) -> Dtype {
        match self {
            Self::Plain(dtype) | Self::Index(dtype) => dtype,
            Self::Ds656 | Self::Ds528 => Dtype::E4m3,
        }
    }

    /// Whether a token is elements of one dtype and nothing else.
    #[must_use]
    pub const fn is_plain(self) -> bool {
        matches!(self, Self::Plain(_))
    }

    /// Its name: that of the dtype, `ds656`, `ds528`, or `index_` and the dtype.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain(dtype) => dtype.name(),
            Self::Ds656 => "ds656",
            Self::Ds528 => "ds528",
            Self::Index(Dtype::F32) => "index_f32",
            Self::Index(Dtype::F16) => "index_f16",
            Self::Index(Dtype::Bf16) => "index_bf16",
            Self::Index(Dtype::E4m3) => "index_e4m3",
        }
    }

    /// Checks the scale of a whole cache: 1 unless its elements are FP8 codes without scales of their own.
    ///
    /// # Errors
    /// [`Error::Scale`] and [`Error::ScaleWithoutCodes`].
    pub(crate) fn check_scale(self, k_scale: f32) -> Result<()> {
        match self {
            Self::Plain(dtype) => scale_of("k_scale", dtype, k_scale),
            Self::Ds656 | Self::Ds528 | Self::Index(_) if k_scale != 1.0 => {
                let cure = "must be 1: each token of this layout has scales of its own";
                Err(Error::Scale { what: "k_scale", got: k_scale.into(), cure })
            }
            Self::Ds656 | Self::Ds528 | Self::Index(_) => Ok(()),
        }
    }

    /// Whether a cache of these dims that attention reads may have this layout.
    ///
    /// # Errors
    /// [`Error::Shape`] for dims that a layout of fixed bytes does not have, [`Error::LayoutUnsupported`] for index keys.
    pub(crate) fn check(self, shape: &MlaShape) -> Result<()> {
        let (rope, cure) = match self {
            Self::Plain(_) => return Ok(()),
            Self::Ds656 => (DS_ROPE, "must be 64 with KvLayout::Ds656: Ds528 has no rotary part"),
            Self::Ds528 => (0, "must be 0 with KvLayout::Ds528: Ds656 has 64 rotary elements"),
            Self::Index(_) => {
                let cure = "index keys are for IndexerAppend, IndexerLogits and KvCopyPages: use another layout here";
                return Err(Error::LayoutUnsupported { op: "attention", layout: self.name(), cure });
            }
        };
        if shape.kv_lora_rank != DS_LATENT {
            let cure = "must be 512 with KvLayout::Ds656 and Ds528: other latents need KvLayout::Plain";
            return Err(Error::Shape { what: "kv_lora_rank", got: shape.kv_lora_rank.into(), cure });
        }
        if shape.qk_rope_head_dim != rope {
            return Err(Error::Shape { what: "qk_rope_head_dim", got: shape.qk_rope_head_dim.into(), cure });
        }
        Ok(())
    }
}

impl fmt::Display for KvLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The bytes of one token: where its sections begin, and where the scales of its codes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenLayout {
    /// Bytes from a token to the next in a page.
    pub bytes: u64,
    /// The latent, which is also the value.
    pub latent: Section,
    /// The rotary part; of no element where `R` is 0.
    pub rope: Section,
    /// Where the factors of FP8 codes are stored.
    pub scales: Scales,
}

/// Elements of one dtype, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Section {
    /// The dtype of an element.
    pub dtype: Dtype,
    /// Bytes of the token before the first element.
    pub at: u64,
}

/// Where the scales of a token's codes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scales {
    /// There are none: elements are numbers.
    None,
    /// One scale serves the whole cache; each op takes it as the argument `k_scale`.
    PerTensor,
    /// Each token has f32 scales of its own.
    Groups {
        /// Codes that share a scale.
        of: u32,
        /// Bytes of the token before the first scale.
        at: u64,
    },
    /// Each token has one f32 scale, and those of a page follow all of its codes: the token's [`TokenLayout::bytes`] count it, but it
    /// lies in the page's last `4 * page_size` bytes.
    PageFooter,
}

impl TokenLayout {
    const fn plain(dtype: Dtype, kv_lora_rank: u32, qk_rope_head_dim: u32) -> Self {
        let element = dtype.bytes() as u64;
        Self {
            bytes: (kv_lora_rank as u64 + qk_rope_head_dim as u64) * element,
            latent: Section { dtype, at: 0 },
            rope: Section { dtype, at: kv_lora_rank as u64 * element },
            scales: if dtype.is_fp8() { Scales::PerTensor } else { Scales::None },
        }
    }

    /// Latent codes, their scales, then a rotary part in bf16.
    const fn in_groups(rope: u32) -> Self {
        let scales_at = DS_LATENT as u64;
        let rope_at = scales_at + (DS_LATENT / GROUP) as u64 * 4;
        Self {
            bytes: rope_at + rope as u64 * 2,
            latent: Section { dtype: Dtype::E4m3, at: 0 },
            rope: Section { dtype: Dtype::Bf16, at: rope_at },
            scales: Scales::Groups { of: GROUP, at: scales_at },
        }
    }

    /// 128 elements, and a scale in the page's footer where they are codes.
    const fn index(dtype: Dtype) -> Self {
        let plain = Self::plain(dtype, INDEX_DIM, 0);
        match dtype {
            Dtype::E4m3 => Self { bytes: plain.bytes + 4, scales: Scales::PageFooter, ..plain },
            _ => plain,
        }
    }

    /// What the offset and the strides of a [`KvView`](crate::KvView) are multiples of, in bytes: what kernels load at a time, 8 elements
    /// of the latent, or 16 bytes where a token has scales of its own; 4, a scale, where these are in a footer.
    #[must_use]
    pub const fn alignment(&self) -> u64 {
        match self.scales {
            Scales::Groups { .. } => 16,
            Scales::PageFooter => 4,
            Scales::None | Scales::PerTensor => 8 * self.latent.dtype.bytes() as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_of_a_token_follow_each_other() {
        let token = KvLayout::from(Dtype::Bf16).token(512, 64);
        assert_eq!((token.bytes, token.latent.at, token.rope.at, token.alignment()), (1152, 0, 1024, 16));
        assert_eq!(token.scales, Scales::None);
        let codes = KvLayout::from(Dtype::E4m3).token(512, 0);
        assert_eq!((codes.bytes, codes.rope.at, codes.alignment()), (512, 512, 8));
        assert_eq!(codes.scales, Scales::PerTensor);
    }

    #[test]
    fn index_keys_have_the_bytes_of_the_field() {
        let codes = KvLayout::Index(Dtype::E4m3).token(128, 0);
        assert_eq!((codes.bytes, codes.scales, codes.alignment()), (132, Scales::PageFooter, 4));
        let halves = KvLayout::Index(Dtype::Bf16).token(128, 0);
        assert_eq!((halves.bytes, halves.scales, halves.alignment()), (256, Scales::None, 16));
        let shape = MlaShape { num_heads: 1, kv_lora_rank: 512, qk_rope_head_dim: 64 };
        let error = KvLayout::Index(Dtype::F16).check(&shape).expect_err("no attention").to_string();
        assert!(error.contains("index_f16") && error.contains("IndexerLogits"), "{error}");
    }

    #[test]
    fn records_have_the_bytes_of_the_field() {
        let token = KvLayout::Ds656.token(512, 64);
        assert_eq!((token.bytes, token.latent.at, token.rope.at, token.alignment()), (656, 0, 528, 16));
        assert_eq!((token.latent.dtype, token.rope.dtype), (Dtype::E4m3, Dtype::Bf16));
        assert_eq!(token.scales, Scales::Groups { of: 128, at: 512 });
        assert_eq!(KvLayout::Ds528.token(512, 0).bytes, 528);
        let shape =
            |kv_lora_rank, qk_rope_head_dim| MlaShape { num_heads: 1, kv_lora_rank, qk_rope_head_dim };
        let refused = |layout: KvLayout, l, r| layout.check(&shape(l, r)).map_err(|error| error.to_string());
        assert_eq!(refused(KvLayout::Ds656, 512, 64), Ok(()));
        assert_eq!(refused(KvLayout::Ds528, 512, 0), Ok(()));
        for (layout, l, r, cure) in [
            (KvLayout::Ds656, 512, 0, "Ds528"),
            (KvLayout::Ds528, 512, 64, "Ds656"),
            (KvLayout::Ds656, 256, 64, "Plain"),
        ] {
            assert!(refused(layout, l, r).expect_err("refused").contains(cure), "{layout} {l}/{r}");
        }
    }
}
