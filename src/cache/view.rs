//! Where a layer's cache is: bytes in a buffer, or in several. Generic over a handle `B` on a buffer.

use std::ops::Range;
use std::sync::Arc;

use super::shape::MlaShape;
use super::spec::{KvSpec, MOST_SLABS};
use crate::base::error::{Error, Result};
use crate::base::view::{aligned_bytes, fits, nested};
use crate::cache::decode_spec::MlaDecode;

/// The cache of a layer: `[num_pages, page_size]` tokens somewhere in a buffer, or in several: see [`Slabs`]. It is also the only argument
/// of a [`KvCopyPages`](crate::KvCopyPages).
///
/// Offset and strides count bytes, and are multiples of 8 elements of the latent
/// ([`TokenLayout::alignment`](crate::TokenLayout::alignment)).
#[derive(Debug, Clone)]
pub struct KvView<B> {
    /// The buffer, or that of the first slab; it may hold the caches of many layers.
    pub buffer: B,
    /// Bytes before layer 0's first page.
    pub offset: u64,
    /// Bytes from a layer to the next, at least a page where `layer` is not 0.
    pub layer_stride: u64,
    /// This layer's index.
    pub layer: u32,
    /// Bytes from a page to the next, at least [`KvSpec::page_bytes`].
    pub block_stride: u64,
    /// The other buffers of a pool that is larger than one binding; [`Slabs::ONE`] where `buffer` holds all pages.
    pub slabs: Slabs<B>,
}

macro_rules! slab_names {
    ($($slab:literal)*) => { [$(concat!("slab ", $slab, " of kv")),*] };
}

/// What errors call each slab of a view in several.
#[rustfmt::skip]
const SLAB_NAMES: [&str; MOST_SLABS as usize] = slab_names![
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
    32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
];

