//! The buffers of a workload, each way to attend it, and their check against the oracle.

use mla_support::reference::{LayerSequence, mla_layer};
use wgpu_mla::gpu::ops::{
    HeadProject, MergeSetsBinding, MergeSetsStep, MergeStateSets, MlaPrefill, PrefillBinding, PrefillStep,
    ProjectBinding, ProjectStep,
};
use wgpu_mla::gpu::{Gpu, LayerBinding, MlaDecode, Options, Step};
use wgpu_mla::{
    Backend, Batch, Capacity, Dtype, Gather, GatherRange, GatherSpec, HeadDims, KvSpec, KvView, Layer,
    LseBase, MergeStatesSpec, MlaShape, MlaSpec, PageTable, Plan, Policy, Prefill, PrefillSequence,
    PrefillSpec, Project, ProjectSpec, Query, SharedPrefix, StateSets, View, WeightView, wgpu,
};

use crate::support::Result;
use crate::support::paint::{Canvas, Paint};
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
    /// That take turns, so that none finds its own in a cache.
    pub layers: u32,
}

impl Shape {
    pub fn name(&self) -> String {
        let Self { sequences, prefix, context, heads, dtype, .. } = self;
        format!("{sequences} sequences sharing {prefix} of {context}, {heads} heads, {dtype}")
    }

    fn shared_pages(&self) -> u32 {
        self.prefix / PAGE_SIZE
    }

    fn own_pages(&self) -> u32 {
        self.context.div_ceil(PAGE_SIZE) - self.shared_pages()
    }

    fn spec(&self) -> MlaSpec {
        let [latent, rope, ..] = self.dims;
        let num_pages = self.shared_pages() + self.sequences * self.own_pages();
        MlaSpec {
            shape: MlaShape { num_heads: self.heads, kv_lora_rank: latent, qk_rope_head_dim: rope },
            kv: KvSpec { dtype: self.dtype, page_size: PAGE_SIZE, num_pages },
            query: self.dtype,
            out: self.dtype,
        }
    }

    /// The pages of a sequence, from `first` on; neighbours are no neighbours.
    fn pages(&self, sequence: u32, first: u32) -> Vec<i32> {
        let all = self.spec().kv.num_pages;
        let stride = if all.is_multiple_of(7919) { 1 } else { 7919 };
        let own = self.shared_pages() + sequence * self.own_pages();
        let of = |page: u32| if page < self.shared_pages() { page } else { own + page - self.shared_pages() };
        let pages = first..self.context.div_ceil(PAGE_SIZE);
        pages.map(|page| ((u64::from(of(page)) * stride + 13) % u64::from(all)) as i32).collect()
    }
}

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// The absorbed decode over the prefix, each sequence for itself.
    PrefixPerSequence,
    /// The prefix in parts, and their merge.
    PrefixOnce,
    /// Those two.
    PrefixParts,
    Merge,
    /// The absorbed decode of what sequences have for themselves.
    Suffixes,
    /// The absorbed decode over all, each sequence for itself.
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
}

use What::*;

/// Each with what it is compared with, which comes before it.
pub const TIMED: [(What, Option<What>); 12] = [
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
];

/// A plan of decodes.
struct Decodes {
    decode: MlaDecode,
    step: Step,
}

impl Decodes {
    fn new(gpu: &Gpu, shape: &Shape, first: u32, end: u32, shared: &[SharedPrefix]) -> Result<Self> {
        let spec = shape.spec();
        let decode = MlaDecode::new(&gpu.pipelines, &spec, &Options::default())?;
        let lens = vec![(end - first) as i32; shape.sequences as usize];
        let starts: Vec<i32> = (0..=shape.sequences as i32).collect();
        let batch = Batch { shared_prefixes: shared, ..Batch::new(&lens, &starts) };
        let plan = Plan::new(&spec, &decode.tiling(), &batch, Policy::Auto)?;
        let mut step = decode.step(Capacity::of(&plan))?;
        let pages: Vec<_> =
            (0..shape.sequences).map(|sequence| shape.pages(sequence, first / PAGE_SIZE)).collect();
        let (max_pages, table) = (pages[0].len(), pages.concat());
        decode.prepare(&gpu.queue, &mut step, &plan, PageTable::Dense { block_table: &table, max_pages })?;
        Ok(Self { decode, step })
    }
}

