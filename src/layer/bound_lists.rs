//! One layer's selection, bound to the ops of lists.

use super::names::{self, named};
use super::selects::{Indexer, Lists};
use super::{LayerCapacity, MlaLayer, MlaLayerArgs, OwnSelection, Selection, aliases};
use crate::base::error::{Error, Result};
use crate::cache::decode_spec::MlaDecode;
use crate::ops::composes::Composes;
use crate::ops::op::Binding;
use crate::ops::{
    IndexerAppend, IndexerAppendArgs, IndexerLogits, IndexerLogitsArgs, IndexerLogitsExtent, IndexerQuery,
    IndexerQueryArgs, Indices, MlaDecodeArgs, RopeAppendExtent, TopK, TopKArgs, TopKExtent,
};
use crate::plan::check_slabs;

/// One layer's buffers, bound to the ops of lists.
#[derive(Debug)]
pub(super) struct BoundLists<D: Composes> {
    pub(super) decode: Binding<MlaDecode, D>,
    /// `None` where the list is another layer's.
    pub(super) indexer: Option<BoundIndexer<D>>,
}

#[derive(Debug)]
pub(super) struct BoundIndexer<D: Composes> {
    pub(super) append: Binding<IndexerAppend, D>,
    pub(super) query: Binding<IndexerQuery, D>,
    pub(super) logits: Binding<IndexerLogits, D>,
    pub(super) top_k: Binding<TopK, D>,
}

/// What is needed to bind a layer's selection.
pub(super) struct BindLists<'a, D: Composes> {
    pub(super) spec: &'a MlaLayer,
    /// `None` for a layer without lists.
    pub(super) ops: Option<&'a Lists<D>>,
    pub(super) args: &'a MlaLayerArgs<&'a D::Buffer>,
    pub(super) room: LayerCapacity,
    pub(super) slab_pages: u32,
    /// i32 `[T]`: positions and lengths that no op reads, as steps have their own.
    pub(super) unread: &'a D::Buffer,
}

impl<'a, D: Composes> BindLists<'a, D> {
    /// `decode`: the layer's decode in absorbed form, over a list.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`] for a selection that the layer was not compiled for, [`Error::Aliased`], and the errors of the ops.
    pub(super) fn all(
        &self,
        decode: impl FnOnce(Indices<&'a D::Buffer>) -> MlaDecodeArgs<&'a D::Buffer>,
    ) -> Result<Option<BoundLists<D>>> {
        let selection = &self.args.selection;
        let refuse = |detail| Err(Error::LayoutMismatch { detail });
        let Some(list) = selection.list() else { return Ok(None) };
        let Some(ops) = self.ops else {
            return refuse(
                "Selection::Own and Selection::Shared need a layer compiled with LayerOptions::topk",
            );
        };
        let indexer = match (selection, &ops.indexer) {
            (Selection::Own(own), Some(indexer)) => Some(self.indexer(indexer, own)?),
            (Selection::Own(_), None) => {
                return refuse("Selection::Own needs a layer compiled with LayerOptions::indexer");
            }
            _ => None,
        };
        aliases::check_selection(self.spec, self.args, self.room, ops)?;
        let indices = Indices { slots: *list, topk_length: None };
        let decode =
            ops.decode.bind(&decode(indices), self.room.decode_tokens).map_err(named(names::LISTED))?;
        Ok(Some(BoundLists { decode, indexer }))
    }

    fn indexer(&self, ops: &Indexer<D>, own: &OwnSelection<&D::Buffer>) -> Result<BoundIndexer<D>> {
        let LayerCapacity { tokens, decode_tokens, .. } = self.room;
        let named = || named(names::SELECTION);
        // The slabs of both caches have the same pages, as one block table names them.
        check_slabs(self.slab_pages, own.cache.slabs.slab_pages())?;
        let OwnSelection { cos_sin, max_position, .. } = *own;
        let positions = self.unread;
        let append = IndexerAppendArgs {
            k: own.k,
            norm_weight: own.norm_weight,
            norm_bias: own.norm_bias,
            norm_eps: own.norm_eps,
            positions,
            cos_sin,
            max_position,
            cache: own.cache.clone(),
        };
        let query = IndexerQueryArgs {
            q: own.q,
            weights: own.weights,
            q_out: ops.q(),
            weights_out: ops.weights(),
            positions,
            cos_sin,
            max_position,
            weight_scale: own.weight_scale,
        };
        let (rows, columns) = (ops.scores.rows, ops.scores.max_seq_len);
        let logits = IndexerLogitsArgs {
            q: ops.q(),
            weights: ops.weights(),
            cache: own.cache.clone(),
            logits: ops.logits(),
        };
        let top_k = TopKArgs {
            logits: ops.logits(),
            columns,
            lengths: positions,
            indices: own.indices,
            values: None,
        };
        Ok(BoundIndexer {
            append: ops.append.bind(&append, RopeAppendExtent::of(tokens)).map_err(named())?,
            query: ops.query.bind(&query, RopeAppendExtent::of(decode_tokens)).map_err(named())?,
            logits: ops
                .logits
                .bind(&logits, IndexerLogitsExtent { tokens: decode_tokens, rows, columns })
                .map_err(named())?,
            top_k: ops
                .top_k
                .bind(&top_k, TopKExtent { rows, columns, out_rows: decode_tokens })
                .map_err(named())?,
        })
    }
}
