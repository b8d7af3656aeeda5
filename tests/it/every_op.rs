//! A small use of every op and of the layer, on any backend, for tests that walk them all.

use std::collections::BTreeSet;

use wgpu_mla::{
    Backend, Batch, CorrectAttnOut, CorrectAttnOutArgs, DecodeOptions, Dtype, ExpandBatch, Expanded,
    ExpandedPrefix, GatherBatch, GatherRange, GuardView, HeadProject, HeadProjectArgs, IndexFormat,
    IndexSpec, IndexerAppend, IndexerAppendArgs, IndexerLogits, IndexerLogitsArgs, IndexerLogitsBatch,
    IndexerQuery, IndexerQueryArgs, IndexerQueryBatch, Kernel, KvAppend, KvAppendArgs, KvCalibrate,
    KvCalibrateArgs, KvCopyPages, KvGather, KvGatherArgs, KvSpec, KvView, LayerBatch, LayerCapacity,
    LayerIndexer, LayerOptions, LseBase, Mask, MergeState, MergeStateArgs, MergeStates, MergeStatesArgs,
    MlaDecode, MlaDecodeArgs, MlaExpand, MlaExpandArgs, MlaLayer, MlaLayerArgs, MlaPrefill, MlaPrefillArgs,
    MlaShape, Op, OpOptions, OwnSelection, PageTable, Plan, PrefillOptions, PrefillSequence, ReorgBatch,
    ReorgChunk, ReorgKvCache, ReorgKvCacheArgs, Result, Rope, RopeAppend, RopeAppendArgs, RopeAppendBatch,
    RopeArgs, RopeLayout, Selection, Shares, SplitPolicy, TopK, TopKArgs, TopKBatch, View, WeightOrder,
    WeightScales, WeightView, for_each_op,
};

/// What a test does with a use of an op.
pub trait Visit<B: Backend> {
    fn visit<'a, O: Op>(
        &mut self,
        op: O,
        options: &O::Options,
        input: O::Input<'a>,
        args: &O::Args<&B::Buffer>,
    ) where
        B: Kernel<O>,
        O::Input<'a>: Clone;
}

/// The ops that are visited, by name.
pub fn names() -> BTreeSet<&'static str> {
    macro_rules! names {
        ($($op:ty),*) => { BTreeSet::from([$(<$op>::NAME),*]) };
    }
    &for_each_op!(names) | &BTreeSet::from([MlaLayer::NAME, MlaExpand::NAME])
}

/// Bytes of each buffer.
pub const BYTES: u64 = 1 << 20;

/// Memory on a backend, which all ops use in turn, and what has to be made before the first of them.
pub struct Uses<B: Backend> {
    pub buffers: [B::Buffer; 10],
    plan: Plan,
    shares: Shares,
}

const SHAPE: MlaShape = MlaShape { num_heads: 2, kv_lora_rank: 256, qk_rope_head_dim: 32 };
const KV: KvSpec = KvSpec { layout: wgpu_mla::KvLayout::Plain(Dtype::F16), page_size: 16, num_pages: 40 };
const DECODE: MlaDecode = MlaDecode { shape: SHAPE, kv: KV, query: Dtype::F32, out: Dtype::F32 };

/// The layer's arguments: a buffer each.
pub fn layer_args<'a, B>(spec: &MlaLayer, buffers: &'a [B; 10]) -> MlaLayerArgs<&'a B> {
    let [q, kv_c, k_pe, kv, kv_b_proj, cos_sin, out, rows, k_nope, v] = buffers;
    let (heads, rope) = (spec.shape.num_heads, spec.shape.qk_rope_head_dim);
    let q_nope = View::dense(q, heads, spec.qk_nope_head_dim + rope);
    MlaLayerArgs {
        q_nope,
        q_pe: View { offset: spec.qk_nope_head_dim.into(), ..q_nope },
        kv_c: View::dense(kv_c, 1, spec.shape.kv_lora_rank),
        k_pe: View::dense(k_pe, 1, rope),
        kv: KvView::dense(kv, &spec.mla()),
        kv_b_proj,
        kv_b_scales: None,
        cos_sin,
        max_position: 128,
        out: View::dense(out, heads, spec.v_head_dim),
        softmax_scale: 0.1,
        q_scale: 1.0,
        k_scale: 1.0,
        out_scale: 1.0,
        expanded: Some(Expanded::dense(spec, [rows, k_nope, v])),
        selection: wgpu_mla::Selection::All,
        guard: None,
    }
}

