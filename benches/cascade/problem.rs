//! The buffers of a workload, each way to attend to it, and the check against the oracle.

use mla_support::reference::{LayerSequence, mla_layer};
use wgpu_mla::{
    Batch, Capacity, Dtype, GatherBatch, GatherRange, HeadDims, HeadProject, HeadProjectArgs, KvGather,
    KvGatherArgs, KvSpec, KvView, LayerCapacity, LayerOptions, LseBase, MergeStates, MergeStatesArgs,
    MlaDecode, MlaDecodeArgs, MlaLayer, MlaPrefill, MlaPrefillArgs, MlaShape, PageTable, Plan,
    PrefillOptions, PrefillSequence, Query, RopeLayout, SharedPrefix, SplitPolicy, View, WeightView,
};

use crate::support::Result;
use crate::support::device::{Layers, Timed};
use crate::support::paint::Paint;
use mla_support::close::{Tolerance, close};

const SCALE: f32 = 0.072_168_78;
const PAGE_SIZE: u32 = 64;

#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub sequences: u32,
    pub prefix: u32,
    pub context: u32,
    pub heads: u32,
    /// L, R, P, V.
    pub dims: [u32; 4],
    pub dtype: Dtype,
    /// Layers that are rotated, so that each misses the L2.
    pub layers: u32,
}

impl Shape {
    pub fn name(&self) -> String {
        let Self { sequences, prefix, context, heads, dtype, .. } = self;
        format!("{sequences} sequences sharing {prefix} of {context}, {heads} heads, {dtype}")
    }

    fn head_dims(&self) -> HeadDims {
        let [kv_lora_rank, _, qk_nope_head_dim, v_head_dim] = self.dims;
        HeadDims { num_heads: self.heads, kv_lora_rank, qk_nope_head_dim, v_head_dim }
    }

    fn shared_pages(&self) -> u32 {
        self.prefix / PAGE_SIZE
    }

    fn own_pages(&self) -> u32 {
        self.context.div_ceil(PAGE_SIZE) - self.shared_pages()
    }

    fn spec(&self) -> MlaDecode {
        let [latent, rope, ..] = self.dims;
        let num_pages = self.shared_pages() + self.sequences * self.own_pages();
        MlaDecode {
            shape: MlaShape { num_heads: self.heads, kv_lora_rank: latent, qk_rope_head_dim: rope },
            kv: KvSpec { layout: self.dtype.into(), page_size: PAGE_SIZE, num_pages },
            query: self.dtype,
            out: self.dtype,
        }
    }

    /// The pages of a sequence, from `first` on; consecutive pages are not adjacent in memory.
    fn pages(&self, sequence: u32, first: u32) -> Vec<i32> {
        let all = self.spec().kv.num_pages;
        let stride = if all.is_multiple_of(7919) { 1 } else { 7919 };
        let own = self.shared_pages() + sequence * self.own_pages();
        let of = |page: u32| if page < self.shared_pages() { page } else { own + page - self.shared_pages() };
        let pages = first..self.context.div_ceil(PAGE_SIZE);
        pages.map(|page| ((u64::from(of(page)) * stride + 13) % u64::from(all)) as i32).collect()
    }
}

/// What is timed, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// The absorbed decode over the prefix, once for each sequence.
    PrefixPerSequence,
    /// The prefix once in expanded form, its keys split into parts, and the merge of the parts.
    PrefixOnce,
    /// The parts without their merge.
    PrefixParts,
    /// The merge of all sets, the suffixes' included.
    Merge,
    /// The absorbed decode of the suffixes, each sequence's own tokens.
    Suffixes,
    /// The absorbed decode over the whole context, once for each sequence.
    DecodePerSequence,
    /// The same with the planner's shared prefixes.
    DecodeShared,
    Absorb,
    ValueUp,
    /// From the query's to the values' space: absorb, decode, v_up.
    StepPerSequence,
    StepShared,
    /// Absorb, prefix in parts, suffixes, v_up, merge.
    StepCascade,
    /// The one of these two that a layer chooses by their cost: `LayerFacts::attends_expanded`.
    StepChosen,
}

use What::*;