/// A layer of the model.
struct Bound {
    absorb: ProjectBinding,
    /// From latent outputs into the output, and into the sets.
    v_up: [ProjectBinding; 2],
    /// Of each plan, in the order of [`Problem::decodes`].
    decodes: Vec<LayerBinding>,
    prefill: PrefillBinding,
    /// Of all sets, and of those of the prefix.
    merges: [MergeSetsBinding; 2],
    _buffers: Vec<wgpu::Buffer>,
}

pub struct Problem {
    shape: Shape,
    decodes: [Decodes; 4],
    absorb: HeadProject,
    v_up: HeadProject,
    tokens: ProjectStep,
    prefill: MlaPrefill,
    parts: PrefillStep,
    num_parts: u32,
    merge: MergeStateSets,
    merges: [MergeSetsStep; 2],
    layers: Vec<Bound>,
    out: wgpu::Buffer,
    query: Paint,
    cache: Paint,
    weight: Paint,
}

const PREFIX: usize = 0;
const SUFFIX: usize = 1;
const WHOLE: usize = 2;
const SHARED: usize = 3;

impl Problem {
    pub fn new(gpu: &Gpu, shape: &Shape, row: Option<&str>, parts: Option<u32>) -> Result<Self> {
        let Shape { sequences, prefix, context, heads, dims: [latent, rope, nope, value], dtype, .. } =
            *shape;
        let dims =
            HeadDims { num_heads: heads, kv_lora_rank: latent, qk_nope_head_dim: nope, v_head_dim: value };
        let group = SharedPrefix { sequences: (0..sequences).collect(), tokens: prefix };
        let decodes = [
            Decodes::new(gpu, shape, 0, prefix, &[])?,
            Decodes::new(gpu, shape, prefix, context, &[])?,
            Decodes::new(gpu, shape, 0, context, &[])?,
            Decodes::new(gpu, shape, 0, context, &[group])?,
        ];
        let prefill_spec = PrefillSpec {
            num_heads: heads,
            qk_nope_head_dim: nope,
            qk_rope_head_dim: rope,
            v_head_dim: value,
            dtype,
            out: dtype,
        };
        let prefill = match row {
            Some(row) => MlaPrefill::with_variant(&gpu.pipelines, prefill_spec, Some(row))?,
            None => MlaPrefill::for_queries(&gpu.pipelines, prefill_spec, sequences)?,
        };
        let num_parts = parts.unwrap_or(prefill.key_parts(sequences, prefix));
        // Set 0 is for the suffixes.
        let all = PrefillSequence { out_begin: sequences, ..PrefillSequence::all(0, sequences, 0, prefix) };
        let split: Vec<_> = all.split_keys(num_parts, sequences).collect();
        let mut parts = PrefillStep::default();
        prefill.prepare(&gpu.device, &gpu.queue, &mut parts, &split)?;
        let merge = MergeStateSets::new(&gpu.pipelines, MergeStatesSpec { dtype, head_size: value })?;
        let mut merges = [MergeSetsStep::default(), MergeSetsStep::default()];
        for (step, sets) in merges.iter_mut().zip([num_parts + 1, num_parts]) {
            merge.prepare(&gpu.device, &gpu.queue, step, 0..sequences, sets)?;
        }
        let project = |spec| HeadProject::new(&gpu.pipelines, spec);
        let absorb = project(ProjectSpec::absorb(&dims, dtype, dtype, dtype))?;
        let v_up = project(ProjectSpec::v_up(&dims, dtype, dtype, dtype))?;
        let mut tokens = ProjectStep::default();
        absorb.prepare(&gpu.device, &gpu.queue, &mut tokens, 0, sequences)?;
        let rows = u64::from(sequences) * u64::from(heads);
        let out = gpu.buffer(rows * u64::from(value) * dtype.bytes() as u64)?;
        let (query, cache, weight) = (Paint::query(dtype), Paint::new(dtype), Paint::new(dtype));
        let mut problem = Self {
            shape: *shape,
            decodes,
            absorb,
            v_up,
            tokens,
            prefill,
            parts,
            num_parts,
            merge,
            merges,
            layers: Vec::new(),
            out,
            query,
            cache,
            weight,
        };
        for _ in 0..shape.layers {
            let layer = problem.layer(gpu, &dims)?;
            problem.layers.push(layer);
        }
        Ok(problem)
    }

