//! The ops of a layer with lists: the sparse decode, and the indexer by which a layer makes lists of its own.

use super::lists::{Listing, Scores};
use super::{LayerCapacity, LayerIndexer, LayerOptions, MlaLayer};
use crate::base::error::{Error, Result};
use crate::base::view::View;
use crate::cache::INDEX_DIM;
use crate::cache::decode_spec::MlaDecode;
use crate::ops::composes::Composes;
use crate::ops::op::{Compiled, Op};
use crate::ops::{DecodeOptions, IndexerAppend, IndexerLogits, IndexerQuery, MOST_COLUMNS, TopK, TopKSlots};

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
