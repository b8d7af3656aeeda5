//! What one layer of a model hands over: buffers, strides and scales. Generic over the backend's buffer.

use crate::{Error, MlaSpec, Result};

/// A strided view of `[tokens, heads, dim]` (or `[tokens, heads]`) elements in a buffer.
///
/// Offset and strides count elements, not bytes. Those of a query, a cache and an output must be multiples of
/// 8 elements; those of an LSE are free.
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

impl<'a, B> View<&'a B> {
    /// A dense `[tokens, heads, dim]` array that starts at the front of its buffer.
    pub fn dense(buffer: &'a B, heads: u32, dim: u32) -> Self {
        let head_stride = u64::from(dim);
        Self { buffer, offset: 0, token_stride: u64::from(heads) * head_stride, head_stride }
    }

    /// The same array without its first tokens.
    pub(crate) fn skip_tokens(&self, tokens: u32) -> Self {
        let skipped = self.token_stride.saturating_mul(tokens.into());
        Self { offset: self.offset.saturating_add(skipped), ..*self }
    }

    /// Elements from the buffer's front to the end of the view.
    pub(crate) fn end(&self, tokens: u64, heads: u64, dim: u64) -> u64 {
        if tokens == 0 || dim == 0 {
            return 0;
        }
        let last = (tokens - 1).saturating_mul(self.token_stride);
        let last = last.saturating_add((heads - 1).saturating_mul(self.head_stride));
        self.offset.saturating_add(last).saturating_add(dim)
    }
}

/// The query of a layer, already absorbed into the latent space.
#[derive(Debug, Clone, Copy)]
pub enum Query<B> {
    /// One array `[total_q, H, L + R]`.
    Whole(View<B>),
    /// Two arrays `[total_q, H, L]` and `[total_q, H, R]`, never concatenated. With `R` 0 the second is unread.
    Split {
        /// The part that meets the latent.
        q_nope: View<B>,
        /// The rotary part.
        q_pe: View<B>,
    },
}

impl<'a, B> Query<&'a B> {
    /// Both parts as views; a whole query is two views of one buffer.
    pub(crate) fn parts(&self, latent: u32) -> (View<&'a B>, View<&'a B>) {
        match *self {
            Self::Whole(q) => (q, View { offset: q.offset.saturating_add(latent.into()), ..q }),
            Self::Split { q_nope, q_pe } => (q_nope, q_pe),
        }
    }
}

/// The cache of a layer: `[num_pages, page_size, L + R]` somewhere in a buffer.
#[derive(Debug, Clone, Copy)]
pub struct KvView<B> {
    /// The buffer; it may hold the caches of many layers.
    pub buffer: B,
    /// Elements before layer 0's first page; a multiple of 8.
    pub offset: u64,
    /// Elements from a layer to the next; a multiple of 8.
    pub layer_stride: u64,
    /// This layer's index.
    pub layer: u32,
    /// Elements from a page to the next, at least `page_size * (L + R)`; a multiple of 8.
    pub block_stride: u64,
}

impl<'a, B> KvView<&'a B> {
    /// A buffer that holds one layer's pages and nothing else.
    pub fn dense(buffer: &'a B, spec: &MlaSpec) -> Self {
        let block_stride = u64::from(spec.kv.page_size) * u64::from(spec.shape.row_elems());
        Self { buffer, offset: 0, layer_stride: 0, layer: 0, block_stride }
    }

    /// Elements before this layer's first page.
    pub(crate) fn base(&self) -> u64 {
        self.offset.saturating_add(self.layer_stride.saturating_mul(self.layer.into()))
    }

    /// Elements from the buffer's front to the end of this layer's last page.
    pub(crate) fn end(&self, spec: &MlaSpec) -> u64 {
        let pages = u64::from(spec.kv.num_pages) - 1;
        let page = u64::from(spec.kv.page_size) * u64::from(spec.shape.row_elems());
        self.base().saturating_add(pages.saturating_mul(self.block_stride)).saturating_add(page)
    }

    /// # Errors
    /// [`Error::Alignment`], [`Error::Shape`] where pages would overlap, [`Error::BufferTooSmall`].
    pub(crate) fn check(&self, spec: &MlaSpec, size: u64) -> Result<()> {
        for (what, got) in [
            ("kv offset", self.offset),
            ("kv layer_stride", self.layer_stride),
            ("kv block_stride", self.block_stride),
        ] {
            aligned(what, got)?;
        }
        if self.block_stride < u64::from(spec.kv.page_size) * u64::from(spec.shape.row_elems()) {
            let got = self.block_stride;
            let cure = "must be at least page_size * (kv_lora_rank + qk_rope_head_dim) elements";
            return Err(Error::Shape { what: "kv block_stride", got, cure });
        }
        fits("kv", self.end(spec).saturating_mul(spec.kv.dtype.bytes() as u64), size)
    }
}

/// The base of the logarithm that an LSE is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LseBase {
    /// Natural logarithm, as everywhere in this crate's own ops.
    #[default]
    E,
    /// Base 2, as FlashInfer's.
    Two,
}