    fn layer(&self, gpu: &Gpu, dims: &HeadDims) -> Result<Bound> {
        let Shape { sequences, prefix, heads, dims: [latent, rope, nope, value], dtype, .. } = self.shape;
        let (spec, device, bytes) = (self.shape.spec(), &gpu.device, dtype.bytes() as u64);
        let elems = |rows: u32, dim: u32| u64::from(rows) * u64::from(heads) * u64::from(dim);
        let room = |rows: u32, dim: u32| gpu.buffer(elems(rows, dim) * bytes);
        let q = gpu.painted(&self.query, elems(sequences, nope + rope))?;
        let cache_elems = spec.kv.num_slots() * u64::from(latent + rope);
        let kv = gpu.painted(&self.cache, cache_elems)?;
        let weight = gpu.painted(&self.weight, elems(nope + value, latent))?;
        let (ql_nope, latent_out) = (room(sequences, latent)?, room(sequences, latent)?);
        let sets = room(sequences * (self.num_parts + 1), value)?;
        let (lse, set_lse) = (
            gpu.buffer(elems(sequences, 1) * 4)?,
            gpu.buffer(elems(sequences * (self.num_parts + 1), 1) * 4)?,
        );

        // The prefix, expanded.
        let rows = gpu.buffer(u64::from(prefix) * u64::from(latent + rope) * bytes)?;
        let (k_nope, v) = (room(prefix, nope)?, room(prefix, value)?);
        let rows_view = View::dense(&rows, 1, latent + rope);
        gpu.kv_gather(
            &GatherSpec { shape: spec.shape, kv: spec.kv, output: dtype },
            PageTable::Csr {
                kv_indptr: &[0, self.shape.shared_pages() as i32],
                kv_indices: &self.shape.pages(0, 0),
            },
            &[prefix as i32],
            &[GatherRange { sequence: 0, begin: 0, tokens: prefix, out_row: 0 }],
            &Gather { kv: KvView::dense(&kv, &spec), k_scale: 1.0, out: rows_view },
        )?;
        let (w_uk, w_uv) = (WeightView::w_uk(dims, &weight), WeightView::w_uv(dims, &weight));
        let x = View { head_stride: 0, ..rows_view };
        let up = |weight, y| Project { x, weight, y, num_tokens: prefix };
        gpu.project(
            &ProjectSpec::k_up(dims, dtype, dtype, dtype),
            &up(w_uk, View::dense(&k_nope, heads, nope)),
        )?;
        gpu.project(&ProjectSpec::v_up(dims, dtype, dtype, dtype), &up(w_uv, View::dense(&v, heads, value)))?;

        let q_nope = View::dense(&q, heads, nope + rope);
        let q_pe = View { offset: nope.into(), ..q_nope };
        let latent_view = View::dense(&latent_out, heads, latent);
        let decode = |lse| Layer {
            query: Query::Split { q_nope: View::dense(&ql_nope, heads, latent), q_pe },
            kv: KvView::dense(&kv, &spec),
            out: latent_view,
            lse: View::dense(lse, heads, 1),
            lse_base: LseBase::E,
            softmax_scale: SCALE,
            k_scale: 1.0,
            q_scale: 1.0,
        };
        let decodes = self.decodes.iter().enumerate().map(|(i, decodes)| {
            decodes.decode.bind(sequences, &decode(if i == SUFFIX { &set_lse } else { &lse }))
        });
        let (states, set_view) = (View::dense(&sets, heads, value), View::dense(&set_lse, heads, 1));
        let project = |x, weight, y| Project { x, weight, y, num_tokens: sequences };
        let out = View::dense(&self.out, heads, value);
        let merges = |first: u64, num_sets| {
            let (set_stride, lse_set_stride) = (elems(sequences, value), elems(sequences, 1));
            let args = StateSets {
                states: View { offset: first * set_stride, ..states },
                set_stride,
                lse: View { offset: first * lse_set_stride, ..set_view },
                lse_set_stride,
                output: out,
                output_lse: None,
                num_sets,
                num_tokens: sequences,
                num_heads: heads,
            };
            self.merge.bind(device, &args)
        };
        let prefill = Prefill {
            q_nope,
            q_pe,
            k_nope: View::dense(&k_nope, heads, nope),
            k_pe: View { offset: latent.into(), head_stride: 0, ..rows_view },
            v: View::dense(&v, heads, value),
            out: states,
            lse: set_view,
            softmax_scale: SCALE,
        };
        Ok(Bound {
            absorb: self.absorb.bind(device, &project(q_nope, w_uk, View::dense(&ql_nope, heads, latent)))?,
            v_up: [
                self.v_up.bind(device, &project(latent_view, w_uv, out))?,
                self.v_up.bind(device, &project(latent_view, w_uv, states))?,
            ],
            decodes: decodes.collect::<std::result::Result<_, _>>()?,
            prefill: self.prefill.bind(device, &prefill, self.parts.extent())?,
            merges: [merges(0, self.num_parts + 1)?, merges(1, self.num_parts)?],
            _buffers: vec![q, kv, weight, ql_nope, latent_out, sets, lse, set_lse, rows, k_nope, v],
        })
    }

