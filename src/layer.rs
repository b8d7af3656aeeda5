//! The whole attention layer: what a model's MLA layer does between its projections and `o_proj`.
//!
//! ```text
//! q [T, H, P + R], kv_c [T, L] (normed), k_pe [T, R]  ->  out [T, H, V]
//!
//! all tokens     q_pe, k_pe = rope(q_pe, k_pe); kv_cache[slot_mapping] = kv_c ++ k_pe            rope_append
//! decodes        ql = q_nope . W_UK; o = attention over the cache; out = o . W_UV                absorb, mla_decode, v_up
//! prefills       by chunks: rows = kv_cache[pages]; k, v = rows . W_UK, rows . W_UV;             kv_gather, k_up, v_up
//!                attention over k, v; merged with that of the chunks before, by LSE              mla_prefill, merge_state
//! ```
//!
//! With [`LayerOptions::topk`] longer sequences are neither decoded nor prefilled. Their query tokens attend the slots of lists, which the
//! layer makes itself or shares with another: [`Selection`].
//!
//! ```text
//! all tokens     index_cache[slot_mapping] = index keys                                                       indexer_append
//! with lists     index queries; by rounds: scores over index_cache, slots of the best               indexer_query, indexer_logits, top_k
//!                ql = q_nope . W_UK; o = attention over these slots; out = o . W_UV                       absorb, mla_decode, v_up
//! ```
//!
//! A prefix that many decodes share may be kept expanded as long as they share it: [`ExpandedPrefix`]. They then attend the prefix
//! together, as a prefill does, with its keys cut into parts; and the rest of their tokens each, in absorbed form. One merge combines all
//! partial results:
//!
//! ```text
//! decodes        sets[0] = own tokens: absorb, mla_decode, v_up; sets[1..] = the prefix                             mla_prefill
//!                out = merged by LSE                                                                              merge_states
//! ```
//!
//! Absorbed and expanded form compute the same (DeepSeek-V2, arXiv:2405.04434, section 2.1.2 and appendix C). Absorbed form reads the
//! fewest bytes for a token of the cache; expanded form takes the fewest multiplications for a query token and a key.

mod aliases;
mod arrays;
pub(crate) mod backend;
mod batch;
mod bound;
mod bound_lists;
mod composed;
mod each;
mod expanded;
mod guard;
pub(crate) mod kv_b_proj;
mod list_steps;
#[cfg(test)]
mod list_tests;
mod lists;
mod names;
mod options;
mod over_prefixes;
mod plan;
mod prefix;
mod prefix_cost;
mod range;
mod recorded;
mod rounds;
mod rows;
mod selection;
mod selects;
mod steps;
mod weights;
mod workspace;

pub use arrays::{LayerArrays, PageCopies};
pub use batch::LayerBatch;
pub use expanded::{Expanded, ExpandedPrefix};
pub use guard::{GuardPlace, LayerGuard};
pub use lists::ListPlan;
pub use options::{LayerCapacity, LayerFacts, LayerOptions};
pub use plan::{Chunk, LayerPlan, Round, Target};
pub use prefix::{ExpandBatch, MlaExpand, MlaExpandArgs};
use range::check_range;
pub use selection::{LayerIndexer, OwnSelection, Selection};

use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::view::{View, distinct, scale_of, wide};
use crate::cache::decode_spec::MlaDecode;
use crate::cache::{KvSpec, KvView, MlaShape};
use crate::ops::guard::{GuardView, map_guard};
use crate::ops::op::{Op, Use};
use crate::ops::{HeadDims, KvAppend, KvGather, MergeState, MergeStates, MlaPrefill, RopeAppend, RopeLayout};
use crate::pages::SeqId;
use crate::plan::SplitPolicy;
use crate::plan::tables::Capacity;

