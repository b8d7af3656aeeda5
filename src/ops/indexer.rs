//! The cache of a lightning indexer: its format, its pages, and views of it. Pure.

use super::kv_copy_pages::KvCopyPages;
use super::op::Use;
use super::rope::RopeLayout;
use super::rope_frequencies::check_max_position;
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::view::fits;
pub(crate) use crate::cache::INDEX_SHAPE;
use crate::cache::decode_spec::MlaDecode;
use crate::cache::{KvLayout, KvSpec, KvView};

/// Elements of an index key and of a head of an index query that rotate: the first ones.
pub(crate) const INDEX_ROPE_DIM: u32 = 64;

/// The most index heads.
pub(crate) const MOST_INDEX_HEADS: u32 = 64;

/// How index keys and queries are rotated and quantised: a property of a model, and of its whole index cache. Keys of two formats in one
/// cache give wrong scores, so ops take the format as a part of their spec.
///
/// | model | `rope` | `hadamard` | `ue8m0` |
/// |---|---|---|---|
/// | DeepSeek-V3.2 | `HalfSplit` | yes | yes |
/// | GLM-5, 5.1, 5.2 (`indexer_rope_interleave`) | `Interleaved` | yes | yes |
/// | GLM-5.3-Flash | none | no | as its config says |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IndexFormat {
    /// Dtype of keys and queries. e4m3: codes with an f32 scale a token, as DeepGEMM's caches; f32, f16 or bf16: the elements themselves.
    pub dtype: Dtype,
    /// Which of the first 64 elements make a pair in RoPE; `None` for a model whose indexer has no RoPE.
    pub rope: Option<RopeLayout>,
    /// Whether keys and queries are multiplied with the Hadamard matrix of 128 rows, in Sylvester's order, times 128^-1/2.
    pub hadamard: bool,
    /// Whether scales are rounded up to powers of two. Unread where `dtype` is not e4m3.
    pub ue8m0: bool,
}

impl IndexFormat {
    /// DeepSeek-V3.2's.
    pub const DEEPSEEK_V32: Self =
        Self { dtype: Dtype::E4m3, rope: Some(RopeLayout::HalfSplit), hadamard: true, ue8m0: true };
    /// GLM-5's.
    pub const GLM_5: Self = Self { rope: Some(RopeLayout::Interleaved), ..Self::DEEPSEEK_V32 };

    /// How an op uses positions and angles: not at all without RoPE.
    pub(super) fn reads_angles(&self) -> fn(&'static str) -> Use {
        if self.rope.is_some() { Use::Read } else { Use::Unread }
    }

    /// How far positions may reach with a table of so many: without RoPE anywhere.
    pub(super) const fn positions(&self, max_position: u32) -> u32 {
        if self.rope.is_some() { max_position } else { u32::MAX }
    }

    /// Checks positions of so many tokens, and the table of angles, by the bytes of their buffers.
    ///
    /// # Errors
    /// [`Error::Shape`] and [`Error::BufferTooSmall`].
    pub(super) fn check_angles(
        &self,
        tokens: u32,
        max_position: u32,
        [positions, cos_sin]: [u64; 2],
    ) -> Result<()> {
        if self.rope.is_none() {
            return Ok(());
        }
        check_max_position(max_position)?;
        fits("positions", u64::from(tokens) * 4, positions)?;
        fits("cos_sin", u64::from(max_position) * u64::from(INDEX_ROPE_DIM) * 4, cos_sin)
    }

    /// Every combination, but for `ue8m0` where it is unread.
    #[cfg(test)]
    pub(crate) fn all() -> Vec<Self> {
        let ropes = [None, Some(RopeLayout::Interleaved), Some(RopeLayout::HalfSplit)];
        let mut all = Vec::new();
        for dtype in Dtype::ALL {
            for rope in ropes {
                for hadamard in [false, true] {
                    let format = Self { dtype, rope, hadamard, ue8m0: false };
                    all.push(format);
                    if dtype.is_fp8() {
                        all.push(Self { ue8m0: true, ..format });
                    }
                }
            }
        }
        all
    }
}

