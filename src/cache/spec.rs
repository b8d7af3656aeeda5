//! The pool of pages that a cache has, and its checks. Pure.

use super::layout::{KvLayout, TokenLayout};
use super::shape::MlaShape;
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};

/// The most slabs of a pool.
pub(super) const MOST_SLABS: u32 = 64;

/// The paged cache: `[num_pages, page_size]` tokens of one layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvSpec {
    /// What a token is: a [`Dtype`] converts into it.
    pub layout: KvLayout,
    /// Tokens in a page: 1 to 256.
    pub page_size: u32,
    /// Pages in the pool.
    pub num_pages: u32,
}

impl KvSpec {
    /// A pool of `num_pages` pages of `page_size` tokens of a layout, or of the elements of a [`Dtype`].
    #[must_use]
    pub fn new(layout: impl Into<KvLayout>, page_size: u32, num_pages: u32) -> Self {
        Self { layout: layout.into(), page_size, num_pages }
    }

    /// The dtype of the latent's elements.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.layout.dtype()
    }

    /// The bytes of one token.
    #[must_use]
    pub const fn token(&self, shape: &MlaShape) -> TokenLayout {
        self.layout.token(shape.kv_lora_rank, shape.qk_rope_head_dim)
    }

    /// Bytes of a page.
    #[must_use]
    pub const fn page_bytes(&self, shape: &MlaShape) -> u64 {
        self.token(shape).bytes.saturating_mul(self.page_size as u64)
    }

    /// Slots in the pool: `num_pages * page_size`.
    #[must_use]
    pub const fn num_slots(&self) -> u64 {
        self.num_pages as u64 * self.page_size as u64
    }

    /// Pages that `tokens` tokens fill, the last one perhaps in part. Pages of no token, which [`KvSpec::check`] refuses, hold none:
    /// `u32::MAX` of them.
    #[must_use]
    pub const fn pages_for(&self, tokens: u32) -> u32 {
        match (tokens, self.page_size) {
            (0, _) => 0,
            (_, 0) => u32::MAX,
            (tokens, page_size) => tokens.div_ceil(page_size),
        }
    }

    /// Slabs of a pool that is cut every `slab_pages` pages: see [`crate::Slabs`].
    ///
    /// # Errors
    /// [`Error::Shape`] for slabs of no page, and for more than [`crate::Slabs::MOST`] of them.
    pub fn num_slabs(&self, slab_pages: u32) -> Result<u32> {
        let count =
            self.num_pages.checked_div(slab_pages).map_or(u32::MAX, |_| self.num_pages.div_ceil(slab_pages));
        if count > MOST_SLABS {
            let cure = "must be at least 1, and large enough for at most 64 slabs: raise max_storage_buffer_binding_size with `wanted`, or make the pool smaller";
            return Err(Error::Shape { what: "slab_pages", got: slab_pages.into(), cure });
        }
        Ok(count)
    }

    /// Whether a cache can have these pages.
    ///
    /// # Errors
    /// [`Error::Shape`] for a page size outside 1..=256, an empty pool, or one of 2^31 slots or more.
    pub fn check(&self) -> Result<()> {
        if !(1..=256).contains(&self.page_size) {
            let got = self.page_size.into();
            return Err(Error::Shape { what: "page_size", got, cure: "must be 1..=256" });
        }
        if self.num_pages == 0 || self.num_slots() > i32::MAX as u64 {
            return Err(Error::Shape {
                what: "num_pages",
                got: self.num_pages.into(),
                cure: "must be at least 1, and num_pages * page_size below 2^31",
            });
        }
        Ok(())
    }
}