/// The whole attention of an MLA layer, between a model's projections and its `o_proj`: RoPE and append of the new tokens, decodes in
/// absorbed form, and prefills in chunks of the workspace, in one batch. One compiled layer serves all layers of a model.
///
/// A layer runs on one device. With [`ContextParallel`](crate::ContextParallel) a host composes a layer from the single ops, as the program
/// in `docs/using.md` does.
///
/// Arguments of a layer: [`MlaLayerArgs`]. Input of a step: a [`LayerBatch`] and a [`SplitPolicy`]. Options: [`LayerOptions`]; its
/// [`LayerOptions::capacity`] has no useful default. `prepare` refuses a step with the errors of [`LayerPlan::new`], and one past that
/// capacity with [`Error::Capacity`].
///
/// Room of a binding: a [`LayerCapacity`], at most that of the options. Capacity of a step: a [`Capacity`], that of its decode, and of its
/// decode of lists if it has one: the default leaves it to the first `prepare`.
///
/// ```
/// use wgpu_mla::*;
///
/// # fn main() -> Result<()> {
/// let spec = MlaLayer {
///     shape: MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 },
///     kv: KvSpec { layout: Dtype::F32.into(), page_size: 4, num_pages: 2 },
///     # qk_nope_head_dim: 16, v_head_dim: 24, dtype: Dtype::F32, query: Dtype::F32, weight: Dtype::F32, out: Dtype::F32,
///     # rope: RopeLayout::Interleaved, decode_threshold: 1, workspace_bytes: 1 << 16,
///     // ...
/// };
/// let cpu = cpu::Cpu::new();
/// # let array = |values: &[f32]| {
/// #     let buffer = cpu.buffer(values.len() as u64 * 4)?;
/// #     cpu.upload(&buffer, 0, &Dtype::F32.encode_all(values)).map(|()| buffer)
/// # };
/// # let (q_nope, q_pe, kv_c, k_pe) = (array(&[0.0; 16])?, array(&[0.0; 32])?, array(&[1.0; 256])?, array(&[0.0; 32])?);
/// # let (cache, out, kv_b_proj) = (array(&[0.0; 8 * 288])?, array(&[0.0; 24])?, array(&[0.5; 40 * 256])?);
/// # let cos_sin = array(&RopeFrequencies::plain(32, 1e4)?.cos_sin(8)?)?;
/// let layer = MlaLayerArgs {
///     kv_c: View::dense(&kv_c, 1, 256),
///     kv: KvView::dense(&cache, &spec.mla()),
///     out: View::dense(&out, 1, 24),
///     # q_nope: View::dense(&q_nope, 1, 16), q_pe: View::dense(&q_pe, 1, 32), k_pe: View::dense(&k_pe, 1, 32), expanded: None,
///     # kv_b_proj: &kv_b_proj, kv_b_scales: None, cos_sin: &cos_sin, max_position: 8, softmax_scale: 0.1,
///     # q_scale: 1.0, k_scale: 1.0, out_scale: 1.0,
///     # selection: Selection::All, guard: None,
///     // ...
/// };
/// // One sequence, whose first token goes to the front of page 1.
/// let pages = PageTable::Dense { block_table: &[1], max_pages: 1 };
/// let (seq_lens, query_start_loc, slot_mapping) = (&[1], &[0, 1], &[4]);
/// let batch = LayerBatch { seq_lens, query_start_loc, slot_mapping, pages, shared_prefixes: &[], expanded: &[] };
/// let capacity = LayerCapacity { tokens: 1, decode_tokens: 1, ..Default::default() };
/// let options = LayerOptions { capacity, ..Default::default() };
/// cpu.once_with(spec, &options, (&batch, SplitPolicy::Auto), &layer)?;
///
/// // It sees itself alone: out = kv_c . W_UV^T. Each element of kv_c is 1, each weight 0.5.
/// assert_eq!(Dtype::F32.decode_all(&cpu.download(&out, 24 * 4)?), [128.0; 24]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MlaLayer {
    /// Heads and the dims of the cache.
    pub shape: MlaShape,
    /// `P`, elements of a head's query that do not rotate.
    pub qk_nope_head_dim: u32,
    /// `V`, elements of a head's value.
    pub v_head_dim: u32,
    /// The paged cache.
    pub kv: KvSpec,
    /// Dtype of queries and new rows, and of everything between them and the output: f32, f16 or bf16.
    pub dtype: Dtype,
    /// Dtype of the absorbed queries that meet the cache: `dtype`, or e4m3, by which both projection and rotation end in codes with
    /// [`MlaLayerArgs::q_scale`]. Prefills keep queries of `dtype`.
    pub query: Dtype,
    /// Dtype of `kv_b_proj` as it was prepared: f32, f16 or bf16, or e4m3, whose scales are [`MlaLayerArgs::kv_b_scales`].
    pub weight: Dtype,
    /// Dtype of the output: `dtype`, or e4m3 for an `o_proj` in FP8, with [`MlaLayerArgs::out_scale`].
    pub out: Dtype,
    /// Which elements rotate together.
    pub rope: RopeLayout,
    /// Sequences of at most so many query tokens are decoded in absorbed form, the others prefilled. 1 is usual; 2 or more with
    /// speculative tokens.
    pub decode_threshold: u32,
    /// Bytes that the keys and values of prefills may take: at least [`MlaLayer::workspace_row_bytes`] times a page, or 0 for a layer that
    /// only decodes, whose `prepare` refuses longer queries. With [`SplitPolicy::FixedTokens`] a prompt's split has to fit too.
    pub workspace_bytes: u64,
}