impl<B: Backend> Uses<B> {
    pub fn new(backend: &B) -> Result<Self> {
        let buffers = (0..10).map(|_| backend.buffer(BYTES)).collect::<Result<Vec<_>>>()?;
        // Split, so that partial results are merged.
        let (seq_lens, starts) = ([200, 77], [0, 1, 3]);
        let tiling = backend.compile(DECODE)?.tiling();
        let plan =
            Plan::new(&DECODE, &tiling, &Batch::new(&seq_lens, &starts), SplitPolicy::FixedTokens(32))?;
        let buffers = buffers.try_into().unwrap_or_else(|_| unreachable!("there are ten"));
        Ok(Self { buffers, plan, shares: Shares::even(3, 2)? })
    }

    /// Visits each op once, and the layer three times.
    pub fn each(&self, visit: &mut impl Visit<B>) {
        self.of_pages(visit);
        self.of_rows(visit);
        self.of_indexer(visit);
        self.merges(visit);
        self.layers(visit);
    }

    fn of_pages(&self, visit: &mut impl Visit<B>) {
        let [a, b, c, d, e, f, g, ..] = &self.buffers;
        let one = OpOptions::default();
        let (dtype, num_heads, layout) = (Dtype::F32, 2, RopeLayout::HalfSplit);
        let block_table: Vec<i32> = (0..26).collect();
        let pages = PageTable::Dense { block_table: &block_table, max_pages: 13 };
        let args = MlaDecodeArgs::dense(&DECODE, a, b, c, d, 0.1);
        visit.visit(DECODE, &DecodeOptions::default(), (&self.plan, pages), &args);

        let append = KvAppend { shape: SHAPE, kv: KV, input: dtype, guard: false };
        let cache = KvView::dense(c, &DECODE);
        let (kv_c, k_pe) = (View::dense(a, 1, 256), View::dense(b, 1, 32));
        let rows = KvAppendArgs { kv_c, k_pe, kv: cache.clone(), k_scale: 1.0, guard: None };
        let guard = Some(GuardView { counters: d, row: 3 });
        let counted = KvAppendArgs { guard, ..rows.clone() };
        visit.visit(KvAppend { guard: true, ..append }, &one, &[3, -1, 70], &counted);
        let calibrate = KvCalibrateArgs { kv_c, k_pe, k_scale: 1.0, stats: c };
        visit.visit(KvCalibrate { shape: SHAPE, input: dtype }, &one, 0..9, &calibrate);
        visit.visit(KvCopyPages { shape: SHAPE, kv: KV }, &one, &[(0, 3), (1, 2)], &cache);

        let gather = KvGather { shape: SHAPE, kv: KV, output: dtype };
        let ranges = &[GatherRange { sequence: 1, begin: 5, tokens: 60, out_row: 2 }];
        let gathered = KvGatherArgs { kv: cache, k_scale: 1.0, out: View::dense(a, 1, 288) };
        let batch = GatherBatch { pages, seq_lens: &[200, 77], ranges };
        visit.visit(gather, &one, batch, &gathered);
        let chunks = &[ReorgChunk { begin: 5, tokens: 60, local_row: 1, out_row: 2 }];
        let reorg = ReorgKvCacheArgs {
            gathered: View::dense(a, 1, 288),
            rank_stride: 25 * 288,
            out: View::dense(b, 1, 288),
        };
        let batch = ReorgBatch { shares: &self.shares, chunks };
        visit.visit(ReorgKvCache { dtype, row_elems: 288 }, &one, batch, &reorg);

        let rope = Rope { dtype, num_heads, rope_dim: 32, layout };
        let (x, y) = (View::dense(d, 2, 32), View::dense(e, 2, 32));
        let rotated = RopeArgs { x, y, positions: f, cos_sin: g, max_position: 4, scale: 1.0 };
        visit.visit(rope, &one, 1..9, &rotated);
        let both = RopeAppend { append, query: dtype, query_out: dtype, num_heads, layout };
        let args = RopeAppendArgs {
            q_pe: x,
            q_pe_out: y,
            layer: rows,
            positions: f,
            cos_sin: g,
            max_position: 4,
            q_pe_scale: 1.0,
            q_scale: 1.0,
        };
        visit.visit(both, &one, RopeAppendBatch::slots(&[3, -1, 70]), &args);

        let index = IndexSpec { format: IndexFormat::DEEPSEEK_V32, page_size: 16, num_pages: 40 };
        let scored = IndexerLogitsArgs {
            q: View::dense(a, 2, 128),
            weights: View::dense(b, 2, 1),
            cache: index.view(c),
            logits: View::dense(d, 1, 200),
        };
        let (seq_lens, query_start_loc, mask) = (&[200, 77], &[0, 1, 3], Mask::Causal);
        let batch = IndexerLogitsBatch { pages, seq_lens, query_start_loc, mask, tokens: 0..3, fill: 90 };
        visit.visit(IndexerLogits { index, num_heads, query: Dtype::E4m3 }, &one, batch, &scored);
    }