/// Each with the earlier one that its time is compared with.
pub const TIMED: [(What, Option<What>); 13] = [
    (PrefixPerSequence, None),
    (PrefixOnce, Some(PrefixPerSequence)),
    (PrefixParts, None),
    (Merge, None),
    (Suffixes, None),
    (DecodePerSequence, None),
    (DecodeShared, Some(DecodePerSequence)),
    (Absorb, None),
    (ValueUp, None),
    (StepPerSequence, None),
    (StepShared, Some(StepPerSequence)),
    (StepCascade, Some(StepPerSequence)),
    (StepChosen, Some(StepPerSequence)),
];

/// A layer's buffers.
struct Arrays<B> {
    q: B,
    kv: B,
    weight: B,
    ql_nope: B,
    latent: B,
    lse: B,
    /// Partial results and their LSEs: of the suffixes, then of each part of the prefix.
    sets: B,
    set_lse: B,
    /// The prefix, expanded: its rows, keys and values.
    rows: B,
    k_nope: B,
    v: B,
}

impl<B> Arrays<B> {
    fn new<D: Timed<Buffer = B>>(device: &D, shape: &Shape, num_parts: u32, paints: &Paints) -> Result<Self> {
        let Shape { sequences, prefix, heads, dims: [latent, rope, nope, value], dtype, .. } = *shape;
        let (spec, dims, bytes) = (shape.spec(), shape.head_dims(), dtype.bytes() as u64);
        let elems = |rows: u32, dim: u32| u64::from(rows) * u64::from(heads) * u64::from(dim);
        let room = |rows: u32, dim: u32| device.buffer(elems(rows, dim) * bytes);
        let sets = sequences * (num_parts + 1);
        let cache_elems = spec.kv.num_slots() * u64::from(latent + rope);
        let arrays = Self {
            q: device.painted(&paints.query, elems(sequences, nope + rope))?,
            kv: device.painted(&paints.cache, cache_elems)?,
            weight: device.painted(&paints.weight, elems(nope + value, latent))?,
            ql_nope: room(sequences, latent)?,
            latent: room(sequences, latent)?,
            lse: device.buffer(elems(sequences, 1) * 4)?,
            sets: room(sets, value)?,
            set_lse: device.buffer(elems(sets, 1) * 4)?,
            rows: device.buffer(u64::from(prefix) * u64::from(latent + rope) * bytes)?,
            k_nope: room(prefix, nope)?,
            v: room(prefix, value)?,
        };

        let batch = GatherBatch {
            pages: PageTable::Csr {
                kv_indptr: &[0, shape.shared_pages() as i32],
                kv_indices: &shape.pages(0, 0),
            },
            seq_lens: &[prefix as i32],
            ranges: &[GatherRange { sequence: 0, begin: 0, tokens: prefix, out_row: 0 }],
        };
        let kv = KvView::dense(&arrays.kv, &spec);
        device.once(
            KvGather { shape: spec.shape, kv: spec.kv, output: dtype },
            batch,
            &KvGatherArgs { kv, k_scale: 1.0, out: arrays.rows(shape) },
        )?;
        let x = View { head_stride: 0, ..arrays.rows(shape) };
        let up = |weight, y| HeadProjectArgs {
            x,
            weight,
            y,
            scale: 1.0,
            out_scale: 1.0,
            saturates: false,
            guard: None,
        };
        device.once(
            HeadProject::k_up(&dims, dtype, dtype, dtype),
            0..prefix,
            &up(WeightView::w_uk(&dims, &arrays.weight), View::dense(&arrays.k_nope, heads, nope)),
        )?;
        device.once(
            HeadProject::v_up(&dims, dtype, dtype, dtype),
            0..prefix,
            &up(WeightView::w_uv(&dims, &arrays.weight), View::dense(&arrays.v, heads, value)),
        )?;
        Ok(arrays)
    }

    fn q_nope(&self, shape: &Shape) -> View<&B> {
        let [_, rope, nope, _] = shape.dims;
        View::dense(&self.q, shape.heads, nope + rope)
    }

    fn q_pe(&self, shape: &Shape) -> View<&B> {
        View { offset: shape.dims[2].into(), ..self.q_nope(shape) }
    }

    fn rows(&self, shape: &Shape) -> View<&B> {
        View::dense(&self.rows, 1, shape.dims[0] + shape.dims[1])
    }
}

