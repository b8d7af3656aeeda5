//! Paged, split-KV decode in the latent space: arguments and checks.

mod inputs;

pub use inputs::Indices;
pub(crate) use inputs::Inputs;

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::features::{Asks, Features};
use super::op::{Compiled, Kernel, Op, Use};
use super::samples::{FLOATS, SHAPE, kv, pairs};
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::view::{View, distinct, logit_scale, normal, scale_of};
use crate::cache::decode_spec::MlaDecode;
use crate::cache::{KvLayout, KvView, MlaShape, SUPPORTED_DIMS};
use crate::plan::tables::{Capacity, PageTable};
use crate::plan::{Plan, Tiling};

/// The query of a layer, already absorbed into the latent space.
#[derive(Debug, Clone, Copy)]
pub enum Query<B> {
    /// One array `[total_q, H, L + R]`.
    Whole(View<B>),
    /// Two arrays `[total_q, H, L]` and `[total_q, H, R]`, never concatenated. With `R` 0 the second is unread.
    Split {
        /// The absorbed part, `q_nope . W_UK`, which is multiplied with latents.
        q_nope: View<B>,
        /// The rotary part.
        q_pe: View<B>,
    },
}

impl<B: Copy> Query<B> {
    /// Both parts as views; a whole query is two views of one buffer.
    pub(crate) fn parts(&self, latent: u32) -> (View<B>, View<B>) {
        match *self {
            Self::Whole(q) => (q, View { offset: q.offset.saturating_add(latent.into()), ..q }),
            Self::Split { q_nope, q_pe } => (q_nope, q_pe),
        }
    }
}

/// The base of the logarithm that an LSE is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LseBase {
    /// Natural logarithm, as everywhere in this crate where no op says otherwise.
    #[default]
    E,
    /// Base 2, as FlashInfer's.
    Two,
}

impl LseBase {
    /// The natural logarithm of the base, and its reciprocal, as kernels take them.
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    pub(crate) fn ln(self) -> [f32; 2] {
        match self {
            Self::E => [1.0, 1.0],
            Self::Two => [std::f32::consts::LN_2, std::f32::consts::LOG2_E],
        }
    }

    pub(crate) fn exp(self, x: f64) -> f64 {
        match self {
            Self::E => x.exp(),
            Self::Two => x.exp2(),
        }
    }

    pub(crate) fn log(self, x: f64) -> f64 {
        match self {
            Self::E => x.ln(),
            Self::Two => x.log2(),
        }
    }
}

/// One layer of a model, as an [`MlaDecode`] reads and writes it. `total_q` is the number of query tokens of a batch. Offsets
/// and strides are multiples of 8 elements, but for those of the LSE.
#[derive(Debug, Clone)]
pub struct MlaDecodeArgs<B> {
    /// The absorbed query, `[total_q, H, L + R]` or in two parts.
    pub query: Query<B>,
    /// The paged cache, `[num_pages, page_size, L + R]`.
    pub kv: KvView<B>,
    /// Output `[total_q, H, L]`.
    pub out: View<B>,
    /// Log-sum-exp of the scaled logits, f32 `[total_q, H]`; strides in f32 elements.
    pub lse: View<B>,
    /// Base of `lse`.
    pub lse_base: LseBase,
    /// Factor of the logits; see [`crate::softmax_scale`]. Times `k_scale`, `q_scale` and log2(e) it is from 2^-100 to 2^100.
    pub softmax_scale: f32,
    /// Factor of every cache element; 1 unless the cache is e4m3. At least 2^-126.
    pub k_scale: f32,
    /// Factor of every query element; 1 unless the query is e4m3. At least 2^-126.
    pub q_scale: f32,
    /// The slots that each query token attends, for a decode that was compiled with [`DecodeOptions::topk`].
    pub indices: Option<Indices<B>>,
    /// A logit for each head that takes part in the softmax and has no value, `[H]`: `out *= 1 / (1 + exp(sink - lse))` with the natural
    /// LSE, which is stored without it. -inf is no sink, and +inf makes the output 0. For a decode that was compiled with
    /// [`DecodeOptions::attn_sink`]. Partial results that are merged outside, as over ranks, need their sinks after the merge.
    pub attn_sink: Option<Vec<f32>>,
}

