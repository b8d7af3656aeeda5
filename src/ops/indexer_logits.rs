//! `indexer_logits`: the scores by which a lightning indexer chooses the tokens of a sparse attention. Arguments and checks.

pub(crate) mod runs;

use std::ops::Range;

use super::features::Asks;
use super::indexer::{INDEX_SHAPE, IndexFormat, IndexSpec, check_index_heads};
use super::op::{Op, Use};
use super::samples::pairs;
use super::variants::OpOptions;
use crate::base::dtype::Dtype;
use crate::base::error::Result;
use crate::base::mask::Mask;
use crate::base::view::View;
use crate::cache::{INDEX_DIM, KvLayout, KvView};
use crate::plan::tables::PageTable;

/// The logits of a lightning indexer, over the index keys of a paged cache: DeepGEMM's `fp8_paged_mqa_logits`.
///
/// ```text
/// logits[t][j] = k_scale[j] * sum over heads h of weights[t][h] * relu(q[t][h] . k[j])
/// ```
///
/// Arguments of a layer: [`IndexerLogitsArgs`]. Input of a step: an [`IndexerLogitsBatch`]. `prepare` refuses one with [`Error::Length`],
/// [`Error::QueryStartLoc`], [`Error::SeqLen`], [`Error::PageOutOfRange`], [`Error::OtherSpec`], [`Error::KvIndptr`], [`Error::Shape`] for
/// tokens that are not in the batch, [`Error::Limit`], [`Error::OutOfMemory`], and [`Error::LayoutMismatch`] for [`PageTable::Device`] and
/// [`PageTable::Indices`].
///
/// Room of a binding: an [`IndexerLogitsExtent`]. Capacity of a step: an [`IndexerLogitsCapacity`].
///
/// Dot products and their sum are f32, within 3e-5 of `k_scale sum_h |w_h| sum_d |q_hd k_d|`. e4m3 queries are codes as they are: their
/// scale is in the weights, as [`IndexerQuery`](crate::IndexerQuery) leaves it. A NaN in a key gives NaN in the logits of that key and in
/// no other.
///
/// [`Error::Length`]: crate::Error::Length
/// [`Error::QueryStartLoc`]: crate::Error::QueryStartLoc
/// [`Error::SeqLen`]: crate::Error::SeqLen
/// [`Error::PageOutOfRange`]: crate::Error::PageOutOfRange
/// [`Error::OtherSpec`]: crate::Error::OtherSpec
/// [`Error::KvIndptr`]: crate::Error::KvIndptr
/// [`Error::Shape`]: crate::Error::Shape
/// [`Error::Limit`]: crate::Error::Limit
/// [`Error::OutOfMemory`]: crate::Error::OutOfMemory
/// [`Error::LayoutMismatch`]: crate::Error::LayoutMismatch
///
/// ```
/// use wgpu_mla::{Device, Dtype, IndexFormat, IndexSpec, IndexerLogits, IndexerLogitsArgs, IndexerLogitsBatch};
/// use wgpu_mla::{Mask, PageTable, View, cpu::Cpu};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// let format = IndexFormat { dtype: Dtype::F32, rope: None, hadamard: false, ue8m0: false };
/// let index = IndexSpec { format, page_size: 2, num_pages: 2 };
/// let spec = IndexerLogits { index, num_heads: 1, query: Dtype::F32 };
/// let cpu = Cpu::new();
/// let (q, weights, logits) = (cpu.buffer(128 * 4)?, cpu.buffer(4)?, cpu.buffer(4 * 4)?);
/// let cache = cpu.buffer(index.cache_bytes())?;
/// let by_slot = [[-1.0; 128], [1.0; 128], [2.0; 128], [3.0; 128]].concat();
/// cpu.upload(&cache, 0, &Dtype::F32.encode_all(&by_slot))?;
/// cpu.upload(&q, 0, &Dtype::F32.encode_all(&[0.5; 128]))?;
/// cpu.upload(&weights, 0, &Dtype::F32.encode_all(&[-1.0]))?;
///
/// // The sequence has pages 1 and 0: its three tokens are in slots 2, 3 and 0. The last logit is relu(-64); its row is filled to 4.
/// let pages = PageTable::Dense { block_table: &[1, 0], max_pages: 2 };
/// let (seq_lens, query_start_loc, mask) = (&[3], &[0, 1], Mask::Causal);
/// let batch = IndexerLogitsBatch { pages, seq_lens, query_start_loc, mask, tokens: 0..1, fill: 4 };
/// let layer = IndexerLogitsArgs {
///     q: View::dense(&q, 1, 128),
///     weights: View::dense(&weights, 1, 1),
///     cache: index.view(&cache),
///     logits: View::dense(&logits, 1, 4),
/// };
/// cpu.once(spec, batch, &layer)?;
/// let logits = Dtype::F32.decode_all(&cpu.download(&logits, 4 * 4)?);
/// assert_eq!(logits, [-128.0, -192.0, 0.0, f32::NEG_INFINITY]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IndexerLogits {
    /// The cache of index keys.
    pub index: IndexSpec,
    /// Index heads: 1 to 64.
    pub num_heads: u32,
    /// Dtype of the queries: any, whatever the cache's is.
    pub query: Dtype,
}

