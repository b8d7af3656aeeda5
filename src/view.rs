//! Strided views of buffers, and their checks. Generic over a handle `B` on a buffer: `&Buffer` where a caller hands it over.

use std::ops::Range;

use crate::{Dtype, Error, KvSpec, MlaDecode, Result};

/// A strided view of `[tokens, heads, dim]` (or `[tokens, heads]`) elements in a buffer.
///
/// Offset and strides count elements, not bytes. Each op's arguments say what they are multiples of: 8 elements always do, and those of
/// an LSE are free. The stride of a dimension of 1 is unread.
#[derive(Debug, Clone, Copy)]
pub struct View<B> {
    /// The buffer.
    pub buffer: B,
    /// Elements before the first one.
    pub offset: u64,
    /// Elements from a token to the next.
    pub token_stride: u64,
    /// Elements from a head to the next.
    pub head_stride: u64,
}

impl<B> View<B> {
    /// A dense `[tokens, heads, dim]` array that starts at the front of its buffer.
    pub fn dense(buffer: B, heads: u32, dim: u32) -> Self {
        let head_stride = u64::from(dim);
        Self { buffer, offset: 0, token_stride: u64::from(heads) * head_stride, head_stride }
    }

    /// The same view of its buffer, lent.
    pub(crate) fn lent(&self) -> View<&B> {
        let Self { ref buffer, offset, token_stride, head_stride } = *self;
        View { buffer, offset, token_stride, head_stride }
    }

    /// Some columns of its rows, such as the parts of a fused tensor: of `q`, `[tokens, heads, P + R]`, columns `0..P` are `q_nope` and
    /// `P..P + R` are `q_pe`. Nothing is copied.
    ///
    /// ```
    /// use wgpu_mla::View;
    ///
    /// # fn main() -> wgpu_mla::Result<()> {
    /// let (heads, nope, rope) = (16, 128, 64);
    /// let q = View::dense("q", heads, nope + rope);
    /// let (q_nope, q_pe) = (q.columns(0..nope)?, q.columns(nope..nope + rope)?);
    /// assert_eq!((q_nope.offset, q_pe.offset, q_pe.head_stride), (0, 128, 192));
    /// assert!(q.columns(nope..nope + rope + 8).is_err());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] for a range that ends before it begins, or past the row: a row is at most as long as the strides, but for those that
    /// are 0.
    pub fn columns(self, columns: Range<u32>) -> Result<Self> {
        let (begin, end) = (u64::from(columns.start), u64::from(columns.end));
        let (what, got) = ("the end of columns", end);
        if end < begin {
            return Err(Error::Shape { what, got, cure: "must not be before their start" });
        }
        let row = [self.token_stride, self.head_stride].into_iter().filter(|&stride| stride > 0).min();
        if row.is_some_and(|row| end > row) {
            let cure = "must be inside the row, which is at most as long as the token and head strides";
            return Err(Error::Shape { what, got, cure });
        }
        Ok(Self { offset: self.offset.saturating_add(begin), ..self })
    }

    /// The same view of another handle.
    pub(crate) fn map<'a, C>(&'a self, f: impl FnOnce(&'a B) -> Result<C>) -> Result<View<C>> {
        let Self { offset, token_stride, head_stride, .. } = *self;
        Ok(View { buffer: f(&self.buffer)?, offset, token_stride, head_stride })
    }

    /// Checks `[tokens, heads, dim]` elements of `bytes` bytes: offset and strides in multiples of `unit` elements, the end inside a
    /// buffer of `size` bytes, and rows that do not overlap. The stride of a dimension of 1 is unread, and may be anything.
    ///
    /// # Errors
    /// [`Error::Alignment`], [`Error::BufferTooSmall`] and [`Error::Shape`].
    pub(crate) fn check(
        &self,
        what: &'static str,
        dims: [u32; 3],
        bytes: usize,
        unit: u64,
        size: u64,
    ) -> Result<()> {
        self.check_inside(what, dims, bytes, unit, size)?;
        let [tokens, heads, dim] = dims.map(u64::from);
        distinct(what, self, tokens, heads, dim)
    }

