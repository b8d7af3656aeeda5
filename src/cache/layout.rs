//! The layout of a token of the cache in bytes, and the description that every layout gives of itself. Pure.

use crate::base::dtype::Dtype;

/// How a token's bytes lie in a page. `Dtype` converts into it: `Dtype::Bf16.into()`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvLayout {
    /// `L + R` elements of one dtype, the latent first: vLLM's `concat_and_cache_mla`.
    Plain(Dtype),
}

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
        }
    }

    /// The dtype of the latent's elements.
    #[must_use]
    pub const fn dtype(self) -> Dtype {
        match self {
            Self::Plain(dtype) => dtype,
        }
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

    /// What the offset and the strides of a [`KvView`](crate::KvView) are multiples of, in bytes: 8 elements of the latent, which kernels
    /// load at a time.
    #[must_use]
    pub const fn alignment(&self) -> u64 {
        8 * self.latent.dtype.bytes() as u64
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
}