    fn of_indexer(&self, visit: &mut impl Visit<B>) {
        let [a, b, c, d, e, f, ..] = &self.buffers;
        let index = IndexSpec { format: IndexFormat::DEEPSEEK_V32, page_size: 16, num_pages: 40 };
        let append = IndexerAppend { index, input: Dtype::F32 };
        let args = IndexerAppendArgs {
            k: View::dense(a, 1, 128),
            norm_weight: b,
            norm_bias: c,
            norm_eps: 1e-6,
            positions: d,
            cos_sin: e,
            max_position: 4,
            cache: index.view(f),
        };
        visit.visit(append, &OpOptions::default(), RopeAppendBatch::slots(&[3, -1, 70]), &args);
        let query = IndexerQuery { format: index.format, num_heads: 5, input: Dtype::F32 };
        let args = IndexerQueryArgs {
            q: View::dense(a, 5, 128),
            weights: View::dense(b, 5, 1),
            q_out: View::dense(c, 5, 128),
            weights_out: View::dense(f, 5, 1),
            positions: d,
            cos_sin: e,
            max_position: 4,
            weight_scale: 0.04,
        };
        visit.visit(query, &OpOptions::default(), IndexerQueryBatch::tokens(1..9), &args);
    }

    fn of_rows(&self, visit: &mut impl Visit<B>) {
        let [a, b, c, d, e, f, g, ..] = &self.buffers;
        let (dtype, num_heads, order) = (Dtype::F32, 2, WeightOrder::Kn);
        let project = HeadProject {
            input: dtype,
            weight: Dtype::E4m3.into(),
            output: dtype,
            num_heads,
            k: 64,
            n: 48,
            order,
            guard: true,
        };
        let weight = WeightView { buffer: b, offset: 0, head_stride: 64 * 48, row_stride: 48, scales: None }
            .with_scales(WeightScales::per_head(d));
        let projected = HeadProjectArgs {
            x: View::dense(a, 2, 64),
            weight,
            y: View::dense(c, 2, 48),
            scale: 1.0,
            out_scale: 1.0,
            saturates: false,
            guard: Some(GuardView { counters: e, row: 5 }),
        };
        visit.visit(project, &OpOptions::default(), 0..70, &projected);

        let (qk_nope_head_dim, qk_rope_head_dim, v_head_dim) = (16, 32, 24);
        let prefill =
            MlaPrefill { num_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, dtype, out: dtype };
        let attended = MlaPrefillArgs {
            q_nope: View::dense(a, 2, 16),
            q_pe: View::dense(b, 2, 32),
            k_nope: View::dense(c, 2, 16),
            k_pe: View { head_stride: 0, ..View::dense(d, 1, 32) },
            v: View::dense(e, 2, 24),
            out: View::dense(f, 2, 24),
            lse: View::dense(g, 2, 1),
            softmax_scale: 0.1,
            v_scale: 1.0,
        };
        let sequences = &[PrefillSequence::causal(0, 70, 0, 90), PrefillSequence::full(70, 3, 90, 200)];
        visit.visit(prefill, &PrefillOptions::default(), sequences, &attended);

        let chosen = TopKArgs {
            logits: View::dense(a, 1, 3000),
            columns: 3000,
            lengths: b,
            indices: View::dense(c, 1, 40),
            values: Some(View::dense(d, 1, 40)),
        };
        let batch = TopKBatch::of(&[3000, 0, 41]);
        visit.visit(TopK { k: 40, slots: None }, &OpOptions::default(), batch, &chosen);
    }