/// One layer of a model as a decode reads and writes it.
#[derive(Debug, Clone, Copy)]
pub struct Layer<B> {
    /// The absorbed query, `[total_q, H, L + R]` or in two parts.
    pub query: Query<B>,
    /// The paged cache.
    pub kv: KvView<B>,
    /// Output `[total_q, H, L]`.
    pub out: View<B>,
    /// Log-sum-exp of the scaled logits, f32 `[total_q, H]`; strides in f32 elements.
    pub lse: View<B>,
    /// Base of `lse`.
    pub lse_base: LseBase,
    /// Factor of the logits; see [`crate::softmax_scale`].
    pub softmax_scale: f32,
    /// Factor of every cache element; 1 unless the cache is e4m3.
    pub k_scale: f32,
    /// Factor of every query element; 1 unless the query is e4m3.
    pub q_scale: f32,
}

impl<'a, B> Layer<&'a B> {
    /// A layer whose arrays are dense, each at the front of a buffer of its own, with natural LSE and scales of 1.
    pub fn dense(spec: &MlaSpec, q: &'a B, kv: &'a B, out: &'a B, lse: &'a B, softmax_scale: f32) -> Self {
        let heads = spec.shape.num_heads;
        Self {
            query: Query::Whole(View::dense(q, heads, spec.shape.row_elems())),
            kv: KvView::dense(kv, spec),
            out: View::dense(out, heads, spec.shape.kv_lora_rank),
            lse: View::dense(lse, heads, 1),
            lse_base: LseBase::E,
            softmax_scale,
            k_scale: 1.0,
            q_scale: 1.0,
        }
    }

    /// Checks everything that does not depend on the backend, given a buffer's size in bytes.
    ///
    /// # Errors
    /// [`Error::Scale`], [`Error::Alignment`], [`Error::Shape`] and [`Error::BufferTooSmall`].
    pub(crate) fn check(&self, spec: &MlaSpec, max_queries: u32, size: impl Fn(&B) -> u64) -> Result<()> {
        for (what, got) in
            [("softmax_scale", self.softmax_scale), ("k_scale", self.k_scale), ("q_scale", self.q_scale)]
        {
            if !(got.is_finite() && got > 0.0) {
                return Err(Error::Scale { what, got });
            }
        }
        self.kv.check(spec, size(self.kv.buffer))?;

        let (heads, latent) = (u64::from(spec.shape.num_heads), u64::from(spec.shape.kv_lora_rank));
        let rope = u64::from(spec.shape.qk_rope_head_dim);
        let (q_nope, q_pe) = self.query.parts(spec.shape.kv_lora_rank);
        let tokens = u64::from(max_queries);
        let views = [
            ("q_nope", q_nope, latent, spec.query),
            ("q_pe", q_pe, rope, spec.query),
            ("out", self.out, latent, spec.out),
        ];
        for (what, view, dim, dtype) in views {
            if dim == 0 {
                continue;
            }
            for got in [view.offset, view.token_stride, view.head_stride] {
                aligned(what, got)?;
            }
            let end = view.end(tokens, heads, dim).saturating_mul(dtype.bytes() as u64);
            fits(what, end, size(view.buffer))?;
        }
        for (what, view, dim) in [("out", self.out, latent), ("lse", self.lse, 1)] {
            distinct(what, &view, tokens, heads, dim)?;
        }
        fits("lse", self.lse.end(tokens, heads, 1).saturating_mul(4), size(self.lse.buffer))
    }
}

pub(crate) fn aligned(what: &'static str, got: u64) -> Result<()> {
    if !got.is_multiple_of(8) {
        return Err(Error::Alignment { what, got, of: 8, unit: "elements" });
    }
    Ok(())
}

pub(crate) fn fits(what: &'static str, end: u64, size: u64) -> Result<()> {
    if end > size {
        return Err(Error::BufferTooSmall { what, end, size });
    }
    Ok(())
}

/// Rows that are written must not overlap, or the result would depend on timing.
///
/// # Errors
/// [`Error::Shape`].
pub(crate) fn distinct<B>(
    what: &'static str,
    view: &View<&B>,
    tokens: u64,
    heads: u64,
    dim: u64,
) -> Result<()> {
    let (t, h) = (view.token_stride, view.head_stride);
    let by_token = h >= dim && (tokens <= 1 || t >= h.saturating_mul(heads - 1).saturating_add(dim));
    let by_head = (tokens <= 1 || t >= dim)
        && (heads <= 1 || h >= t.saturating_mul(tokens.saturating_sub(1)).saturating_add(dim));
    if heads > 1 && !(by_token || by_head) || heads == 1 && tokens > 1 && t < dim {
        let cure = "token and head strides make rows overlap: nest one inside the other";
        return Err(Error::Shape { what, got: t.min(h), cure });
    }
    Ok(())
}

/// No buffer may be both read and written.
///
/// # Errors
/// [`Error::Aliased`].
pub(crate) fn no_aliases<B>(
    inputs: &[(&'static str, &B)],
    outputs: &[(&'static str, &B)],
    is_same: impl Fn(&B, &B) -> bool,
) -> Result<()> {
    for &(a, input) in inputs {
        if let Some(&(b, _)) = outputs.iter().find(|(_, output)| is_same(input, output)) {
            return Err(Error::Aliased { a, b });
        }
    }
    Ok(())
}

/// Scales as the kernels use them: `(logits to base-2 units, latent to output, base-2 LSE to its base)`.
pub(crate) fn kernel_scales<B>(layer: &Layer<&B>) -> (f32, f32, f32) {
    let logits = f64::from(layer.softmax_scale) * f64::from(layer.k_scale) * f64::from(layer.q_scale);
    let lse = match layer.lse_base {
        LseBase::E => std::f32::consts::LN_2,
        LseBase::Two => 1.0,
    };
    ((logits * std::f64::consts::LOG2_E) as f32, layer.k_scale, lse)
}
