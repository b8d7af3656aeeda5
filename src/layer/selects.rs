//! The ops of a layer with lists: the sparse decode, and the indexer by which a layer makes lists of its own.

use super::batch::LayerBatch;
use super::each::Visit;
use super::lists::{ListPlan, Listing, Scores};
use super::steps::decode_words;
use super::{LayerCapacity, LayerIndexer, LayerOptions, LayerPlan, MlaLayer};
use crate::base::error::{Error, Result};
use crate::base::mask::Mask;
use crate::base::view::View;
use crate::cache::INDEX_DIM;
use crate::cache::decode_spec::MlaDecode;
use crate::ops::composes::Composes;
use crate::ops::op::{Binding, Compiled, Op, Step};
use crate::ops::{
    DecodeOptions, IndexerAppend, IndexerLogits, IndexerLogitsBatch, IndexerQuery, IndexerQueryBatch,
    MOST_COLUMNS, RopeAppendBatch, TopK, TopKBatch, TopKPages, TopKSlots,
};
use crate::plan::tables::{Capacity, PageTable};

/// The ops of lists.
#[derive(Debug)]
pub(super) struct Lists<D: Composes> {
    pub(super) decode: Compiled<MlaDecode, D>,
    pub(super) topk: u32,
    /// `None` where all lists are shared.
    pub(super) indexer: Option<Indexer<D>>,
}

/// The ops of an indexer, and the arrays between them.
#[derive(Debug)]
pub(super) struct Indexer<D: Composes> {
    pub(super) append: Compiled<IndexerAppend, D>,
    pub(super) query: Compiled<IndexerQuery, D>,
    pub(super) logits: Compiled<IndexerLogits, D>,
    pub(super) top_k: Compiled<TopK, D>,
    pub(super) options: LayerIndexer,
    pub(super) scores: Scores,
    /// `[D, Hi, 128]`, as they meet index keys.
    q: D::Buffer,
    /// f32 `[D, Hi]`, with the queries' scales.
    weights: D::Buffer,
    /// f32 `[rows, max_seq_len]`.
    scored: D::Buffer,
}

impl<D: Composes> Lists<D> {
    /// # Errors
    /// The errors of [`Device::compile_with`](crate::Device::compile_with) of its ops.
    pub(super) fn new(
        device: &D,
        spec: &MlaLayer,
        options: &LayerOptions,
        capacity: &LayerCapacity,
    ) -> Result<Option<Self>> {
        let LayerOptions { topk, indexer, .. } = *options;
        if topk == 0 {
            return Ok(None);
        }
        let decode = DecodeOptions {
            variant: options.variant.clone(),
            query_tokens: spec.decode_threshold,
            topk,
            ..DecodeOptions::default()
        };
        let decode = device.compile_with(spec.mla(), &decode)?;
        let indexer =
            indexer.map(|indexer| Indexer::new(device, spec, topk, indexer, capacity)).transpose()?;
        Ok(Some(Self { decode, topk, indexer }))
    }

    /// Query tokens that are scored at a time.
    pub(super) fn round_tokens(&self) -> Option<u32> {
        self.indexer.as_ref().map(|indexer| indexer.scores.rows)
    }

    pub(super) fn listing(&self) -> Listing {
        let scores = self.indexer.as_ref().map(|indexer| indexer.scores);
        Listing { topk: self.topk, tiling: self.decode.tiling(), scores }
    }
}

/// What is wrong with options, before anything is compiled.
///
/// # Errors
/// [`Error::LayoutMismatch`] for an indexer without `topk`, [`Error::Capacity`] for scores that hold no row, and the errors of its ops.
pub(super) fn check(spec: &MlaLayer, options: &LayerOptions, capacity: &LayerCapacity) -> Result<()> {
    let Some(indexer) = &options.indexer else { return Ok(()) };
    if options.topk == 0 {
        let detail = "LayerOptions::indexer makes lists of LayerOptions::topk slots: set both";
        return Err(Error::LayoutMismatch { detail });
    }
    let LayerIndexer { num_heads, input, format, .. } = *indexer;
    scores(spec, indexer, capacity)?;
    TopK { k: options.topk, slots: None }.check()?;
    IndexerAppend { index: indexer.index(spec), input }.check()?;
    IndexerQuery { format, num_heads, input }.check()
}

/// Rows of scores where [`LayerIndexer::logits_bytes`] does not say.
const USUAL_ROWS: u32 = 64;