/// Choices for compiling an [`MlaDecode`], each with a default.
#[derive(Debug, Clone, Default)]
pub struct DecodeOptions {
    /// Forces a kernel variant by name.
    pub variant: Option<String>,
    /// The usual number of query tokens of a sequence, such as 2 with one speculative token; the default, 0, means 1. It decides the tile
    /// size: where all heads of these tokens fit one tile, they share one pass over the cache. Batches with other query lengths give right
    /// results too.
    pub query_tokens: u32,
    /// How many sequences usually share a prefix ([`crate::Batch::shared_prefixes`]) that is most of what they attend; the default, 0,
    /// means that none do. It decides the tile size: a tile then holds query rows of several sequences, which attend a token of the prefix
    /// together. Without it a batch of 16 heads gains nothing from shared prefixes on tensor cores. Batches without them give right results
    /// too, but more slowly.
    pub shared_sequences: u32,
    /// Page lists may be written on the device ([`PageTable::Device`]), for which kernels clamp every page id to the pool. The CPU refuses
    /// it.
    pub device_page_list: bool,
    /// Replaces the tiling that the planner gets, such as for a card whose best [`Tiling::target_items`] was measured by
    /// `cargo bench --bench decode -- --items N`. Its tiles may be smaller than the kernel's; `prepare` refuses a plan with larger ones.
    pub tiling: Option<Tiling>,
    /// Above 0 the decode is sparse: each query token attends the slots of a list of so many entries, [`MlaDecodeArgs::indices`], in
    /// place of a sequence's tokens. Its steps are prepared with [`Plan::sparse`] and [`PageTable::Indices`].
    pub topk: u32,
    /// Whether its layers have attention sinks, [`MlaDecodeArgs::attn_sink`].
    pub attn_sink: bool,
}