    /// As [`View::check`], where a stride of 0 gives all tokens, or all heads, one row, as `repeats` allows.
    pub(crate) fn check_repeats(
        &self,
        repeats: [bool; 2],
        what: &'static str,
        [tokens, heads, dim]: [u32; 3],
        bytes: usize,
        unit: u64,
        size: u64,
    ) -> Result<()> {
        let rows = |repeats: bool, count: u32, stride: u64| {
            if repeats && stride == 0 { count.min(1) } else { count }
        };
        let tokens = rows(repeats[0], tokens, self.token_stride);
        let heads = rows(repeats[1], heads, self.head_stride);
        self.check(what, [tokens, heads, dim], bytes, unit, size)
    }

    /// As [`View::check`], but for rows that overlap.
    fn check_inside(
        &self,
        what: &'static str,
        [tokens, heads, dim]: [u32; 3],
        bytes: usize,
        unit: u64,
        size: u64,
    ) -> Result<()> {
        let [tokens, heads, dim] = [tokens, heads, dim].map(u64::from);
        if dim == 0 {
            return Ok(());
        }
        let used = |count: u64, stride: u64| if count > 1 { stride } else { 0 };
        for got in [self.offset, used(tokens, self.token_stride), used(heads, self.head_stride)] {
            aligned(what, got, unit)?;
        }
        fits(what, self.end(tokens, heads, dim).saturating_mul(bytes as u64), size)
    }

    /// Elements from the buffer's front to the end of the view.
    pub(crate) fn end(&self, tokens: u64, heads: u64, dim: u64) -> u64 {
        if tokens == 0 || dim == 0 {
            return 0;
        }
        let last = (tokens - 1).saturating_mul(self.token_stride);
        let last = last.saturating_add(heads.saturating_sub(1).saturating_mul(self.head_stride));
        self.offset.saturating_add(last).saturating_add(dim)
    }
}

/// The cache of a layer: `[num_pages, page_size, L + R]` somewhere in a buffer, or in several: see [`Slabs`]. It is all that a
/// [`KvCopyPages`](crate::KvCopyPages) takes of a layer.
#[derive(Debug, Clone, Copy)]
pub struct KvView<B> {
    /// The buffer, or that of the first slab; it may hold the caches of many layers.
    pub buffer: B,
    /// Elements before layer 0's first page; a multiple of 8.
    pub offset: u64,
    /// Elements from a layer to the next, at least a page where `layer` is not 0; a multiple of 8.
    pub layer_stride: u64,
    /// This layer's index.
    pub layer: u32,
    /// Elements from a page to the next, at least `page_size * (L + R)`; a multiple of 8.
    pub block_stride: u64,
    /// The other buffers of a pool that is larger than one binding; [`Slabs::ONE`] where `buffer` holds all pages.
    pub slabs: Slabs<B>,
}

/// The most slabs after the first.
const MORE: usize = 63;

macro_rules! slab_names {
    ($($slab:literal)*) => { [$(concat!("slab ", $slab, " of kv")),*] };
}

/// What errors call each slab of a view in several.
#[rustfmt::skip]
const SLAB_NAMES: [&str; MORE + 1] = slab_names![
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
#[derive(Debug, Clone, Copy)]
pub struct Slabs<B> {
    /// Pages of a slab; 0 for one buffer that holds the whole pool.
    slab_pages: u32,
    /// The first page of [`KvView::buffer`]; not 0 only in a part of a view.
    first_page: u32,
    /// Each with its first page.
    more: [Option<(B, u32)>; MORE],
}

impl<B> Slabs<B> {
    /// One buffer holds all pages.
    pub const ONE: Self = Self { slab_pages: 0, first_page: 0, more: [const { None }; MORE] };

    /// The most slabs of a pool.
    pub const MOST: u32 = MORE as u32 + 1;

    /// Pages of a slab; 0 for one buffer.
    #[must_use]
    pub fn slab_pages(&self) -> u32 {
        self.slab_pages
    }

    fn map<'a, C>(&'a self, mut f: impl FnMut(&'a B) -> Result<C>) -> Result<Slabs<C>> {
        let Self { slab_pages, first_page, .. } = *self;
        let mut slabs = Slabs { slab_pages, first_page, ..Slabs::ONE };
        for (to, from) in slabs.more.iter_mut().zip(&self.more) {
            let Some((buffer, page)) = from else { break };
            *to = Some((f(buffer)?, *page));
        }
        Ok(slabs)
    }
}

impl<B> KvView<B> {
    /// A buffer that holds one layer's pages and nothing else.
    pub fn dense(buffer: B, spec: &MlaDecode) -> Self {
        let block_stride = u64::from(spec.kv.page_size) * u64::from(spec.shape.row_elems());
        Self { buffer, offset: 0, layer_stride: 0, layer: 0, block_stride, slabs: Slabs::ONE }
    }

    /// Layer `layer` of a buffer that holds the caches of a model's layers one after the other, `[layers, num_pages, page_size, L + R]`:
    /// [`MlaDecode::cache_bytes`] times the number of layers.
    pub fn of_layer(buffer: B, spec: &MlaDecode, layer: u32) -> Self {
        let dense = Self::dense(buffer, spec);
        Self { layer_stride: dense.block_stride.saturating_mul(spec.kv.num_pages.into()), layer, ..dense }
    }

    /// Elements before this layer's first page.
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
        let more = self.slabs.more.iter().map_while(|slab| slab.as_ref().map(|(buffer, _)| buffer));
        std::iter::once(&self.buffer).chain(more)
    }

    /// No two slabs are of one memory. `offset` is that of [`Op::check_aliases`](crate::Op::check_aliases).
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
        self.buffers().count() as u32
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

    /// Elements from the buffer's front to the end of the last page that is in it, of rows of `row_elems` elements.
    pub(crate) fn end(&self, kv: &KvSpec, row_elems: u32) -> u64 {
        let pages = (self.pages(kv).len() as u64).saturating_sub(1);
        let page = u64::from(kv.page_size) * u64::from(row_elems);
        self.base().saturating_add(pages.saturating_mul(self.block_stride)).saturating_add(page)
    }
}

