//! One layer's selection, bound to the ops of lists.

use super::bound::Bind;
use super::names::{self, named};
use super::selects::{BoundIndexer, BoundLists, Indexer};
use super::{LayerCapacity, OwnSelection, Selection, aliases};
use crate::base::error::{Error, Result};
use crate::ops::composes::Composes;
use crate::ops::{
    IndexerAppendArgs, IndexerLogitsArgs, IndexerLogitsExtent, IndexerQueryArgs, Indices, RopeAppendExtent,
    TopKArgs, TopKExtent,
};
use crate::plan::check_slabs;

impl<D: Composes> Bind<'_, D> {
    /// # Errors
    /// [`Error::LayoutMismatch`] for a selection that the layer was not compiled for, [`Error::Aliased`], and the errors of the ops.
    pub(super) fn lists(&self) -> Result<Option<BoundLists<D>>> {
        let (ops, selection) = (&self.ops.lists, &self.args.selection);
        let refuse = |detail| Err(Error::LayoutMismatch { detail });
        let Some(list) = selection.list() else { return Ok(None) };
        let Some(ops) = ops else {
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
        aliases::check_selection(self, ops)?;
        let indices = Some(Indices { slots: *list, topk_length: None });
        let decode = ops
            .decode
            .bind(&self.decode_args(indices), self.room.decode_tokens)
            .map_err(named(names::LISTED))?;
        Ok(Some(BoundLists { decode, indexer }))
    }

    fn indexer(&self, ops: &Indexer<D>, own: &OwnSelection<&D::Buffer>) -> Result<BoundIndexer<D>> {
        let LayerCapacity { tokens, decode_tokens, .. } = self.room;
        let named = || named(names::SELECTION);
        // The slabs of both caches have the same pages, as one block table names them.
        check_slabs(self.ops.slab_pages, own.cache.slabs.slab_pages())?;
        let OwnSelection { cos_sin, max_position, .. } = *own;
        // Steps have positions of their own.
        let positions = &self.ops.space.positions;
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
        // Steps have lengths of their own too.
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