impl MlaLayer {
    /// Bytes of one token in the workspace: its row of the cache and, for each head, its key and value. At most `u64::MAX`.
    #[must_use]
    pub const fn workspace_row_bytes(&self) -> u64 {
        let heads = self.dims().rows();
        heads.saturating_add(self.shape.row_elems() as u64).saturating_mul(self.dtype.bytes() as u64)
    }

    /// Orders a step's requests, `(sequence, new tokens)`, for a layer: decodes come first, otherwise the order is kept. Call it before
    /// [`crate::PagePool::append_batch`], and make all arrays of the batch in this order.
    ///
    /// ```
    /// # use wgpu_mla::{Dtype, KvSpec, MlaLayer, MlaShape, PagePool, RopeLayout};
    /// # let kv = KvSpec { layout: Dtype::F16.into(), page_size: 16, num_pages: 64 };
    /// # let shape = MlaShape { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64 };
    /// # let dtype = Dtype::F16;
    /// # let spec = MlaLayer { shape, qk_nope_head_dim: 128, v_head_dim: 128, kv, dtype, query: dtype, weight: dtype, out: dtype,
    /// #     rope: RopeLayout::Interleaved, decode_threshold: 1, workspace_bytes: 1 << 24 };
    /// let mut pool = PagePool::new(kv)?;
    /// let (prompt, running) = (pool.add(), pool.add());
    /// let mut requests = [(prompt, 300), (running, 1)];
    /// spec.decodes_first(&mut requests);
    /// assert_eq!(requests, [(running, 1), (prompt, 300)]);
    /// # Ok::<(), wgpu_mla::Error>(())
    /// ```
    pub fn decodes_first(&self, requests: &mut [(SeqId, u32)]) {
        requests.sort_by_key(|&(_, tokens)| tokens > self.decode_threshold);
    }

    /// Rows that the workspace holds: at most as many as the pool has tokens. Prompts that share pages may have more in all, and are then
    /// in several chunks.
    pub(crate) fn workspace_rows(&self) -> u32 {
        // Kernels count its elements in 32 bits.
        let row = self.workspace_row_bytes().max(1);
        let most = i32::MAX as u64 / row.div_ceil(self.dtype.bytes() as u64);
        (self.workspace_bytes / row).min(most).min(self.kv.num_slots()) as u32
    }

    /// The dims of `kv_b_proj`, as [`crate::KvBProj`] takes them.
    #[must_use]
    pub const fn dims(&self) -> HeadDims {
        HeadDims {
            num_heads: self.shape.num_heads,
            kv_lora_rank: self.shape.kv_lora_rank,
            qk_nope_head_dim: self.qk_nope_head_dim,
            v_head_dim: self.v_head_dim,
        }
    }

    /// Bytes of the queries of so many tokens, `[T, H, P + R]`: a head's part that does not rotate, then the one that does.
    #[must_use]
    pub const fn q_bytes(&self, tokens: u32) -> u64 {
        let head = self.qk_nope_head_dim as u64 + self.shape.qk_rope_head_dim as u64;
        self.bytes_of(tokens, head, self.dtype)
    }