    pub fn describe(&self) -> String {
        let (row, parts) = (self.prefill.variant(), self.num_parts);
        format!(
            "prefix by row {row} in {parts} parts, decodes by row {}",
            self.decodes[WHOLE].decode.variant()
        )
    }

    pub fn record(&self, what: What, pass: &mut wgpu::ComputePass<'_>, call: usize) {
        let layer = &self.layers[call % self.layers.len()];
        let decode = |pass: &mut wgpu::ComputePass<'_>, plan: usize| {
            self.decodes[plan].decode.record_in(pass, &self.decodes[plan].step, &layer.decodes[plan]);
        };
        let parts =
            |pass: &mut wgpu::ComputePass<'_>| self.prefill.record_in(pass, &self.parts, &layer.prefill);
        let merge = |pass: &mut wgpu::ComputePass<'_>, i: usize| {
            self.merge.record_in(pass, &self.merges[i], &layer.merges[i])
        };
        let absorb =
            |pass: &mut wgpu::ComputePass<'_>| self.absorb.record_in(pass, &self.tokens, &layer.absorb);
        let v_up = |pass: &mut wgpu::ComputePass<'_>, to: usize| {
            self.v_up.record_in(pass, &self.tokens, &layer.v_up[to])
        };
        match what {
            PrefixPerSequence => decode(pass, PREFIX),
            PrefixParts => parts(pass),
            Merge => merge(pass, 0),
            PrefixOnce => {
                parts(pass);
                merge(pass, 1);
            }
            Suffixes => decode(pass, SUFFIX),
            DecodePerSequence => decode(pass, WHOLE),
            DecodeShared => decode(pass, SHARED),
            Absorb => absorb(pass),
            ValueUp => v_up(pass, 0),
            StepPerSequence | StepShared => {
                absorb(pass);
                decode(pass, if what == StepShared { SHARED } else { WHOLE });
                v_up(pass, 0);
            }
            StepCascade => {
                absorb(pass);
                parts(pass);
                decode(pass, SUFFIX);
                v_up(pass, 1);
                merge(pass, 0);
            }
        }
    }

    /// Compares some rows of each way with the oracle.
    pub fn check(&self, gpu: &Gpu) -> Result<String> {
        let Shape { sequences, heads, dims: [.., value], dtype, .. } = self.shape;
        let rows = [(0, 0), (sequences as usize - 1, heads as usize - 1)];
        let value = value as usize;
        let whole: Vec<f64> = rows.iter().flat_map(|&row| self.expected(row, self.shape.context)).collect();
        let prefix: Vec<f64> = rows.iter().flat_map(|&row| self.expected(row, self.shape.prefix)).collect();
        let mut worst = 0f64;
        for what in [StepPerSequence, StepShared, StepCascade, PrefixOnce] {
            for layer in 0..self.layers.len() {
                let mut encoder = gpu.device.create_command_encoder(&Default::default());
                encoder.clear_buffer(&self.out, 0, None);
                self.record(what, &mut encoder.begin_compute_pass(&Default::default()), layer);
                gpu.queue.submit([encoder.finish()]);
                let bytes = u64::from(sequences * heads) * value as u64 * dtype.bytes() as u64;
                let out = dtype.decode_all(&gpu.download(&self.out, bytes)?);
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
            some(&self.query, (token * self.shape.heads as usize + head) * (nope + rope), nope + rope);
        let pages = self.shape.pages(token as u32, 0);
        let page = PAGE_SIZE as usize * (latent + rope);
        let rows: Vec<f64> =
            pages.iter().flat_map(|&id| some(&self.cache, id as usize * page, page)).collect();
        mla_layer(&LayerSequence {
            num_heads: 1,
            kv_lora_rank: latent,
            qk_rope_head_dim: rope,
            qk_nope_head_dim: nope,
            v_head_dim: value,
            q_nope: &query[..nope],
            q_pe: &query[nope..],
            rows: &rows,
            kv_b_proj: &some(&self.weight, head * (nope + value) * latent, (nope + value) * latent),
            visible: &[visible as usize],
            softmax_scale: SCALE.into(),
        })
    }
}