/// Gives each slab a name of its own, where the name of the cache stands for several buffers: they are in their order.
pub(crate) fn name_slabs<B>(arguments: &mut [(&'static str, B)]) {
    let is_kv = |(name, _): &&mut (&'static str, B)| *name == KV;
    if arguments.iter().filter(|(name, _)| *name == KV).count() > 1 {
        arguments.iter_mut().filter(is_kv).zip(SLAB_NAMES).for_each(|(argument, name)| argument.0 = name);
    }
}

/// The cache, as arguments call it.
const KV: &str = "kv";

/// The buffers after the first of a pool that is cut into slabs of equally many pages, the last perhaps of fewer. Page `p` is page
/// `p % slab_pages` of slab `p / slab_pages`; offset and strides are the same in every slab.
///
/// A slab is at most as large as a binding: 128 MiB is what WebGPU guarantees, 2 GiB what many drivers have. See
/// [`MlaDecode::slab_pages`].
#[derive(Debug, Clone)]
pub struct Slabs<B> {
    /// Pages of a slab; 0 for one buffer that holds the whole pool.
    slab_pages: u32,
    /// The first page of [`KvView::buffer`]; not 0 only in a part of a view.
    first_page: u32,
    /// The buffers after the first, each with its first page.
    more: Option<Arc<[(B, u32)]>>,
}

impl<B> Slabs<B> {
    /// One buffer holds all pages.
    pub const ONE: Self = Self { slab_pages: 0, first_page: 0, more: None };

    /// The most slabs of a pool.
    pub const MOST: u32 = MOST_SLABS;

    /// Pages of a slab; 0 for one buffer.
    #[must_use]
    pub fn slab_pages(&self) -> u32 {
        self.slab_pages
    }

    fn more(&self) -> &[(B, u32)] {
        self.more.as_deref().unwrap_or_default()
    }

    fn map<'a, C>(&'a self, mut f: impl FnMut(&'a B) -> Result<C>) -> Result<Slabs<C>> {
        let Self { slab_pages, first_page, .. } = *self;
        let map =
            |more: &'a Arc<[(B, u32)]>| more.iter().map(|(buffer, page)| Ok((f(buffer)?, *page))).collect();
        Ok(Slabs { slab_pages, first_page, more: self.more.as_ref().map(map).transpose()? })
    }
}

impl<B> KvView<B> {
    /// A buffer that holds one layer's pages and nothing else.
    pub fn dense(buffer: B, spec: &MlaDecode) -> Self {
        let block_stride = spec.kv.page_bytes(&spec.shape);
        Self { buffer, offset: 0, layer_stride: 0, layer: 0, block_stride, slabs: Slabs::ONE }
    }

    /// Layer `layer` of a buffer that holds the caches of a model's layers one after the other, `[layers, num_pages, page_size]` tokens:
    /// [`MlaDecode::cache_bytes`] times the number of layers.
    pub fn of_layer(buffer: B, spec: &MlaDecode, layer: u32) -> Self {
        let dense = Self::dense(buffer, spec);
        Self { layer_stride: dense.block_stride.saturating_mul(spec.kv.num_pages.into()), layer, ..dense }
    }

    /// Bytes before this layer's first page.
    pub(crate) fn base(&self) -> u64 {
        self.offset.saturating_add(self.layer_stride.saturating_mul(self.layer.into()))
    }

    /// The same view of other handles.
    pub(crate) fn map<'a, C>(&'a self, mut f: impl FnMut(&'a B) -> Result<C>) -> Result<KvView<C>> {
        let Self { offset, layer_stride, layer, block_stride, .. } = *self;
        Ok(KvView {
            buffer: f(&self.buffer)?,
            offset,
            layer_stride,
            layer,
            block_stride,
            slabs: self.slabs.map(f)?,
        })
    }

    /// Every slab's buffer.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = &B> {
        std::iter::once(&self.buffer).chain(self.slabs.more().iter().map(|(buffer, _)| buffer))
    }

    /// Checks that no two slabs share memory. `offset` is that of [`Op::check_aliases`](crate::Op::check_aliases).
    ///
    /// # Errors
    /// [`Error::Aliased`].
    pub(crate) fn check_slabs_apart(&self, offset: impl Fn(&B, &B) -> Option<i64>) -> Result<()> {
        let slabs: Vec<&B> = self.buffers().collect();
        for (i, b) in slabs.iter().enumerate() {
            if let Some(at) = slabs[..i].iter().position(|a| offset(a, b).is_some()) {
                return Err(Error::Aliased { a: SLAB_NAMES[at], b: SLAB_NAMES[i] });
            }
        }
        Ok(())
    }

    /// Slabs: 1 without any.
    pub(crate) fn num_slabs(&self) -> u32 {
        1 + self.slabs.more().len() as u32
    }

    /// The pages of the pool that [`KvView::buffer`] holds.
    pub(crate) fn pages(&self, kv: &KvSpec) -> Range<u32> {
        let Slabs { slab_pages, first_page, .. } = self.slabs;
        let end = if slab_pages == 0 { kv.num_pages } else { first_page.saturating_add(slab_pages) };
        first_page..end.min(kv.num_pages)
    }

    /// The slots of the pool that [`KvView::buffer`] holds: where they begin, and how many.
    pub(crate) fn slots(&self, kv: &KvSpec) -> (u32, u32) {
        let pages = self.pages(kv);
        (pages.start * kv.page_size, pages.len() as u32 * kv.page_size)
    }

    /// Bytes from the buffer's front to the end of the last page that is in it.
    pub(crate) fn end(&self, kv: &KvSpec, shape: &MlaShape) -> u64 {
        let pages = (self.pages(kv).len() as u64).saturating_sub(1);
        self.base()
            .saturating_add(pages.saturating_mul(self.block_stride))
            .saturating_add(kv.page_bytes(shape))
    }
}

impl<B: Copy> KvView<B> {
    /// Layer `layer` of a pool in slabs of `slab_pages` pages each, the last perhaps of fewer. A buffer holds
    /// `[layers, slab_pages, page_size]` tokens: [`MlaDecode::slab_bytes`] times the number of layers.
    ///
    /// ```
    /// use wgpu_mla::{Device, Dtype, KvSpec, KvView, MlaDecode, MlaShape, cpu::Cpu};
    ///
    /// # fn main() -> wgpu_mla::Result<()> {
    /// let shape = MlaShape { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64 };
    /// let kv = KvSpec { layout: Dtype::Bf16.into(), page_size: 64, num_pages: 100 };
    /// let spec = MlaDecode { shape, kv, query: Dtype::Bf16, out: Dtype::Bf16 };
    /// let cpu = Cpu::new();
    /// // What a device with bindings of 3 MB would need: `spec.slab_pages(device.largest_binding())`.
    /// let slab_pages = spec.slab_pages(3_000_000);
    /// let slabs = (0..kv.num_pages.div_ceil(slab_pages)).map(|_| cpu.buffer(spec.slab_bytes(slab_pages)));
    /// let slabs = slabs.collect::<wgpu_mla::Result<Vec<_>>>()?;
    /// let slabs: Vec<_> = slabs.iter().collect();
    /// let view = KvView::in_slabs(&slabs, &spec, slab_pages, 0)?;
    /// assert_eq!((slab_pages, slabs.len()), (40, 3));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] for slabs of no page and for more than [`Slabs::MOST`]; [`Error::Length`] for fewer or more buffers than
    /// `num_pages` pages fill.
    pub fn in_slabs(buffers: &[B], spec: &MlaDecode, slab_pages: u32, layer: u32) -> Result<Self> {
        let want = spec.kv.num_slabs(slab_pages)?;
        let Some((&buffer, rest)) = buffers.split_first().filter(|_| buffers.len() as u64 == u64::from(want))
        else {
            let cure = "one buffer for each slab_pages pages, and one for what is left";
            return Err(Error::Length { what: "slabs", got: buffers.len() as u64, want: want.into(), cure });
        };
        let dense = Self::dense(buffer, spec);
        if rest.is_empty() {
            return Ok(Self::of_layer(buffer, spec, layer));
        }
        let more = (1..).zip(rest).map(|(i, &buffer)| (buffer, i * slab_pages)).collect();
        let slabs = Slabs { slab_pages, first_page: 0, more: Some(more) };
        let layer_stride = dense.block_stride.saturating_mul(slab_pages.into());
        Ok(Self { layer_stride, layer, slabs, ..dense })
    }

    /// Returns each slab as a view of its own, which knows the pages that it holds.
    pub(crate) fn each_slab(&self) -> impl Iterator<Item = Self> {
        let first = (self.buffer, self.slabs.first_page);
        std::iter::once(first).chain(self.slabs.more().iter().copied()).map(|(buffer, first_page)| {
            let slabs = Slabs { slab_pages: self.slabs.slab_pages, first_page, more: None };
            Self { buffer, slabs, ..*self }
        })
    }

    /// Two slabs as one view, the first with the second behind it.
    pub(crate) fn with(&self, other: &Self) -> Self {
        let more = Some(Arc::from([(other.buffer, other.slabs.first_page)]));
        Self { slabs: Slabs { more, ..self.slabs.clone() }, ..*self }
    }

    /// `size` gives a buffer's bytes.
    ///
    /// # Errors
    /// [`Error::Alignment`], [`Error::Shape`] where pages would overlap, [`Error::BufferTooSmall`].
    pub(crate) fn check(&self, kv: &KvSpec, shape: &MlaShape, size: impl Fn(B) -> u64) -> Result<()> {
        let of = kv.token(shape).alignment();
        for (what, got) in [
            ("kv offset", self.offset),
            ("kv layer_stride", self.layer_stride),
            ("kv block_stride", self.block_stride),
        ] {
            aligned_bytes(what, got, of)?;
        }
        let page = kv.page_bytes(shape);
        if self.layer > 0 && self.layer_stride < page {
            let cure = "must be at least a page in bytes where `layer` is not 0: `KvView::dense` is of one layer alone";
            return Err(Error::Shape { what: "kv layer_stride", got: self.layer_stride, cure });
        }
        if self.block_stride < page {
            let got = self.block_stride;
            let cure = "must be at least the bytes of a page: `KvSpec::page_bytes`";
            return Err(Error::Shape { what: "kv block_stride", got, cure });
        }
        if self.slabs.slab_pages > 0 {
            let (got, want) = (self.num_slabs().into(), kv.num_slabs(self.slabs.slab_pages)?.into());
            if got != want {
                let cure =
                    "the view is of a pool of other pages: make it with `KvView::in_slabs` of this spec";
                return Err(Error::Length { what: "slabs", got, want, cure });
            }
        }
        self.each_slab().try_for_each(|slab| fits("kv", slab.end(kv, shape), size(slab.buffer)))?;
        let pages = self.pages(kv).len() as u64;
        let dims = [(u64::from(self.layer) + 1, self.layer_stride), (pages, self.block_stride)];
        if nested(dims, page).is_some() {
            let got = self.layer_stride;
            let cure = "makes the pages of layers overlap: must be at least num_pages * block_stride, or block_stride at least layers * layer_stride";
            return Err(Error::Shape { what: "kv layer_stride", got, cure });
        }
        Ok(())
    }
}