    /// Bytes of the output of so many tokens, `[T, H, V]`.
    #[must_use]
    pub const fn out_bytes(&self, tokens: u32) -> u64 {
        self.bytes_of(tokens, self.v_head_dim as u64, self.out)
    }

    const fn bytes_of(&self, tokens: u32, head: u64, dtype: Dtype) -> u64 {
        let rows = tokens as u64 * self.shape.num_heads as u64;
        rows.saturating_mul(head).saturating_mul(dtype.bytes() as u64)
    }

    /// The decode in absorbed form.
    #[must_use]
    pub const fn mla(&self) -> MlaDecode {
        MlaDecode { shape: self.shape, kv: self.kv, query: self.query, out: self.dtype }
    }

    /// Whether these dims and dtypes are served.
    ///
    /// # Errors
    /// [`Error::Shape`] for a dim, [`Error::DtypeUnsupported`] for an e4m3 `dtype`, for a query or output of neither `dtype` nor e4m3, and
    /// for an e4m3 output of a layer that prefills; [`Error::Capacity`] for a workspace that holds less than a page.
    pub fn check(&self) -> Result<()> {
        self.check_dims()?;
        self.check_workspace()
    }

    /// Like [`MlaLayer::check`], but without a check of the workspace, whose size the plan checks.
    pub(crate) fn check_dims(&self) -> Result<()> {
        self.mla().check()?;
        wide("dtype of a layer", self.dtype)?;
        for (what, got) in [("MlaLayer::query", self.query), ("MlaLayer::out", self.out)] {
            if got != self.dtype && !got.is_fp8() {
                let cure = "use the layer's dtype, or e4m3";
                return Err(Error::DtypeUnsupported { what, got, cure });
            }
        }
        for (what, got) in [("qk_nope_head_dim", self.qk_nope_head_dim), ("v_head_dim", self.v_head_dim)] {
            if !(8..=256).contains(&got) || !got.is_multiple_of(8) {
                let got = got.into();
                return Err(Error::Shape { what, got, cure: "must be a multiple of 8 in 8..=256" });
            }
        }
        Ok(())
    }
}

impl MlaLayer {
    fn check_workspace(&self) -> Result<()> {
        if self.out != self.dtype && self.workspace_bytes > 0 {
            let cure = "prefills write the layer's dtype: take it and make codes of the output, or compile a layer of decodes alone (workspace_bytes: 0)";
            return Err(Error::DtypeUnsupported { what: "MlaLayer::out", got: self.out, cure });
        }
        let need = self.workspace_row_bytes().saturating_mul(self.kv.page_size.into());
        if self.workspace_bytes > 0 && self.workspace_bytes < need {
            let cure = "it must hold the keys and values of a page; 0 is a layer that only decodes";
            let got = self.workspace_bytes;
            return Err(Error::Capacity { what: "MlaLayer::workspace_bytes", got, need, cure });
        }
        Ok(())
    }
}

/// Its ops.
impl MlaLayer {
    pub(crate) fn append(&self, guard: bool) -> KvAppend {
        KvAppend { shape: self.shape, kv: self.kv, input: self.dtype, guard }
    }

    /// With rotated queries of one of its dtypes.
    pub(crate) fn rope_append(&self, query_out: Dtype, guard: bool) -> RopeAppend {
        let (query, num_heads, layout) = (self.dtype, self.shape.num_heads, self.rope);
        RopeAppend { append: self.append(guard), query, query_out, num_heads, layout }
    }

    pub(crate) fn gather(&self) -> KvGather {
        KvGather { shape: self.shape, kv: self.kv, output: self.dtype }
    }

    pub(crate) fn prefill(&self) -> MlaPrefill {
        MlaPrefill {
            num_heads: self.shape.num_heads,
            qk_nope_head_dim: self.qk_nope_head_dim,
            qk_rope_head_dim: self.shape.qk_rope_head_dim,
            v_head_dim: self.v_head_dim,
            dtype: self.dtype,
            out: self.dtype,
        }
    }

    pub(crate) fn merge(&self) -> MergeState {
        MergeState { dtype: self.dtype, head_size: self.v_head_dim }
    }