/// The request by which a backend chooses a decode's kernel.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
#[derive(Debug, Clone, Copy)]
pub(crate) struct DecodeRequest {
    pub(crate) spec: MlaDecode,
    /// Query rows that a tile should hold: those of a sequence, or of the sequences that share a prefix.
    pub(crate) query_rows: u32,
    pub(crate) features: Features,
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl Asks for DecodeRequest {
    fn features(&self) -> Features {
        self.features
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl DecodeRequest {
    pub(crate) fn new(spec: &MlaDecode, options: &DecodeOptions) -> Self {
        let heads = spec.shape.num_heads;
        let asked = [
            (options.device_page_list, Features::DEVICE_PAGE_LIST),
            (options.topk > 0, Features::INDICES),
            (options.attn_sink, Features::ATTN_SINK),
        ];
        let asked = asked.into_iter().filter(|(is_asked, _)| *is_asked);
        let features = asked.fold(Features::NONE, |all, (_, one)| all.and(one));
        Self { spec: *spec, query_rows: heads.saturating_mul(options.tile_tokens(heads)), features }
    }

    /// One query token a sequence.
    pub(crate) const fn one_token(spec: &MlaDecode) -> Self {
        Self { spec: *spec, query_rows: spec.shape.num_heads, features: Features::NONE }
    }
}

/// Query rows of a tile for sequences that share a prefix. On an H100 through CUDA 64 are no faster: 64 sequences of 16 heads sharing 8192
/// of 9216 tokens take 96.9 us with tiles of 16 rows, 75.0 of 32, 77.5 of 64.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
const SHARED_ROWS: u32 = 32;

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl DecodeOptions {
    /// Query tokens that a tile is sized for: those of one sequence, or of as many that share a prefix as fill it.
    fn tile_tokens(&self, num_heads: u32) -> u32 {
        let own = self.query_tokens.clamp(1, 64);
        let shared =
            own.saturating_mul(self.shared_sequences.max(1)).min(SHARED_ROWS.div_ceil(num_heads.max(1)));
        own.max(shared)
    }
}

impl<B> MlaDecodeArgs<B> {
    /// A layer whose arrays are dense, each at the front of a buffer of its own, with natural LSE and scales of 1.
    pub fn dense(spec: &MlaDecode, q: B, kv: B, out: B, lse: B, softmax_scale: f32) -> Self {
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
            indices: None,
            attn_sink: None,
        }
    }
}

impl<B: Copy> MlaDecodeArgs<B> {
    /// The layer as each slab of its pool has it.
    pub(crate) fn each_slab(&self) -> impl Iterator<Item = Self> {
        self.kv.each_slab().map(|kv| Self { kv, ..self.clone() })
    }

    /// Both parts of the query. Without a rotary part the second is unread, whatever it is, and the first stands in for it.
    pub(crate) fn query_parts(&self, spec: &MlaDecode) -> [View<B>; 2] {
        let (q_nope, q_pe) = self.query.parts(spec.shape.kv_lora_rank);
        [q_nope, if spec.shape.qk_rope_head_dim == 0 { q_nope } else { q_pe }]
    }

    /// Scales as the kernels use them: `(logits to base-2 units, latent to output, base-2 LSE to its base)`.
    pub(crate) fn kernel_scales(&self) -> (f32, f32, f32) {
        let logits = f64::from(self.softmax_scale) * f64::from(self.k_scale) * f64::from(self.q_scale);
        let lse = match self.lse_base {
            LseBase::E => std::f32::consts::LN_2,
            LseBase::Two => 1.0,
        };
        ((logits * std::f64::consts::LOG2_E) as f32, self.k_scale, lse)
    }
}

impl Op for MlaDecode {
    const NAME: &'static str = "mla_decode";
    type Options = DecodeOptions;
    /// The tiling of its kernel, for the planner.
    type Facts = Tiling;
    type Input<'a> = (&'a Plan, PageTable<'a>);
    type Args<B> = MlaDecodeArgs<B>;
    /// Query tokens.
    type Extent = u32;
    type Capacity = Capacity;

    fn samples() -> Vec<Self> {
        let of = |shape, cache, query, out| MlaDecode { shape, kv: kv(cache), query, out };
        let dtypes = pairs(&Dtype::ALL, &FLOATS, |cache, out| (cache, out));
        let mut all = pairs(&Dtype::ALL, &dtypes, |query, (cache, out)| of(SHAPE, cache, query, out));
        // Other shapes, and numbers of heads that are no multiple of a tile's rows.
        for (kv_lora_rank, qk_rope_head_dim, _) in SUPPORTED_DIMS {
            for num_heads in [16, 20] {
                let shape = MlaShape { num_heads, kv_lora_rank, qk_rope_head_dim };
                if shape == SHAPE {
                    continue;
                }
                all.extend(FLOATS.map(|dtype| of(shape, dtype, dtype, dtype)));
            }
        }
        all
    }

    fn check(&self) -> Result<()> {
        self.check()
    }

    fn kv_layout(&self) -> Option<KvLayout> {
        Some(self.kv.layout)
    }

    fn map<'a, B: 'a, C>(
        &self,
        args: &'a MlaDecodeArgs<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<MlaDecodeArgs<C>> {
        let rotary = if self.shape.qk_rope_head_dim > 0 { Use::Read("q_pe") } else { Use::Unread("q_pe") };
        Ok(MlaDecodeArgs {
            query: match &args.query {
                Query::Whole(q) => Query::Whole(q.map(|buffer| f(Use::Read("q_nope"), buffer))?),
                Query::Split { q_nope, q_pe } => Query::Split {
                    q_nope: q_nope.map(|buffer| f(Use::Read("q_nope"), buffer))?,
                    q_pe: q_pe.map(|buffer| f(rotary, buffer))?,
                },
            },
            kv: args.kv.map(|buffer| f(Use::Read("kv"), buffer))?,
            out: args.out.map(|buffer| f(Use::Write("out"), buffer))?,
            lse: args.lse.map(|buffer| f(Use::Write("lse"), buffer))?,
            lse_base: args.lse_base,
            softmax_scale: args.softmax_scale,
            k_scale: args.k_scale,
            q_scale: args.q_scale,
            indices: args
                .indices
                .as_ref()
                .map(|lists| lists.map(|name, buffer| f(Use::Read(name), buffer)))
                .transpose()?,
            attn_sink: args.attn_sink.clone(),
        })
    }

    fn check_args<B>(
        &self,
        args: &MlaDecodeArgs<&B>,
        max_queries: u32,
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        normal("softmax_scale", args.softmax_scale)?;
        self.kv.layout.check_scale(args.k_scale)?;
        scale_of("q_scale", self.query, args.q_scale)?;
        let scales = [args.softmax_scale, args.k_scale, args.q_scale];
        logit_scale("softmax_scale * k_scale * q_scale", &scales)?;
        args.kv.check(&self.kv, &self.shape, size)?;
        let (heads, latent) = (self.shape.num_heads, self.shape.kv_lora_rank);
        let (q_nope, q_pe) = args.query.parts(latent);
        for (what, view, dim, bytes, unit) in [
            ("q_nope", q_nope, latent, self.query.bytes(), 8),
            ("q_pe", q_pe, self.shape.qk_rope_head_dim, self.query.bytes(), 8),
            ("out", args.out, latent, self.out.bytes(), 8),
            ("lse", args.lse, 1, 4, 1),
        ] {
            view.check(what, [max_queries, heads, dim], bytes, unit, size(view.buffer))?;
        }
        let (tokens, heads) = (max_queries.into(), heads.into());
        if let Query::Whole(q) = &args.query {
            distinct("q", q, tokens, heads, self.shape.row_elems().into())?;
        }
        distinct("out", &args.out, tokens, heads, latent.into())?;
        distinct("lse", &args.lse, tokens, heads, 1)
    }

    fn fits(queries: u32, max_queries: u32) -> Result<(), &'static str> {
        if queries > max_queries { Err("the step has more query tokens than the binding") } else { Ok(()) }
    }

    /// Output and LSE may be parts of one memory, except on wgpu.
    fn check_aliases<B>(
        &self,
        args: &MlaDecodeArgs<&B>,
        max_queries: u32,
        offset: impl Fn(&B, &B) -> Option<i64> + Copy,
    ) -> Result<()> {
        args.kv.check_slabs_apart(|a, b| offset(a, b))?;
        let [q_nope, q_pe] = self.query_buffers(args);
        let slabs = args.kv.buffers().map(|slab| ("kv", *slab));
        let lists = args.indices.iter().flat_map(|lists| {
            let lengths = lists.topk_length.iter().map(|view| ("topk_length", view.buffer));
            [("indices", lists.slots.buffer)].into_iter().chain(lengths)
        });
        for (a, read) in [("q_nope", q_nope), ("q_pe", q_pe)].into_iter().chain(slabs).chain(lists) {
            for (b, written) in [("out", args.out.buffer), ("lse", args.lse.buffer)] {
                if offset(read, written).is_some() {
                    return Err(Error::Aliased { a, b });
                }
            }
        }
        let (tokens, heads) = (max_queries.into(), self.shape.num_heads.into());
        let bytes = |view: &View<&B>, dim: u32, element: usize, from: i64| {
            let [begin, end] = [view.offset, view.end(tokens, heads, dim.into())]
                .map(|at| i64::try_from(at.saturating_mul(element as u64)).unwrap_or(i64::MAX));
            from.saturating_add(begin)..from.saturating_add(end)
        };
        if let Some(from) = offset(args.out.buffer, args.lse.buffer) {
            let out = bytes(&args.out, self.shape.kv_lora_rank, self.out.bytes(), 0);
            let lse = bytes(&args.lse, 1, 4, from);
            if out.start < lse.end && lse.start < out.end {
                return Err(Error::Aliased { a: "out", b: "lse" });
            }
        }
        Ok(())
    }
}

impl MlaDecode {
    fn query_buffers<'a, B>(&self, args: &MlaDecodeArgs<&'a B>) -> [&'a B; 2] {
        args.query_parts(self).map(|view| view.buffer)
    }
}

impl<D: Kernel<MlaDecode>> Compiled<MlaDecode, D> {
    /// The tiling of its kernel, for the planner.
    pub fn tiling(&self) -> Tiling {
        *self.facts()
    }
}

#[cfg(all(test, any(feature = "wgpu", feature = "cuda")))]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_sized_for_a_sequence_or_for_several_that_share() {
        let tokens = |query_tokens, shared_sequences, heads| {
            DecodeOptions { query_tokens, shared_sequences, ..DecodeOptions::default() }.tile_tokens(heads)
        };
        assert_eq!(
            [tokens(0, 0, 16), tokens(1, 1, 16), tokens(2, 0, 16), tokens(u32::MAX, 0, 128)],
            [1, 1, 2, 64]
        );
        assert_eq!([tokens(0, 64, 16), tokens(0, 3, 1), tokens(0, 64, 6), tokens(0, 64, 128)], [2, 3, 6, 1]);
        assert_eq!([tokens(4, 64, 16), tokens(2, u32::MAX, 8)], [4, 4], "never fewer than a sequence has");
        assert_eq!(tokens(0, 64, 0), 32, "a spec that is refused later");
    }
}