    fn merges(&self, visit: &mut impl Visit<B>) {
        let [a, b, c, d, e, f, ..] = &self.buffers;
        let one = OpOptions::default();
        let (dtype, num_heads, head_size) = (Dtype::F32, 2, 24);
        let (states, lse) = (|buffer| View::dense(buffer, 2, 24), |buffer| View::dense(buffer, 2, 1));
        let merged = MergeStateArgs {
            prefix_output: states(a),
            prefix_lse: lse(b),
            suffix_output: states(c),
            suffix_lse: lse(d),
            output: states(e),
            output_lse: Some(lse(f)),
            num_tokens: 50,
            num_heads,
            output_scale: 1.0,
        };
        visit.visit(MergeState { dtype, head_size }, &one, (), &merged);
        let sets = MergeStatesArgs {
            states: states(a),
            set_stride: 50 * 48,
            lse: lse(b),
            lse_set_stride: 50 * 2,
            output: states(c),
            output_lse: Some(lse(d)),
            lse_base: LseBase::E,
            num_heads,
            output_scale: 1.0,
        };
        visit.visit(MergeStates { dtype, head_size }, &one, (0..50, 3), &sets);
        let corrected = CorrectAttnOutArgs {
            out: states(a),
            lses: lse(b),
            lse_rank_stride: 50 * 2,
            output: states(c),
            output_lse: Some(lse(d)),
            lse_base: LseBase::Two,
            world: 3,
            rank: 1,
            num_heads,
        };
        visit.visit(CorrectAttnOut { dtype, head_size }, &one, 0..50, &corrected);
    }

    /// Decodes, one run of them over a prefix that is kept expanded, and a prompt in chunks that are merged.
    fn layers(&self, visit: &mut impl Visit<B>) {
        let spec = mla_support::suite::layer_rig::spec(Dtype::F32, Dtype::F16, RopeLayout::Interleaved, 24);
        let args = layer_args(&spec, &self.buffers);
        let expanded = [ExpandedPrefix { sequences: vec![0, 1], tokens: 16, first_row: 3 }];
        let batch = LayerBatch {
            seq_lens: &[20, 30, 50],
            query_start_loc: &[0, 1, 3, 13],
            slot_mapping: &[-1; 13],
            pages: PageTable::Dense {
                // The first two share two pages.
                block_table: &std::array::from_fn::<i32, 21, _>(|i| {
                    if (7..9).contains(&i) { i as i32 - 7 } else { i as i32 }
                }),
                max_pages: 7,
            },
            shared_prefixes: &[],
            expanded: &expanded,
        };
        let capacity =
            LayerCapacity { tokens: 16, decode_tokens: 16, prefix_rows: 32, positions: 0, listed_tokens: 0 };
        let options = LayerOptions { capacity, ..LayerOptions::default() };
        visit.visit(spec, &options, (&batch, SplitPolicy::Auto), &args);
        let plain = LayerBatch { expanded: &[], ..batch };
        visit.visit(spec, &options, (&plain, SplitPolicy::FixedTokens(8)), &args);
        self.lists(visit, &spec, &plain);

        let expand = MlaExpandArgs {
            kv: args.kv,
            k_scale: 1.0,
            kv_b_proj: args.kv_b_proj,
            kv_b_scales: args.kv_b_scales,
            expanded: args.expanded.expect("it has them"),
        };
        let prefix = ExpandBatch { pages: &[3, 1, 2], tokens: 20, first_row: 5 };
        visit.visit(MlaExpand(spec), &OpOptions::default(), prefix, &expand);
    }

    /// A layer whose longer sequences attend lists of its own, and are scored in three rounds.
    fn lists(&self, visit: &mut impl Visit<B>, spec: &MlaLayer, batch: &LayerBatch<'_>) {
        let [q, .., cos_sin, _, rows, k_nope, v] = &self.buffers;
        let (heads, format) = (3, IndexFormat::DEEPSEEK_V32);
        let logits_bytes = 5 * 64 * 4;
        let indexer =
            LayerIndexer { format, num_heads: heads, input: Dtype::F32, max_seq_len: 64, logits_bytes };
        let own = OwnSelection {
            k: View::dense(rows, 1, 128),
            q: View::dense(rows, heads, 128),
            weights: View::dense(q, heads, 1),
            norm_weight: q,
            norm_bias: q,
            norm_eps: 1e-6,
            cos_sin,
            max_position: 64,
            cache: indexer.index(spec).view(k_nope),
            weight_scale: 0.05,
            indices: View::dense(v, 24, 1),
        };
        let args = MlaLayerArgs {
            expanded: None,
            selection: Selection::Own(own),
            ..layer_args(spec, &self.buffers)
        };
        let capacity = LayerCapacity { tokens: 16, decode_tokens: 16, ..LayerCapacity::default() };
        let options = LayerOptions { capacity, topk: 24, indexer: Some(indexer), ..LayerOptions::default() };
        visit.visit(*spec, &options, (batch, SplitPolicy::Auto), &args);
    }
}