/// One layer of an [`IndexerLogits`]: queries, keys, and where the logits go. `T` query tokens, `Hi` index heads.
#[derive(Debug, Clone)]
pub struct IndexerLogitsArgs<B> {
    /// `[T, Hi, 128]`. Offset and strides are multiples of 8 elements.
    pub q: View<B>,
    /// f32 `[T, Hi]`, of either sign; the factor of each head's relu.
    pub weights: View<B>,
    /// The cache, as [`IndexSpec::view`] gives it.
    pub cache: KvView<B>,
    /// f32 `[rows, columns]`: row `r` is that of query token `tokens.start + r`, column `j` that of token `j` of its sequence.
    /// `token_stride` lies between rows, `head_stride` is unread. What a step does not see or fill is left as it is.
    pub logits: View<B>,
}

/// What a step of an [`IndexerLogits`] scores.
#[derive(Debug, Clone)]
pub struct IndexerLogitsBatch<'a> {
    /// The pages of each sequence, from the host: not [`PageTable::Device`].
    pub pages: PageTable<'a>,
    /// Tokens of each sequence in the cache, this step's new tokens included.
    pub seq_lens: &'a [i32],
    /// Where the query tokens of each sequence begin; one entry more than sequences.
    pub query_start_loc: &'a [i32],
    /// Which keys a query token sees: those get a logit.
    pub mask: Mask<'a>,
    /// The query tokens that are scored, such as a part of a long prompt: row 0 of the logits is the first of them.
    pub tokens: Range<u32>,
    /// Each row gets -inf (bits `0xFF800000`) from the end of what it sees up to this column; with 0 nothing is written there.
    pub fill: u32,
}

/// How far a step of an [`IndexerLogits`] reaches, or a binding has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IndexerLogitsExtent {
    /// Query tokens of `q` and `weights`: one past the last that is scored.
    pub tokens: u32,
    /// Rows of the logits.
    pub rows: u32,
    /// Columns of the logits: the most keys that a row sees, or `fill`.
    pub columns: u32,
}

/// What a step of an [`IndexerLogits`] holds without new memory; [`Step::capacity`](crate::Step::capacity) tells what a batch took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IndexerLogitsCapacity {
    /// Runs of keys of a row, each the work of a workgroup: as many as fill the device, or a few more than rows.
    pub runs: u32,
    /// Pages of all sequences.
    pub pages: u32,
}

impl Asks for IndexerLogits {}

impl IndexerLogits {
    /// Bytes of a query element and of a key's.
    pub(crate) const fn key(&self) -> Dtype {
        self.index.format.dtype
    }
}

impl Op for IndexerLogits {
    const NAME: &'static str = "indexer_logits";
    type Options = OpOptions;
    type Facts = ();
    type Input<'a> = IndexerLogitsBatch<'a>;
    type Args<B> = IndexerLogitsArgs<B>;
    type Extent = IndexerLogitsExtent;
    type Capacity = IndexerLogitsCapacity;

    fn samples() -> Vec<Self> {
        let dtypes = pairs(&Dtype::ALL, &Dtype::ALL, |key, query| (key, query));
        pairs(&dtypes, &[64, 32], |(dtype, query), num_heads| {
            let format = IndexFormat { dtype, ..IndexFormat::DEEPSEEK_V32 };
            IndexerLogits { index: IndexSpec { format, page_size: 64, num_pages: 64 }, num_heads, query }
        })
    }

    fn check(&self) -> Result<()> {
        self.index.check()?;
        check_index_heads(self.num_heads)
    }

    fn kv_layout(&self) -> Option<KvLayout> {
        Some(self.index.kv().layout)
    }

    fn map<'a, B: 'a, C>(
        &self,
        args: &'a IndexerLogitsArgs<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<IndexerLogitsArgs<C>> {
        Ok(IndexerLogitsArgs {
            q: args.q.map(|buffer| f(Use::Read("q"), buffer))?,
            weights: args.weights.map(|buffer| f(Use::Read("weights"), buffer))?,
            cache: args.cache.map(|buffer| f(Use::Read("kv"), buffer))?,
            logits: args.logits.map(|buffer| f(Use::Write("logits"), buffer))?,
        })
    }

    fn check_args<B>(
        &self,
        args: &IndexerLogitsArgs<&B>,
        room: IndexerLogitsExtent,
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        let IndexerLogitsExtent { tokens, rows, columns } = room;
        let (heads, bytes) = (self.num_heads, self.query.bytes());
        args.q.check("q", [tokens, heads, INDEX_DIM], bytes, 8, size(args.q.buffer))?;
        args.weights.check("weights", [tokens, heads, 1], 4, 1, size(args.weights.buffer))?;
        args.cache.check(&self.index.kv(), &INDEX_SHAPE, size)?;
        args.logits.check("logits", [rows, 1, columns], 4, 1, size(args.logits.buffer))
    }

    fn each_slab<B: Copy>(&self, args: &IndexerLogitsArgs<B>) -> Vec<IndexerLogitsArgs<B>> {
        args.cache.each_slab().map(|cache| IndexerLogitsArgs { cache, ..*args }).collect()
    }

    fn fits(used: IndexerLogitsExtent, room: IndexerLogitsExtent) -> Result<(), &'static str> {
        if used.tokens > room.tokens || used.rows > room.rows || used.columns > room.columns {
            return Err("the step reaches further than the binding's query tokens, rows or columns");
        }
        Ok(())
    }
}