pub struct Problem<D: Timed> {
    shape: Shape,
    /// Over the prefix, the suffixes, the whole context, and the same with a shared prefix.
    decodes: [Layers<MlaDecode, D>; 4],
    absorb: Layers<HeadProject, D>,
    /// From latent outputs into the output, and into the sets.
    v_up: [Layers<HeadProject, D>; 2],
    prefill: Layers<MlaPrefill, D>,
    num_parts: u32,
    /// Whether a layer attends the prefix in expanded form.
    attends_expanded: bool,
    /// The merge of all sets, and the merge of the prefix's sets.
    merges: [Layers<MergeStates, D>; 2],
    out: D::Buffer,
    paints: Paints,
}

fn attends_expanded<D: Timed>(device: &D, shape: &Shape) -> Result<bool> {
    let (spec, [_, _, qk_nope_head_dim, v_head_dim]) = (shape.spec(), shape.dims);
    let layer = MlaLayer {
        shape: spec.shape,
        qk_nope_head_dim,
        v_head_dim,
        kv: spec.kv,
        dtype: shape.dtype,
        query: shape.dtype,
        weight: shape.dtype,
        out: shape.dtype,
        rope: RopeLayout::Interleaved,
        decode_threshold: 1,
        workspace_bytes: 1 << 24,
    };
    let capacity = LayerCapacity { tokens: 1, decode_tokens: 1, ..LayerCapacity::default() };
    let compiled = device.compile_with(layer, &LayerOptions { capacity, ..Default::default() })?;
    Ok(compiled.facts().attends_expanded(shape.sequences, shape.prefix))
}

struct Paints {
    query: Paint,
    cache: Paint,
    weight: Paint,
}

const PREFIX: usize = 0;
const SUFFIX: usize = 1;
const WHOLE: usize = 2;
const SHARED: usize = 3;