/// The index cache of a layer: `[num_pages, page_size]` keys of 128 elements, in the pages of the layer's block table. With e4m3 a page is
/// `[page_size, 128]` codes, then `[page_size]` f32 scales. A layer's cache is a [`KvView`] that [`IndexSpec::view`],
/// [`IndexSpec::view_of_layer`] or [`IndexSpec::view_in_slabs`] makes; its offset and strides are multiples of 4 bytes (e4m3) or of 8
/// elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IndexSpec {
    /// How keys are rotated and quantised.
    pub format: IndexFormat,
    /// Tokens in a page: 1 to 256, as in the [`KvSpec`] whose block table it shares.
    pub page_size: u32,
    /// Pages in the pool.
    pub num_pages: u32,
}

impl IndexSpec {
    /// The pool of pages.
    #[must_use]
    pub const fn kv(&self) -> KvSpec {
        let layout = KvLayout::Index(self.format.dtype);
        KvSpec { layout, page_size: self.page_size, num_pages: self.num_pages }
    }

    /// Bytes of a page.
    #[must_use]
    pub const fn page_bytes(&self) -> u64 {
        self.kv().page_bytes(&INDEX_SHAPE)
    }

    /// Bytes of one layer's index cache.
    #[must_use]
    pub const fn cache_bytes(&self) -> u64 {
        self.page_bytes().saturating_mul(self.num_pages as u64)
    }

    /// A buffer that holds one layer's index cache and nothing else.
    pub fn view<B>(&self, buffer: B) -> KvView<B> {
        KvView::dense(buffer, &self.view_spec())
    }

    /// Layer `layer` of a buffer that holds the index caches of several layers one after the other, [`IndexSpec::cache_bytes`] each.
    pub fn view_of_layer<B>(&self, buffer: B, layer: u32) -> KvView<B> {
        KvView::of_layer(buffer, &self.view_spec(), layer)
    }

    /// Layer `layer` of an index cache in slabs of `slab_pages` pages each: see [`KvView::in_slabs`].
    ///
    /// # Errors
    /// The errors of [`KvView::in_slabs`].
    pub fn view_in_slabs<B: Copy>(&self, buffers: &[B], slab_pages: u32, layer: u32) -> Result<KvView<B>> {
        KvView::in_slabs(buffers, &self.view_spec(), slab_pages, layer)
    }

    /// The copy of whole pages, for a sequence that forks: its caches of keys and of index keys are copied alike.
    #[must_use]
    pub const fn copies(&self) -> KvCopyPages {
        KvCopyPages { shape: INDEX_SHAPE, kv: self.kv() }
    }

    /// Whether a cache can have these pages.
    ///
    /// # Errors
    /// The errors of [`KvSpec::check`].
    pub fn check(&self) -> Result<()> {
        self.kv().check()
    }

    /// What views are made of: no attention has this shape.
    const fn view_spec(&self) -> MlaDecode {
        MlaDecode { shape: INDEX_SHAPE, kv: self.kv(), query: Dtype::F32, out: Dtype::F32 }
    }
}

/// Whether an indexer can have so many heads.
///
/// # Errors
/// [`Error::Shape`].
pub(crate) fn check_index_heads(num_heads: u32) -> Result<()> {
    if (1..=MOST_INDEX_HEADS).contains(&num_heads) {
        return Ok(());
    }
    Err(Error::Shape { what: "index heads", got: num_heads.into(), cure: "must be 1..=64" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_have_the_bytes_of_the_field() {
        let spec = IndexSpec { format: IndexFormat::DEEPSEEK_V32, page_size: 64, num_pages: 3 };
        assert_eq!((spec.page_bytes(), spec.cache_bytes()), (8448, 3 * 8448));
        let halves = IndexSpec { format: IndexFormat { dtype: Dtype::Bf16, ..spec.format }, ..spec };
        assert_eq!(halves.page_bytes(), 64 * 256);
        let second = spec.view_of_layer("buffer", 1);
        assert_eq!((second.base(), second.block_stride), (3 * 8448, 8448));
        assert!(IndexSpec { page_size: 0, ..spec }.check().is_err());
        assert_eq!(IndexFormat::all().len(), 6 * 5);
    }
}