    pub(crate) fn merge_sets(&self) -> MergeStates {
        MergeStates { dtype: self.dtype, head_size: self.v_head_dim }
    }
}

/// One layer of a model, as an [`MlaLayer`] reads and writes it. `T` is the number of query tokens of a batch. Offsets and
/// strides are multiples of 8 elements.
#[derive(Debug, Clone)]
pub struct MlaLayerArgs<B> {
    /// `[T, H, P]`, the part of the query that does not rotate.
    pub q_nope: View<B>,
    /// `[T, H, R]`, not yet rotated; usually of the same buffer.
    pub q_pe: View<B>,
    /// `[T, L]`, normed: the latent rows of the new tokens.
    pub kv_c: View<B>,
    /// `[T, R]`, not yet rotated.
    pub k_pe: View<B>,
    /// The layer's cache.
    pub kv: KvView<B>,
    /// `[H, P + V, L]` as [`crate::KvBProj`] prepares it.
    pub kv_b_proj: B,
    /// f32 `[2, H]`, [`crate::E4m3Weights::scales`] of a `kv_b_proj` in e4m3; `None` for other dtypes.
    pub kv_b_scales: Option<B>,
    /// f32 `[max_position, R]`, as [`crate::RopeFrequencies::cos_sin`] makes it.
    pub cos_sin: B,
    /// Positions in `cos_sin`.
    pub max_position: u32,
    /// `[T, H, V]`, the output. Its rows past the batch, up to the binding's [`LayerCapacity::tokens`], may hold anything afterwards.
    pub out: View<B>,
    /// Factor of the logits; see [`crate::softmax_scale`]. Times log2(e), and times that and `k_scale`, it is from 2^-100 to 2^100.
    pub softmax_scale: f32,
    /// Factor of every element of an e4m3 [`MlaLayer::query`], one for `q_nope . W_UK` and the rotated part: codes are the quotients by it,
    /// past 448 they saturate, and NaN stays. 1 for other queries. At least 2^-126.
    pub q_scale: f32,
    /// Factor of every cache element; 1 unless the cache is e4m3. At least 2^-126.
    pub k_scale: f32,
    /// Factor of every element of an e4m3 [`MlaLayer::out`], which saturates likewise; 1 for other outputs. At least 2^-126.
    pub out_scale: f32,
    /// The layer's keys and values of prefixes that decodes share, if the batch names any: see [`LayerBatch::expanded`].
    pub expanded: Option<Expanded<B>>,
    /// What it attends of sequences longer than [`LayerOptions::topk`]; [`Selection::All`] in a model without sparse attention.
    pub selection: Selection<B>,
    /// Counters of what its keys, queries and outputs lose as they are rounded, from a row on as many as [`LayerGuard::ROWS`]; `Some` where
    /// [`LayerOptions::guard`] is set. All layers of a model may count in one buffer: layer `l` from row `3 * l` on.
    pub guard: Option<GuardView<B>>,
}

impl Op for MlaLayer {
    const NAME: &'static str = "mla_layer";
    const CHECKS_SHARED: bool = true;
    type Options = LayerOptions;
    type Facts = LayerFacts;
    type Input<'a> = (&'a LayerBatch<'a>, SplitPolicy);
    type Args<B> = MlaLayerArgs<B>;
    type Extent = LayerCapacity;
    /// The capacity of the layer's decodes.
    type Capacity = Capacity;

    fn samples() -> Vec<Self> {
        let of = |decode: MlaDecode| Self {
            shape: decode.shape,
            qk_nope_head_dim: 128,
            v_head_dim: 128,
            kv: decode.kv,
            dtype: decode.query,
            query: decode.query,
            weight: decode.query,
            out: decode.query,
            rope: RopeLayout::Interleaved,
            decode_threshold: 1,
            workspace_bytes: 0,
        };
        let one_dtype = |decode: &MlaDecode| decode.query == decode.out;
        MlaDecode::samples()
            .into_iter()
            .filter(one_dtype)
            .map(of)
            .filter(|spec| spec.check().is_ok())
            .collect()
    }