impl<D: Timed> Problem<D> {
    pub fn new(device: &D, shape: &Shape, variant: Option<&str>, parts: Option<u32>) -> Result<Self> {
        let Shape { sequences, prefix, context, heads, dims: [latent, rope, nope, value], dtype, .. } =
            *shape;
        let dims = shape.head_dims();
        let prefill_spec = MlaPrefill {
            num_heads: heads,
            qk_nope_head_dim: nope,
            qk_rope_head_dim: rope,
            v_head_dim: value,
            dtype,
            out: dtype,
        };
        let options = match variant {
            Some(name) => PrefillOptions { variant: Some(name.into()), ..Default::default() },
            None => PrefillOptions { query_tokens: sequences, ..Default::default() },
        };
        let prefill = device.compile_with(prefill_spec, &options)?;
        let num_parts = parts.unwrap_or(prefill.facts().key_parts(sequences, prefix));

        let elems = |rows: u32, dim: u32| u64::from(rows) * u64::from(heads) * u64::from(dim);
        let out = device.buffer(elems(sequences, value) * dtype.bytes() as u64)?;
        let (query, cache, weight) = (Paint::query(dtype), Paint::new(dtype), Paint::new(dtype));
        let paints = Paints { query, cache, weight };
        let arrays = (0..shape.layers).map(|_| Arrays::new(device, shape, num_parts, &paints));
        let arrays = arrays.collect::<Result<Vec<_>>>()?;

        let view = |buffer, dim: u32| View::dense(buffer, heads, dim);
        let out_view = view(&out, value);
        let spec = shape.spec();
        let decodes = |first: u32, end: u32, shared: &[SharedPrefix]| -> Result<Layers<MlaDecode, D>> {
            let decode = device.compile(spec)?;
            let lens = vec![(end - first) as i32; sequences as usize];
            let starts: Vec<i32> = (0..=sequences as i32).collect();
            let batch = Batch { shared_prefixes: shared, ..Batch::new(&lens, &starts) };
            let plan = Plan::new(&spec, &decode.tiling(), &batch, SplitPolicy::Auto)?;
            let pages: Vec<_> =
                (0..sequences).map(|sequence| shape.pages(sequence, first / PAGE_SIZE)).collect();
            let (max_pages, table) = (pages[0].len(), pages.concat());
            let pages = PageTable::Dense { block_table: &table, max_pages: max_pages as u32 };
            let layers = arrays.iter().map(|layer| MlaDecodeArgs {
                query: Query::Split { q_nope: view(&layer.ql_nope, latent), q_pe: layer.q_pe(shape) },
                kv: KvView::dense(&layer.kv, &spec),
                out: view(&layer.latent, latent),
                lse: view(if first > 0 { &layer.set_lse } else { &layer.lse }, 1),
                lse_base: LseBase::E,
                softmax_scale: SCALE,
                k_scale: 1.0,
                q_scale: 1.0,
                indices: None,
                attn_sink: None,
            });
            Ok(Layers::new(decode, Capacity::of(&plan), (&plan, pages), layers)?)
        };
        let group = SharedPrefix { sequences: (0..sequences).collect(), tokens: prefix };
        let decodes = [
            decodes(0, prefix, &[])?,
            decodes(prefix, context, &[])?,
            decodes(0, context, &[])?,
            decodes(0, context, &[group])?,
        ];

        let absorb = arrays.iter().map(|layer| HeadProjectArgs {
            x: layer.q_nope(shape),
            weight: WeightView::w_uk(&dims, &layer.weight),
            y: view(&layer.ql_nope, latent),
            scale: 1.0,
            out_scale: 1.0,
            saturates: false,
            guard: None,
        });
        let absorb_spec = HeadProject::absorb(&dims, dtype, dtype, dtype);
        let absorb = Layers::new(device.compile(absorb_spec)?, sequences, 0..sequences, absorb)?;
        let v_up = |into_sets: bool| {
            let layers = arrays.iter().map(|layer| HeadProjectArgs {
                x: view(&layer.latent, latent),
                weight: WeightView::w_uv(&dims, &layer.weight),
                y: if into_sets { view(&layer.sets, value) } else { out_view },
                scale: 1.0,
                out_scale: 1.0,
                saturates: false,
                guard: None,
            });
            let v_up = device.compile(HeadProject::v_up(&dims, dtype, dtype, dtype))?;
            Layers::new(v_up, sequences, 0..sequences, layers)
        };
        let v_up = [v_up(false)?, v_up(true)?];

        // Set 0 is for the suffixes.
        let all = PrefillSequence { out_begin: sequences, ..PrefillSequence::full(0, sequences, 0, prefix) };
        let split: Vec<_> = all.split_keys(num_parts, sequences).collect();
        let tiles = num_parts * sequences.div_ceil(prefill.facts().rows);
        let layers = arrays.iter().map(|layer| MlaPrefillArgs {
            q_nope: layer.q_nope(shape),
            q_pe: layer.q_pe(shape),
            k_nope: view(&layer.k_nope, nope),
            k_pe: View { offset: latent.into(), head_stride: 0, ..layer.rows(shape) },
            v: view(&layer.v, value),
            out: view(&layer.sets, value),
            lse: view(&layer.set_lse, 1),
            softmax_scale: SCALE,
            v_scale: 1.0,
        });
        let prefill = Layers::new(prefill, tiles, &split, layers)?;
        let merge = |first: u64, num_sets: u32| {
            let (set_stride, lse_set_stride) = (elems(sequences, value), elems(sequences, 1));
            let layers = arrays.iter().map(|layer| MergeStatesArgs {
                states: View { offset: first * set_stride, ..view(&layer.sets, value) },
                set_stride,
                lse: View { offset: first * lse_set_stride, ..view(&layer.set_lse, 1) },
                lse_set_stride,
                output: out_view,
                output_lse: None,
                lse_base: LseBase::E,
                num_heads: heads,
                output_scale: 1.0,
            });
            let merge = device.compile(MergeStates { dtype, head_size: value })?;
            Layers::new(merge, sequences, (0..sequences, num_sets), layers)
        };
        let merges = [merge(0, num_parts + 1)?, merge(1, num_parts)?];
        let attends_expanded = attends_expanded(device, shape)?;
        let shape = *shape;
        Ok(Self { shape, decodes, absorb, v_up, prefill, num_parts, attends_expanded, merges, out, paints })
    }

    pub fn describe(&self) -> String {
        let (variant, parts) = (self.prefill.op.variant(), self.num_parts);
        let chosen = if self.attends_expanded { StepCascade } else { StepPerSequence };
        let decode = self.decodes[WHOLE].op.variant();
        format!("prefix by {variant} in {parts} parts, decodes by {decode}; a layer chooses {chosen:?}")
    }

