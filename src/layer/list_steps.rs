//! A step's tables for lists: those of each of their ops.

use std::ops::Range;

use super::batch::LayerBatch;
use super::lists::ListPlan;
use super::selects::{Indexer, Lists};
use super::{LayerCapacity, LayerPlan};
use crate::base::error::Result;
use crate::base::mask::Mask;
use crate::base::memory::collected;
use crate::cache::decode_spec::MlaDecode;
use crate::ops::composes::Composes;
use crate::ops::op::{Kernel, Step};
use crate::ops::{
    IndexerAppend, IndexerLogits, IndexerLogitsBatch, IndexerQuery, IndexerQueryBatch, RopeAppendBatch, TopK,
    TopKBatch, TopKPages,
};
use crate::plan::tables::{Capacity, PageTable};

/// The tables of lists.
#[derive(Debug)]
pub(super) struct ListsStep<D: Composes> {
    pub(super) decode: Step<MlaDecode, D>,
    pub(super) indexer: Option<IndexerStep<D>>,
}

#[derive(Debug)]
pub(super) struct IndexerStep<D: Composes> {
    pub(super) append: Step<IndexerAppend, D>,
    pub(super) query: Step<IndexerQuery, D>,
    /// One for each round; an earlier step may have left more.
    pub(super) rounds: Vec<(Step<IndexerLogits, D>, Step<TopK, D>)>,
}

impl<D: Composes> ListsStep<D> {
    pub(super) fn new(lists: &Lists<D>, decode: Capacity, capacity: &LayerCapacity) -> Result<Self> {
        let of = |indexer: &Indexer<D>| {
            let append = indexer.append.step(capacity.tokens)?;
            Ok(IndexerStep { append, query: indexer.query.step(capacity.decode_tokens)?, rounds: Vec::new() })
        };
        Ok(Self { decode: lists.decode.step(decode)?, indexer: lists.indexer.as_ref().map(of).transpose()? })
    }

    pub(super) fn prepare(
        &mut self,
        lists: &Lists<D>,
        plan: &LayerPlan,
        batch: &LayerBatch<'_>,
    ) -> Result<()> {
        let LayerPlan { lists: listed, positions, .. } = plan;
        if let (Some(indexer), Some(step)) = (&lists.indexer, &mut self.indexer) {
            step.prepare(indexer, listed, positions, batch)?;
        }
        if listed.tokens.is_empty() {
            return Ok(());
        }
        lists.decode.prepare(&mut self.decode, (&listed.decode, PageTable::Indices))
    }

    /// What recorded commands depend on: see [`super::steps::Steps`].
    pub(super) fn note_shape(&self, plan: &ListPlan, shape: &mut Vec<u64>) {
        if let Some(IndexerStep { append, query, rounds }) = &self.indexer {
            let rounds = &rounds[..plan.rounds.len()];
            shape.extend([append.capacity().into(), query.capacity().into(), rounds.len() as u64]);
            for (logits, top_k) in rounds {
                let (scored, chosen) = (logits.capacity(), top_k.capacity());
                shape.extend([scored.runs, scored.pages, chosen.rows, chosen.pages].map(u64::from));
            }
        }
        shape.push(u64::from(!plan.tokens.is_empty()));
        if !plan.tokens.is_empty() {
            shape.extend(decode_words(&self.decode));
        }
    }
}

impl<D: Composes> IndexerStep<D> {
    fn prepare(
        &mut self,
        ops: &Indexer<D>,
        plan: &ListPlan,
        positions: &[i32],
        batch: &LayerBatch<'_>,
    ) -> Result<()> {
        let &LayerBatch { slot_mapping, pages, seq_lens, query_start_loc, .. } = batch;
        ops.append.prepare(&mut self.append, RopeAppendBatch { slot_mapping, positions: Some(positions) })?;
        if plan.rounds.is_empty() {
            return Ok(());
        }
        let of = |tokens: &Range<u32>| &positions[tokens.start as usize..tokens.end as usize];
        let scored = plan.scored();
        let query = IndexerQueryBatch { positions: Some(of(&scored)), tokens: scored };
        ops.query.prepare(&mut self.query, query)?;
        while self.rounds.len() < plan.rounds.len() {
            self.rounds.push((ops.logits.step(Default::default())?, ops.top_k.step(Default::default())?));
        }
        for ((logits, top_k), tokens) in self.rounds.iter_mut().zip(&plan.rounds) {
            let mask = Mask::Causal;
            let scores = IndexerLogitsBatch {
                pages,
                seq_lens,
                query_start_loc,
                mask,
                tokens: tokens.clone(),
                fill: 0,
            };
            ops.logits.prepare(logits, scores)?;
            // What a token sees ends with itself.
            let lengths = of(tokens).iter().map(|&position| position + 1);
            let lengths = collected(lengths, tokens.len(), "lengths of a layer's lists")?;
            let pages = TopKPages { pages, query_start_loc, first_token: tokens.start };
            let rows = TopKBatch {
                rows: tokens.end - tokens.start,
                lengths: Some(&lengths),
                pages: Some(pages),
                out_row: tokens.start,
            };
            ops.top_k.prepare(top_k, rows)?;
        }
        Ok(())
    }
}

/// What recorded commands of a decode depend on.
pub(super) fn decode_words<D: Composes>(step: &Step<MlaDecode, D>) -> [u64; 7] {
    let Capacity { items, queries, pages, merges, merge_partials, partials } = step.capacity();
    let [items, queries, pages, merges, merge_partials, partials] =
        [items, queries, pages, merges, merge_partials, partials].map(u64::from);
    let key = <D as Kernel<MlaDecode>>::recording_key(&step.raw);
    [items, queries, pages, merges, merge_partials, partials, key]
}
