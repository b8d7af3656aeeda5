//! A layer's buffers, checked and held.

use crate::base::view::View;
use crate::cache::decode_spec::MlaDecode;
use crate::cache::{KvSpec, KvView, MlaShape};
use crate::cpu::buffer::{Access, Buffer, Locked, lock};
use crate::ops::{Indices, MlaDecodeArgs};

/// A layer of a model, checked: its buffers, strides and scales. It keeps the buffers alive.
#[derive(Debug)]
pub struct Bound {
    buffers: [Buffer; 7],
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
    /// Where lists of slots are; `None` for a dense decode.
    pub(super) lists: Option<Lists>,
    /// A sink a head, as base-2 logits; empty where there are none.
    pub(super) sinks: Vec<f32>,
}

/// Where lists of slots are, and which slots a layer's cache has.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lists {
    pub(super) slots: Rows,
    pub(super) lengths: Option<Rows>,
    pub(super) first_slot: u32,
    pub(super) num_slots: u32,
}

/// Where the rows of a `[tokens, heads, dim]` array are, in elements.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Rows {
    offset: usize,
    token_stride: usize,
    head_stride: usize,
}

impl Rows {
    pub(in crate::cpu) fn of<B>(view: &View<B>) -> Self {
        Self {
            offset: view.offset as usize,
            token_stride: view.token_stride as usize,
            head_stride: view.head_stride as usize,
        }
    }

    pub(in crate::cpu) fn at(&self, token: usize, head: usize) -> usize {
        self.offset + token * self.token_stride + head * self.head_stride
    }
}

/// Where the pages of a layer are, in bytes.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Pages {
    base: usize,
    block_stride: usize,
    page_size: usize,
    token_bytes: usize,
}

impl Pages {
    pub(in crate::cpu) fn of<B>(view: &KvView<B>, kv: &KvSpec, shape: &MlaShape) -> Self {
        Self {
            base: view.base() as usize,
            block_stride: view.block_stride as usize,
            page_size: kv.page_size as usize,
            token_bytes: kv.token(shape).bytes as usize,
        }
    }

    /// The first byte of a token in a page.
    pub(in crate::cpu) fn at(&self, page: usize, token: usize) -> usize {
        self.base + page * self.block_stride + token * self.token_bytes
    }

    /// The first byte of a slot: `page * page_size + token`.
    pub(in crate::cpu) fn slot(&self, slot: usize) -> usize {
        self.at(slot / self.page_size, slot % self.page_size)
    }
}

/// The arguments of a decode, in the order in which they are locked.
pub(super) const Q_NOPE: usize = 0;
pub(super) const Q_PE: usize = 1;
pub(super) const KV: usize = 2;
pub(super) const OUT: usize = 3;
pub(super) const LSE: usize = 4;
pub(super) const INDICES: usize = 5;
pub(super) const TOPK_LENGTH: usize = 6;

impl Bound {
    pub(super) fn new(spec: &MlaDecode, layer: &MlaDecodeArgs<&Buffer>) -> Self {
        let [q_nope, q_pe] = layer.query_parts(spec);
        let (out, lse) = (layer.out, layer.lse);
        let (logit_scale, out_scale, lse_scale) = layer.kernel_scales();
        let indices = layer.indices.as_ref();
        // Where there are no lists the query, which is locked anyway, stands in for them.
        let slots = indices.map_or(q_nope.buffer, |lists| lists.slots.buffer);
        let lengths = indices.and_then(|lists| lists.topk_length).map_or(slots, |view| view.buffer);
        let buffers = [q_nope.buffer, q_pe.buffer, layer.kv.buffer, out.buffer, lse.buffer, slots, lengths];
        let lists = |Indices { slots, topk_length }: &Indices<&Buffer>| {
            let (first_slot, num_slots) = layer.kv.slots(&spec.kv);
            Lists {
                slots: Rows::of(slots),
                lengths: topk_length.as_ref().map(Rows::of),
                first_slot,
                num_slots,
            }
        };
        let sinks = layer.attn_sink.iter().flatten();
        Self {
            buffers: buffers.map(Buffer::clone),
            q_nope: Rows::of(&q_nope),
            q_pe: Rows::of(&q_pe),
            kv: Pages::of(&layer.kv, &spec.kv, &spec.shape),
            out: Rows::of(&out),
            lse: Rows::of(&lse),
            logit_scale,
            out_scale,
            lse_scale,
            lists: indices.map(lists),
            sinks: sinks.map(|sink| sink * std::f32::consts::LOG2_E).collect(),
        }
    }

    pub(super) fn lock(&self) -> Locked<'_, 7> {
        let [q_nope, q_pe, kv, out, lse, slots, lengths] = &self.buffers;
        let (read, write) = (Access::Read, Access::Write);
        let lists = [(slots, read), (lengths, read)];
        lock([(q_nope, read), (q_pe, read), (kv, read), (out, write), (lse, write), lists[0], lists[1]])
    }
}