impl<D: Composes> Indexer<D> {
    fn new(
        device: &D,
        spec: &MlaLayer,
        topk: u32,
        options: LayerIndexer,
        capacity: &LayerCapacity,
    ) -> Result<Self> {
        let (index, LayerIndexer { num_heads, input, format, .. }) = (options.index(spec), options);
        let slots = TopKSlots { page_size: spec.kv.page_size, num_pages: spec.kv.num_pages };
        let scores = scores(spec, &options, capacity)?;
        let tokens = u64::from(capacity.decode_tokens);
        let head = u64::from(num_heads) * u64::from(INDEX_DIM) * format.dtype.bytes() as u64;
        let row = u64::from(scores.max_seq_len) * 4;
        let buffer = |what: &'static str, rows: u64, bytes: u64| {
            let (need, limit) = (rows * bytes, device.largest_binding());
            if need > limit {
                let cure =
                    "compile the layer with a smaller LayerCapacity or fewer LayerIndexer::logits_bytes";
                return Err(Error::Limit { what, need, limit, cure });
            }
            device.buffer(need)
        };
        Ok(Self {
            append: device.compile(IndexerAppend { index, input })?,
            query: device.compile(IndexerQuery { format, num_heads, input })?,
            logits: device.compile(IndexerLogits { index, num_heads, query: format.dtype })?,
            top_k: device.compile(TopK { k: topk, slots: Some(slots) })?,
            q: buffer("mla.layer.index_q", tokens, head)?,
            weights: buffer("mla.layer.index_weights", tokens, u64::from(num_heads) * 4)?,
            scored: buffer("mla.layer.index_logits", scores.rows.into(), row)?,
            options,
            scores,
        })
    }

    /// `[D, Hi, 128]`.
    pub(super) fn q(&self) -> View<&D::Buffer> {
        View::dense(&self.q, self.options.num_heads, INDEX_DIM)
    }

    /// f32 `[D, Hi]`.
    pub(super) fn weights(&self) -> View<&D::Buffer> {
        View::dense(&self.weights, self.options.num_heads, 1)
    }

    /// f32 `[rows, max_seq_len]`.
    pub(super) fn logits(&self) -> View<&D::Buffer> {
        View::dense(&self.scored, 1, self.scores.max_seq_len)
    }
}

/// # Errors
/// [`Error::Capacity`] for bytes of scores that hold no row.
fn scores(spec: &MlaLayer, options: &LayerIndexer, capacity: &LayerCapacity) -> Result<Scores> {
    let slots = spec.kv.num_slots().min(u64::from(MOST_COLUMNS)) as u32;
    let max_seq_len = match options.max_seq_len {
        0 => slots,
        len => len.min(slots),
    };
    // Rows begin where wide loads may.
    let max_seq_len = max_seq_len.next_multiple_of(64);
    let row = u64::from(max_seq_len) * 4;
    let rows = match options.logits_bytes {
        0 => USUAL_ROWS,
        got if got < row => {
            let cure = "must hold the scores of a query token, f32 [max_seq_len]; 0 is 64 of them";
            return Err(Error::Capacity { what: "LayerIndexer::logits_bytes", got, need: row, cure });
        }
        bytes => (bytes / row).min(u32::MAX.into()) as u32,
    };
    Ok(Scores { rows: rows.min(capacity.decode_tokens), max_seq_len })
}

/// The tables of lists.
#[derive(Debug)]
pub(super) struct ListsStep<D: Composes> {
    pub(super) decode: Step<MlaDecode, D>,
    indexer: Option<IndexerStep<D>>,
}

#[derive(Debug)]
struct IndexerStep<D: Composes> {
    append: Step<IndexerAppend, D>,
    query: Step<IndexerQuery, D>,
    /// One for each round; an earlier step may have left more.
    rounds: Vec<(Step<IndexerLogits, D>, Step<TopK, D>)>,
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
        let of = |tokens: &std::ops::Range<u32>| &positions[tokens.start as usize..tokens.end as usize];
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
            let lengths: Vec<i32> = of(tokens).iter().map(|&position| position + 1).collect();
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

impl<D: Composes> Lists<D> {
    /// The layer's own list: index keys of all new tokens, then the lists of those that attend one.
    pub(super) fn each_of_own(
        &self,
        step: &ListsStep<D>,
        plan: &ListPlan,
        binding: &BoundLists<D>,
        visit: &mut impl Visit<D>,
    ) -> Result<()> {
        let (Some(ops), Some(step), Some(bound)) = (&self.indexer, &step.indexer, &binding.indexer) else {
            return Ok(());
        };
        visit.op(&ops.append, &step.append, &bound.append)?;
        if plan.rounds.is_empty() {
            return Ok(());
        }
        visit.op(&ops.query, &step.query, &bound.query)?;
        for (logits, top_k) in &step.rounds[..plan.rounds.len()] {
            visit.op(&ops.logits, logits, &bound.logits)?;
            visit.op(&ops.top_k, top_k, &bound.top_k)?;
        }
        Ok(())
    }
}
