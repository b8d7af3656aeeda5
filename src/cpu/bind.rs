//! A layer's buffers, checked and held.

use super::buffer::{Access, Buffer, Locked, lock};
use crate::layer::{Layer, View, kernel_scales, no_aliases};
use crate::{Error, MlaSpec, Result};

/// A layer of a model, checked: its buffers, strides and scales. It keeps the buffers alive.
#[derive(Debug)]
pub struct Binding {
    pub(super) spec: MlaSpec,
    pub(super) max_queries: u32,
    buffers: [Buffer; 5],
    pub(super) q_nope: Rows,
    pub(super) q_pe: Rows,
    pub(super) kv: Pages,
    pub(super) out: Rows,
    pub(super) lse: Rows,
    /// Dot products to logits in base 2.
    pub(super) logit_scale: f32,
    /// Latent to output.
    pub(super) out_scale: f32,
    /// Base-2 LSE to the one that is wanted.
    pub(super) lse_scale: f32,
}

/// Where the rows of a `[tokens, heads, dim]` array are, in elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    offset: usize,
    token_stride: usize,
    head_stride: usize,
}

impl Rows {
    pub(super) fn of(view: &View<&Buffer>) -> Self {
        Self {
            offset: view.offset as usize,
            token_stride: view.token_stride as usize,
            head_stride: view.head_stride as usize,
        }
    }

    pub(super) fn at(&self, token: usize, head: usize) -> usize {
        self.offset + token * self.token_stride + head * self.head_stride
    }
}

/// Where the pages of a layer are, in elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pages {
    base: usize,
    block_stride: usize,
    page_size: usize,
    row_elems: usize,
}

impl Pages {
    pub(super) fn of(view: &crate::KvView<&Buffer>, page_size: u32, row_elems: u32) -> Self {
        Self {
            base: view.base() as usize,
            block_stride: view.block_stride as usize,
            page_size: page_size as usize,
            row_elems: row_elems as usize,
        }
    }

    /// The row of a token in a page.
    pub(super) fn at(&self, page: usize, token: usize) -> usize {
        self.base + page * self.block_stride + token * self.row_elems
    }

    /// The row of a slot: `page * page_size + token`.
    pub(super) fn slot(&self, slot: usize) -> usize {
        self.at(slot / self.page_size, slot % self.page_size)
    }
}

/// The arguments of a decode, in the order in which they are locked.
pub(super) const Q_NOPE: usize = 0;
pub(super) const Q_PE: usize = 1;
pub(super) const KV: usize = 2;
pub(super) const OUT: usize = 3;
pub(super) const LSE: usize = 4;

impl Binding {
    pub(super) fn new(spec: &MlaSpec, max_queries: u32, layer: &Layer<&Buffer>) -> Result<Self> {
        layer.check(spec, max_queries, Buffer::bytes)?;
        let (q_nope, mut q_pe) = layer.query.parts(spec.shape.kv_lora_rank);
        if spec.shape.qk_rope_head_dim == 0 {
            q_pe = q_nope;
        }
        let (out, lse) = (layer.out, layer.lse);
        let inputs = [("q_nope", q_nope.buffer), ("q_pe", q_pe.buffer), ("kv", layer.kv.buffer)];
        no_aliases(&inputs, &[("out", out.buffer), ("lse", lse.buffer)], Buffer::same_as)?;

        let (tokens, heads) = (u64::from(max_queries), u64::from(spec.shape.num_heads));
        let bytes = |view: &View<&Buffer>, dim: u32, element: u64| {
            view.offset * element..view.end(tokens, heads, dim.into()) * element
        };
        let (a, b) = (bytes(&out, spec.shape.kv_lora_rank, spec.out.bytes() as u64), bytes(&lse, 1, 4));
        if out.buffer.same_as(lse.buffer) && a.start < b.end && b.start < a.end {
            return Err(Error::Aliased { a: "out", b: "lse" });
        }
        let (logit_scale, out_scale, lse_scale) = kernel_scales(layer);
        let buffers = [q_nope.buffer, q_pe.buffer, layer.kv.buffer, out.buffer, lse.buffer];
        Ok(Self {
            spec: *spec,
            max_queries,
            buffers: buffers.map(Buffer::clone),
            q_nope: Rows::of(&q_nope),
            q_pe: Rows::of(&q_pe),
            kv: Pages::of(&layer.kv, spec.kv.page_size, spec.shape.row_elems()),
            out: Rows::of(&out),
            lse: Rows::of(&lse),
            logit_scale,
            out_scale,
            lse_scale,
        })
    }

    pub(super) fn lock(&self) -> Locked<'_, 5> {
        let [q_nope, q_pe, kv, out, lse] = &self.buffers;
        let (read, write) = (Access::Read, Access::Write);
        lock([(q_nope, read), (q_pe, read), (kv, read), (out, write), (lse, write)])
    }
}