    fn check(&self) -> Result<()> {
        self.check()
    }

    fn map<'a, B: 'a, C>(
        &self,
        args: &'a MlaLayerArgs<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<MlaLayerArgs<C>> {
        Ok(MlaLayerArgs {
            q_nope: args.q_nope.map(|buffer| f(Use::Read("q_nope"), buffer))?,
            q_pe: args.q_pe.map(|buffer| f(Use::Read("q_pe"), buffer))?,
            kv_c: args.kv_c.map(|buffer| f(Use::Read("kv_c"), buffer))?,
            k_pe: args.k_pe.map(|buffer| f(Use::Read("k_pe"), buffer))?,
            kv: args.kv.map(|buffer| f(Use::Write("kv"), buffer))?,
            kv_b_proj: f(Use::Read("kv_b_proj"), &args.kv_b_proj)?,
            kv_b_scales: args
                .kv_b_scales
                .as_ref()
                .map(|scales| f(Use::Read("kv_b_scales"), scales))
                .transpose()?,
            cos_sin: f(Use::Read("cos_sin"), &args.cos_sin)?,
            max_position: args.max_position,
            out: args.out.map(|buffer| f(Use::Write("out"), buffer))?,
            softmax_scale: args.softmax_scale,
            q_scale: args.q_scale,
            k_scale: args.k_scale,
            out_scale: args.out_scale,
            expanded: match &args.expanded {
                Some(expanded) => Some(expanded.map(Use::Read, &mut f)?),
                None => None,
            },
            guard: map_guard(&args.guard, &mut f)?,
            selection: args.selection.map(f)?,
        })
    }

    /// Its ops check the rest.
    fn check_args<B>(
        &self,
        args: &MlaLayerArgs<&B>,
        room: LayerCapacity,
        _: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        if room.prefix_rows > 0 && args.expanded.is_none() {
            let detail = "room for expanded prefixes needs MlaLayerArgs::expanded";
            return Err(Error::LayoutMismatch { detail });
        }
        check_range(self, args.k_scale)?;
        self.check_scales(args.kv_b_scales.is_some())?;
        scale_of("q_scale", self.query, args.q_scale)?;
        scale_of("out_scale", self.out, args.out_scale)?;
        // To a projection heads may have one row.
        let (tokens, heads) = (room.tokens.into(), self.shape.num_heads.into());
        distinct("q_nope", &args.q_nope, tokens, heads, self.qk_nope_head_dim.into())
    }

    fn room<B>(&self, args: &MlaLayerArgs<B>, room: LayerCapacity) -> LayerCapacity {
        // Without a rotary part no position is looked up.
        let positions = if self.shape.qk_rope_head_dim == 0 { u32::MAX } else { args.max_position };
        let listed_tokens = if args.selection.list().is_some() { u32::MAX } else { 0 };
        LayerCapacity { positions, listed_tokens, ..room }
    }

    fn fits(used: LayerCapacity, room: LayerCapacity) -> Result<(), &'static str> {
        if used.tokens > room.tokens {
            return Err("the step has more query tokens than the binding");
        }
        if used.decode_tokens > room.decode_tokens {
            return Err("the step decodes tokens past the binding's decode_tokens");
        }
        if used.positions > room.positions {
            return Err(
                "the step has positions past MlaLayerArgs::max_position: bind with a RoPE table (cos_sin) of more positions",
            );
        }
        if used.prefix_rows > room.prefix_rows {
            return Err(
                "the step attends expanded prefixes past the binding's prefix_rows, which need MlaLayerArgs::expanded",
            );
        }
        if used.listed_tokens > room.listed_tokens {
            return Err(
                "the step has sequences of more than LayerOptions::topk tokens: bind with Selection::Own or Selection::Shared, or compile the layer without topk",
            );
        }
        Ok(())
    }

    /// Aliases between the arguments of one inner op are checked by that op.
    fn check_aliases<B>(
        &self,
        args: &MlaLayerArgs<&B>,
        room: LayerCapacity,
        offset: impl Fn(&B, &B) -> Option<i64> + Copy,
    ) -> Result<()> {
        aliases::check_aliases(self, args, room, offset)
    }
}