impl<B: Copy> KvView<B> {
    /// Layer `layer` of a pool in slabs of `slab_pages` pages each, the last perhaps of fewer. A buffer holds
    /// `[layers, slab_pages, page_size, L + R]`: [`MlaDecode::slab_bytes`] times the number of layers.
    ///
    /// ```
    /// use wgpu_mla::{Device, Dtype, KvSpec, KvView, MlaDecode, MlaShape, cpu::Cpu};
    ///
    /// # fn main() -> wgpu_mla::Result<()> {
    /// let shape = MlaShape { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64 };
    /// let kv = KvSpec { dtype: Dtype::Bf16, page_size: 64, num_pages: 100 };
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
        let Some((&buffer, rest)) = buffers.split_first().filter(|_| buffers.len() as u64 == want.into())
        else {
            let cure = "one buffer for each slab_pages pages, and one for what is left";
            return Err(Error::Length { what: "slabs", got: buffers.len() as u64, want: want.into(), cure });
        };
        let dense = Self::dense(buffer, spec);
        if rest.is_empty() {
            return Ok(Self::of_layer(buffer, spec, layer));
        }
        let mut slabs = Slabs { slab_pages, ..Slabs::ONE };
        for ((to, &buffer), i) in slabs.more.iter_mut().zip(rest).zip(1..) {
            *to = Some((buffer, i * slab_pages));
        }
        let layer_stride = dense.block_stride.saturating_mul(slab_pages.into());
        Ok(Self { layer_stride, layer, slabs, ..dense })
    }

    /// Each slab as a view of its own, which knows the pages that it holds.
    pub(crate) fn each_slab(&self) -> impl Iterator<Item = Self> {
        let view = *self;
        let more = self.slabs.more.into_iter().map_while(|slab| slab);
        std::iter::once((self.buffer, self.slabs.first_page))
            .chain(more)
            .map(move |(buffer, first_page)| view.of_slab(buffer, first_page))
    }

    fn of_slab(self, buffer: B, first_page: u32) -> Self {
        let slabs = Slabs { slab_pages: self.slabs.slab_pages, first_page, ..Slabs::ONE };
        Self { buffer, slabs, ..self }
    }

    /// Two slabs as one view, the first with the second behind it.
    pub(crate) fn with(&self, other: &Self) -> Self {
        let mut slabs = self.slabs;
        slabs.more[0] = Some((other.buffer, other.slabs.first_page));
        Self { slabs, ..*self }
    }

    /// `size` gives a buffer's bytes.
    ///
    /// # Errors
    /// [`Error::Alignment`], [`Error::Shape`] where pages would overlap, [`Error::BufferTooSmall`].
    pub(crate) fn check(&self, kv: &KvSpec, row_elems: u32, size: impl Fn(B) -> u64) -> Result<()> {
        for (what, got) in [
            ("kv offset", self.offset),
            ("kv layer_stride", self.layer_stride),
            ("kv block_stride", self.block_stride),
        ] {
            aligned(what, got, 8)?;
        }
        let page = u64::from(kv.page_size) * u64::from(row_elems);
        if self.layer > 0 && self.layer_stride < page {
            let cure = "must be at least a page in elements where `layer` is not 0: `KvView::dense` is of one layer alone";
            return Err(Error::Shape { what: "kv layer_stride", got: self.layer_stride, cure });
        }
        if self.block_stride < page {
            let got = self.block_stride;
            let cure = "must be at least page_size * (kv_lora_rank + qk_rope_head_dim) elements";
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
        self.each_slab().try_for_each(|slab| {
            let end = slab.end(kv, row_elems).saturating_mul(kv.dtype.bytes() as u64);
            fits("kv", end, size(slab.buffer))
        })?;
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

/// # Errors
/// [`Error::Alignment`].
pub(crate) fn aligned(what: &'static str, got: u64, of: u64) -> Result<()> {
    if !got.is_multiple_of(of) {
        return Err(Error::Alignment { what, got, of, unit: "elements" });
    }
    Ok(())
}

/// # Errors
/// [`Error::BufferTooSmall`].
pub(crate) fn fits(what: &'static str, end: u64, size: u64) -> Result<()> {
    if end > size {
        return Err(Error::BufferTooSmall { what, end, size });
    }
    Ok(())
}

/// Rows must not overlap: what is written would depend on timing, and what is read would be one row for several.
///
/// # Errors
/// [`Error::Shape`].
pub(crate) fn distinct<B>(
    what: &'static str,
    view: &View<B>,
    tokens: u64,
    heads: u64,
    dim: u64,
) -> Result<()> {
    let dims = [(tokens, view.token_stride), (heads, view.head_stride)];
    let cure = "token and head strides make rows overlap: nest one inside the other";
    nested(dims, dim).map_or(Ok(()), |got| Err(Error::Shape { what, got, cure }))
}

/// Sets of rows, such as those of ranks, must not overlap either. `set_stride` is from a set to the next.
///
/// # Errors
/// [`Error::Shape`], which names `what` with the stride of the sets.
pub(crate) fn distinct_sets<B>(
    what: &'static str,
    (sets, set_stride): (u64, u64),
    view: &View<B>,
    [tokens, heads, dim]: [u32; 3],
) -> Result<()> {
    let dims = [(sets, set_stride), (tokens.into(), view.token_stride), (heads.into(), view.head_stride)];
    let cure =
        "makes sets overlap: it must be at least a set's elements, or lie between the token and head strides";
    nested(dims, dim.into()).map_or(Ok(()), |_| Err(Error::Shape { what, got: set_stride, cure }))
}

/// The first stride that is smaller than what lies inside of it, of dimensions of so many entries in any order. The stride of a dimension of 1
/// is unread.
fn nested<const N: usize>(mut dims: [(u64, u64); N], dim: u64) -> Option<u64> {
    if dims.iter().any(|&(count, _)| count == 0) {
        return None;
    }
    dims.sort_unstable_by_key(|&(_, stride)| stride);
    let mut inside = dim;
    for (count, stride) in dims.into_iter().filter(|&(count, _)| count > 1) {
        if stride < inside {
            return Some(stride);
        }
        inside = inside.saturating_add((count - 1).saturating_mul(stride));
    }
    None
}

/// # Errors
/// [`Error::Scale`] for a factor that is not finite and above 0.
pub(crate) fn positive(what: &'static str, got: f32) -> Result<()> {
    if !(got.is_finite() && got > 0.0) {
        return Err(Error::Scale { what, got: got.into(), cure: "must be finite and above 0" });
    }
    Ok(())
}

/// A factor that is divided by, or multiplied with others: a device may take a smaller one for 0.
///
/// # Errors
/// [`Error::Scale`].
pub(crate) fn normal(what: &'static str, got: f32) -> Result<()> {
    if !(got.is_normal() && got > 0.0) {
        let cure = "must be finite and at least 2^-126 (1.18e-38), so that its reciprocal is finite too";
        return Err(Error::Scale { what, got: got.into(), cure });
    }
    Ok(())
}

/// The scale of elements of a dtype, which is 1 unless they are FP8 codes.
///
/// # Errors
/// [`Error::Scale`] and [`Error::ScaleWithoutCodes`].
pub(crate) fn scale_of(what: &'static str, dtype: Dtype, got: f32) -> Result<()> {
    normal(what, got)?;
    codes_only(what, dtype, got)
}

/// # Errors
/// [`Error::ScaleWithoutCodes`].
pub(crate) fn codes_only(what: &'static str, dtype: Dtype, got: f32) -> Result<()> {
    if !dtype.is_fp8() && got != 1.0 {
        return Err(Error::ScaleWithoutCodes { what, got, dtype });
    }
    Ok(())
}

/// What logits are multiplied by, in base 2: the product of an attention's scales and log2(e). Kernels multiply it by powers of two that
/// undo the scales of staged elements, at most 2^16 either way, and compare logits with finite sentinels: within these bounds none of that leaves
/// f32's normal numbers.
const LOGIT_SCALES: std::ops::RangeInclusive<f64> = 1.0 / (1u128 << 100) as f64..=(1u128 << 100) as f64;

/// # Errors
/// [`Error::Scale`] for a product of scales that not every backend multiplies logits by.
pub(crate) fn logit_scale(what: &'static str, scales: &[f32]) -> Result<()> {
    let got: f64 = scales.iter().map(|&scale| f64::from(scale)).product();
    if !LOGIT_SCALES.contains(&(got * std::f64::consts::LOG2_E)) {
        let cure = "must be, times log2(e), from 2^-100 to 2^100 (5.5e-31 to 8.7e29 without log2(e))";
        return Err(Error::Scale { what, got, cure });
    }
    Ok(())
}

/// The number of tokens in a range, and how far it reaches: not at all without a token.
///
/// # Errors
/// [`Error::Shape`] for a range that ends before it begins.
pub(crate) fn check_tokens(tokens: &std::ops::Range<u32>) -> Result<(u32, u32)> {
    match tokens.end.checked_sub(tokens.start) {
        Some(0) => Ok((0, 0)),
        Some(count) => Ok((count, tokens.end)),
        None => Err(Error::Shape {
            what: "the end of a token range",
            got: tokens.end.into(),
            cure: "must not be before its start",
        }),
    }
}

/// # Errors
/// [`Error::DtypeUnsupported`] for FP8.
pub(crate) fn wide(what: &'static str, got: Dtype) -> Result<()> {
    if got.is_fp8() {
        return Err(Error::DtypeUnsupported { what, got, cure: "use f32, f16 or bf16" });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_inside_of_their_rows() {
        let q = View { offset: 8, ..View::dense((), 16, 192) };
        let part = |view: View<()>, columns| {
            view.columns(columns).map(|part| (part.offset, part.token_stride, part.head_stride))
        };
        assert_eq!(part(q, 0..128), Ok((8, 16 * 192, 192)));
        assert_eq!(part(q, 128..192), Ok((136, 16 * 192, 192)));
        assert_eq!(part(q, 192..192), Ok((200, 16 * 192, 192)));
        // By head: a row ends where the next token's begins.
        let by_head = View { token_stride: 192, head_stride: 192 * 5, ..q };
        assert_eq!(part(by_head, 128..192), Ok((136, 192, 960)));
        // All heads share a row.
        let shared = View { token_stride: 576, head_stride: 0, ..q };
        assert_eq!(part(shared, 512..576), Ok((520, 576, 0)));
        #[allow(clippy::reversed_empty_ranges)]
        for (view, columns) in
            [(q, 128..193), (q, 8..0), (by_head, 0..200), (shared, 512..577), (q, 0..u32::MAX)]
        {
            let error = part(view, columns).expect_err("refused");
            assert!(matches!(error, Error::Shape { what: "the end of columns", .. }), "{error}");
        }
    }

    #[test]
    fn rows_of_one_dimension_lie_inside_of_the_next() {
        for (dims, overlaps) in [
            ([(4, 8), (2, 4), (3, 32)], false),
            ([(3, 32), (4, 8), (2, 4)], false),
            ([(4, 8), (2, 4), (3, 31)], true),
            ([(4, 7), (2, 4), (3, 32)], true),
            ([(4, 8), (2, 3), (3, 32)], true),
            ([(4, 0), (2, 4), (3, 32)], true),
            ([(1, 0), (1, 0), (1, 0)], false),
            ([(0, 0), (2, 0), (3, 0)], false),
        ] {
            assert_eq!(nested(dims, 4).is_some(), overlaps, "{dims:?}");
        }
    }
}