    pub fn record(&self, what: What, recorder: &mut D::Recorder<'_>, call: usize) -> wgpu_mla::Result<()> {
        match what {
            PrefixPerSequence => self.decodes[PREFIX].record(recorder, call),
            PrefixParts => self.prefill.record(recorder, call),
            Merge => self.merges[0].record(recorder, call),
            PrefixOnce => {
                self.prefill.record(recorder, call)?;
                self.merges[1].record(recorder, call)
            }
            Suffixes => self.decodes[SUFFIX].record(recorder, call),
            DecodePerSequence => self.decodes[WHOLE].record(recorder, call),
            DecodeShared => self.decodes[SHARED].record(recorder, call),
            Absorb => self.absorb.record(recorder, call),
            ValueUp => self.v_up[0].record(recorder, call),
            StepPerSequence | StepShared => {
                self.absorb.record(recorder, call)?;
                self.decodes[if what == StepShared { SHARED } else { WHOLE }].record(recorder, call)?;
                self.v_up[0].record(recorder, call)
            }
            StepChosen if self.attends_expanded => self.record(StepCascade, recorder, call),
            StepChosen => self.record(StepPerSequence, recorder, call),
            StepCascade => {
                self.absorb.record(recorder, call)?;
                self.prefill.record(recorder, call)?;
                self.decodes[SUFFIX].record(recorder, call)?;
                self.v_up[1].record(recorder, call)?;
                self.merges[0].record(recorder, call)
            }
        }
    }

    /// Compares some rows of each way with the oracle.
    pub fn check(&self, device: &D) -> Result<String> {
        let Shape { sequences, heads, dims: [.., value], dtype, .. } = self.shape;
        let rows = [(0, 0), (sequences as usize - 1, heads as usize - 1)];
        let value = value as usize;
        let whole: Vec<f64> = rows.iter().flat_map(|&row| self.expected(row, self.shape.context)).collect();
        let prefix: Vec<f64> = rows.iter().flat_map(|&row| self.expected(row, self.shape.prefix)).collect();
        let mut worst = 0f64;
        for what in [StepPerSequence, StepShared, StepCascade, PrefixOnce] {
            for layer in 0..self.shape.layers as usize {
                let bytes = u64::from(sequences * heads) * value as u64 * dtype.bytes() as u64;
                device.upload(&self.out, 0, &vec![0; bytes as usize])?;
                device.submit(|mut recorder| self.record(what, &mut recorder, layer))?;
                let out = dtype.decode_all(&device.download(&self.out, bytes)?);
                let got: Vec<f32> = rows
                    .iter()
                    .flat_map(|&(token, head)| &out[(token * heads as usize + head) * value..][..value])
                    .copied()
                    .collect();
                let want = if what == PrefixOnce { &prefix } else { &whole };
                let tolerance = Tolerance::decode(dtype, dtype, dtype, true, 1.0, 1);
                let report = close(&format!("{what:?}"), &got, want, &tolerance).into_result()?;
                worst = worst.max(report.worst_ratio);
            }
        }
        Ok(format!("{:.0} % of the allowed error", 100.0 * worst))
    }

    /// A row of the output over the first `visible` tokens.
    fn expected(&self, (token, head): (usize, usize), visible: u32) -> Vec<f64> {
        let [latent, rope, nope, value] = self.shape.dims.map(|dim| dim as usize);
        let some = |paint: &Paint, at: usize, count: usize| -> Vec<f64> {
            (at..at + count).map(|i| f64::from(paint.at(i as u64))).collect()
        };
        let query =
            some(&self.paints.query, (token * self.shape.heads as usize + head) * (nope + rope), nope + rope);
        let pages = self.shape.pages(token as u32, 0);
        let page = PAGE_SIZE as usize * (latent + rope);
        let rows: Vec<f64> =
            pages.iter().flat_map(|&id| some(&self.paints.cache, id as usize * page, page)).collect();
        mla_layer(&LayerSequence {
            num_heads: 1,
            kv_lora_rank: latent,
            qk_rope_head_dim: rope,
            qk_nope_head_dim: nope,
            v_head_dim: value,
            q_nope: &query[..nope],
            q_pe: &query[nope..],
            rows: &rows,
            kv_b_proj: &some(&self.paints.weight, head * (nope + value) * latent, (nope + value) * latent),
            visible: &[visible as usize],
            softmax_scale: SCALE.into(),
        })
    }
}
