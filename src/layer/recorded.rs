//! The layer as an op made of ops: the same for every device that has them, recorded.

use super::plan::{Chunk, LayerBatch, LayerPlan, Target};
use super::workspace::Workspace;
use super::{Expanded, LayerArgs, LayerCapacity, LayerFacts, LayerOptions, MlaLayerSpec};
use crate::ops::op::{Binding, Compiled, Device, Kernel, Step};
use crate::ops::variants::{Candidate, Choice};
use crate::ops::{
    AppendLayer, AppendSpec, DecodeOptions, Gather, GatherBatch, GatherSpec, Layer, LseBase,
    MergeAttnStatesSpec, MergeStates, MergeStatesSpec, Prefill, PrefillExtent, PrefillOptions, PrefillSpec,
    Project, ProjectSpec, Query, RopeAppend, RopeAppendSpec, SetsExtent, StateSets, WeightView,
};
use crate::tables::{Capacity, PageTable};
use crate::view::View;
use crate::{Error, MlaSpec, Policy, Result};

/// A device that runs the ops of a layer itself.
pub trait Composes:
    Device
    + Kernel<AppendSpec>
    + Kernel<RopeAppendSpec>
    + Kernel<ProjectSpec>
    + Kernel<MlaSpec>
    + Kernel<GatherSpec>
    + Kernel<PrefillSpec>
    + Kernel<MergeAttnStatesSpec>
    + Kernel<MergeStatesSpec>
{
}

impl Composes for crate::cpu::Cpu {}
#[cfg(feature = "cuda")]
impl Composes for crate::cuda::Cuda {}
#[cfg(feature = "wgpu")]
impl Composes for crate::gpu::Gpu {}

/// With a rotary part, or without.
#[derive(Debug)]
enum Append<R, P> {
    Rotated(R),
    Plain(P),
}

/// The ops of a layer, and what lies between them. All layers of a model share it.
#[derive(Debug)]
pub struct Ops<D: Composes> {
    append: Append<Compiled<RopeAppendSpec, D>, Compiled<AppendSpec, D>>,
    absorb: Compiled<ProjectSpec, D>,
    k_up: Compiled<ProjectSpec, D>,
    v_up: Compiled<ProjectSpec, D>,
    decode: Compiled<MlaSpec, D>,
    gather: Compiled<GatherSpec, D>,
    prefill: Compiled<PrefillSpec, D>,
    merge: Compiled<MergeAttnStatesSpec, D>,
    /// `None` without room for any.
    prefixes: Option<Prefixes<D>>,
    /// What a merge of two states is recorded with: it has nothing that changes with a step.
    merge_step: Step<MergeAttnStatesSpec, D>,
    space: Workspace<D::Buffer>,
    capacity: LayerCapacity,
}

/// The ops of decodes that attend expanded prefixes.
#[derive(Debug)]
struct Prefixes<D: Composes> {
    prefill: Compiled<PrefillSpec, D>,
    merge: Compiled<MergeStatesSpec, D>,
    /// What the decodes attend alone, and as many parts of a prefix as there is room for.
    num_sets: u32,
}

/// A step's tables. They grow as needed.
#[derive(Debug)]
pub struct Steps<D: Composes> {
    append: Append<Step<RopeAppendSpec, D>, Step<AppendSpec, D>>,
    decode: Step<MlaSpec, D>,
    plan: LayerPlan,
    /// As many as there are runs of decoded tokens, or more from an earlier step.
    decoded: Vec<Step<ProjectSpec, D>>,
    chunks: Vec<ChunkStep<D>>,
    prefixes: Option<PrefixesStep<D>>,
    /// What was recorded before serves as long as these are what they were: runs of decoded tokens, and whether they attend prefixes;
    /// rounds of each chunk, and whether each is merged; and the capacity of every step.
    shape: Vec<u64>,
    generation: u64,
}

/// Like the plan's chunk of the same index.
#[derive(Debug)]
struct ChunkStep<D: Composes> {
    gather: Step<GatherSpec, D>,
    rows: Step<ProjectSpec, D>,
    /// What a round's sequences attend that begin, and that go on.
    rounds: Vec<[Step<PrefillSpec, D>; 2]>,
}

#[derive(Debug)]
struct PrefixesStep<D: Composes> {
    parts: Step<PrefillSpec, D>,
    /// As many as there are runs of decoded tokens, or more from an earlier step.
    merges: Vec<Step<MergeStatesSpec, D>>,
}

/// One layer's buffers, bound to each op.
#[derive(Debug)]
pub struct Bindings<D: Composes> {
    append: Append<Binding<RopeAppendSpec, D>, Binding<AppendSpec, D>>,
    absorb: Binding<ProjectSpec, D>,
    decode: Binding<MlaSpec, D>,
    v_up: Binding<ProjectSpec, D>,
    gather: Binding<GatherSpec, D>,
    rows: [Binding<ProjectSpec, D>; 2],
    /// Into the output, what takes turns with it, and what is merged.
    prefill: [Binding<PrefillSpec, D>; 3],
    /// From the output, and from what takes turns with it.
    merge: [Binding<MergeAttnStatesSpec, D>; 2],
    prefixes: Option<BoundPrefixes<D>>,
}

#[derive(Debug)]
struct BoundPrefixes<D: Composes> {
    v_up: Binding<ProjectSpec, D>,
    parts: Binding<PrefillSpec, D>,
    merge: Binding<MergeStatesSpec, D>,
}

impl<D: Composes> Kernel<MlaLayerSpec> for D {
    type Kernels = Ops<D>;
    type Step = Steps<D>;
    type Binding = Bindings<D>;

    /// Those of its decode.
    fn kernel_variants(&self, spec: &MlaLayerSpec) -> Vec<Candidate> {
        self.variants(&spec.mla())
    }

    fn kernel_compile(
        &self,
        spec: &MlaLayerSpec,
        options: &LayerOptions,
    ) -> Result<(Ops<D>, LayerFacts, Choice)> {
        let ops = Ops::new(self, spec, options)?;
        let facts = LayerFacts { tiling: ops.decode.tiling(), workspace_bytes: ops.space.chunk_bytes() };
        let choice = Choice {
            variant: ops.decode.variant(),
            why: format!("decode {}; prefill {}", ops.decode.why(), ops.prefill.why()),
            rounds_weights: ops.decode.rounds_weights() || ops.prefill.rounds_weights(),
        };
        Ok((ops, facts, choice))
    }

    fn kernel_step(&self, _: &MlaLayerSpec, ops: &Ops<D>, decode: Capacity) -> Result<Steps<D>> {
        Ok(Steps {
            append: match &ops.append {
                Append::Rotated(append) => Append::Rotated(append.step(ops.capacity.tokens)?),
                Append::Plain(append) => Append::Plain(append.step(ops.capacity.tokens)?),
            },
            decode: ops.decode.step(decode)?,
            plan: LayerPlan::default(),
            decoded: Vec::new(),
            chunks: Vec::new(),
            prefixes: match &ops.prefixes {
                Some(prefixes) => Some(PrefixesStep { parts: prefixes.prefill.step(0)?, merges: Vec::new() }),
                None => None,
            },
            shape: Vec::new(),
            generation: 0,
        })
    }

    fn kernel_capacity(step: &Steps<D>) -> Capacity {
        step.decode.capacity()
    }

    fn kernel_prepare(
        &self,
        spec: &MlaLayerSpec,
        ops: &Ops<D>,
        step: &mut Steps<D>,
        (batch, policy): (&LayerBatch<'_>, Policy),
    ) -> Result<LayerCapacity> {
        let plan = LayerPlan::new(spec, &ops.decode.tiling(), batch, policy)?;
        let used = plan.used(batch);
        ops.capacity.check_holds(&used)?;
        match (&ops.append, &mut step.append) {
            (Append::Rotated(append), Append::Rotated(step)) => append.prepare(step, batch.slot_mapping)?,
            (Append::Plain(append), Append::Plain(step)) => append.prepare(step, batch.slot_mapping)?,
            _ => return Err(MIXED),
        }
        if !plan.positions.is_empty() {
            self.upload(&ops.space.positions, 0, bytemuck::cast_slice(&plan.positions))?;
        }
        step.plan = plan;
        step.prepare_decodes(ops)?;
        step.prepare_chunks(ops, batch)?;
        step.note_shape();
        Ok(used)
    }

    fn kernel_bind(
        &self,
        spec: &MlaLayerSpec,
        ops: &Ops<D>,
        args: &LayerArgs<&D::Buffer>,
        room: LayerCapacity,
    ) -> Result<Bindings<D>> {
        ops.capacity.check_holds(&room)?;
        Bind { spec, ops, args, room }.all()
    }

    fn kernel_record(
        &self,
        _: &MlaLayerSpec,
        ops: &Ops<D>,
        recorder: &mut D::Recorder<'_>,
        step: &Steps<D>,
        binding: &Bindings<D>,
    ) -> Result<()> {
        if step.plan.positions.is_empty() {
            return Ok(());
        }
        match (&ops.append, &step.append, &binding.append) {
            (Append::Rotated(append), Append::Rotated(step), Append::Rotated(layer)) => {
                append.record_on(recorder, step, layer)?;
            }
            (Append::Plain(append), Append::Plain(step), Append::Plain(layer)) => {
                append.record_on(recorder, step, layer)?;
            }
            _ => return Err(MIXED),
        }
        for (chunk, plan) in step.chunks.iter().zip(&step.plan.chunks) {
            ops.record_chunk(recorder, chunk, plan, binding)?;
        }
        ops.record_decodes(recorder, step, binding)
    }
}

const MIXED: Error = Error::LayoutMismatch { detail: "a layer has one kind of append" };

impl<D: Composes> Ops<D> {
    fn new(device: &D, spec: &MlaLayerSpec, options: &LayerOptions) -> Result<Self> {
        let capacity = options.capacity;
        let capacity =
            LayerCapacity { decode_tokens: capacity.decode_tokens.min(capacity.tokens), ..capacity };
        let (dims, dtype, weight) = (spec.dims(), spec.dtype, spec.weight);
        let decode = DecodeOptions {
            variant: options.variant.clone(),
            query_tokens: spec.decode_threshold,
            ..DecodeOptions::default()
        };
        let has_prefixes = capacity.prefix_rows > 0 && capacity.decode_tokens > 0;
        let prefixes = if has_prefixes { Some(Prefixes::new(device, spec, &capacity)?) } else { None };
        let merge = device.compile(spec.merge())?;
        Ok(Self {
            append: if spec.shape.qk_rope_head_dim == 0 {
                Append::Plain(device.compile(spec.append())?)
            } else {
                Append::Rotated(device.compile(spec.rope_append())?)
            },
            absorb: device.compile(ProjectSpec::absorb(&dims, dtype, weight, dtype))?,
            k_up: device.compile(ProjectSpec::k_up(&dims, dtype, weight, dtype))?,
            v_up: device.compile(ProjectSpec::v_up(&dims, dtype, weight, dtype))?,
            decode: device.compile_with(spec.mla(), &decode)?,
            gather: device.compile(spec.gather())?,
            prefill: device.compile(spec.prefill())?,
            merge_step: merge.step(())?,
            merge,
            space: Workspace::new(device, spec, &capacity, prefixes.as_ref().map_or(0, |all| all.num_sets))?,
            prefixes,
            capacity,
        })
    }

    fn record_chunk(
        &self,
        recorder: &mut D::Recorder<'_>,
        step: &ChunkStep<D>,
        chunk: &Chunk,
        binding: &Bindings<D>,
    ) -> Result<()> {
        self.gather.record_on(recorder, &step.gather, &binding.gather)?;
        self.k_up.record_on(recorder, &step.rows, &binding.rows[0])?;
        self.v_up.record_on(recorder, &step.rows, &binding.rows[1])?;
        for ([first, more], round) in step.rounds.iter().zip(&chunk.rounds) {
            self.prefill.record_on(recorder, first, &binding.prefill[round.state as usize])?;
            if !round.more.is_empty() {
                self.prefill.record_on(recorder, more, &binding.prefill[Target::Partial as usize])?;
                let merge = &binding.merge[round.state as usize];
                self.merge.record_on(recorder, &self.merge_step, merge)?;
            }
        }
        Ok(())
    }

    fn record_decodes(
        &self,
        recorder: &mut D::Recorder<'_>,
        step: &Steps<D>,
        binding: &Bindings<D>,
    ) -> Result<()> {
        let decoded = &step.decoded[..step.plan.decoded.len()];
        if decoded.is_empty() {
            return Ok(());
        }
        decoded.iter().try_for_each(|tokens| self.absorb.record_on(recorder, tokens, &binding.absorb))?;
        self.decode.record_on(recorder, &step.decode, &binding.decode)?;
        let attends = !step.plan.over_prefixes.is_empty();
        match (&self.prefixes, &step.prefixes, &binding.prefixes) {
            (Some(ops), Some(step), Some(bound)) if attends => {
                decoded.iter().try_for_each(|tokens| self.v_up.record_on(recorder, tokens, &bound.v_up))?;
                ops.prefill.record_on(recorder, &step.parts, &bound.parts)?;
                let merges = &step.merges[..decoded.len()];
                merges.iter().try_for_each(|tokens| ops.merge.record_on(recorder, tokens, &bound.merge))
            }
            _ => decoded.iter().try_for_each(|tokens| self.v_up.record_on(recorder, tokens, &binding.v_up)),
        }
    }
}

impl<D: Composes> Prefixes<D> {
    fn new(device: &D, spec: &MlaLayerSpec, capacity: &LayerCapacity) -> Result<Self> {
        let options = PrefillOptions { query_tokens: capacity.decode_tokens, ..PrefillOptions::default() };
        let prefill = device.compile_with(spec.prefill(), &options)?;
        // Fewer query tokens are fewer tiles, and leave room for more parts.
        let num_sets = prefill.facts().key_parts(1, capacity.prefix_rows) + 1;
        Ok(Self { prefill, merge: device.compile(spec.merge_sets())?, num_sets })
    }
}

impl<D: Composes> Steps<D> {
    fn prepare_decodes(&mut self, ops: &Ops<D>) -> Result<()> {
        let plan = &self.plan;
        if plan.decoded.is_empty() {
            return Ok(());
        }
        let (kv_indptr, kv_indices) = &plan.decode_pages;
        ops.decode.prepare(&mut self.decode, (&plan.decode, PageTable::Csr { kv_indptr, kv_indices }))?;
        while self.decoded.len() < plan.decoded.len() {
            self.decoded.push(ops.absorb.step(ops.capacity.decode_tokens)?);
        }
        for (step, tokens) in self.decoded.iter_mut().zip(&plan.decoded) {
            ops.absorb.prepare(step, tokens.clone())?;
        }
        let (Some(prefixes), Some(step)) = (&ops.prefixes, &mut self.prefixes) else { return Ok(()) };
        if plan.over_prefixes.is_empty() {
            return Ok(());
        }
        let num_parts = prefixes.prefill.facts().key_parts(plan.decode.num_queries, plan.longest_prefix());
        let num_parts = num_parts.min(prefixes.num_sets - 1);
        let parts = plan.prefix_parts(num_parts, ops.capacity.decode_tokens);
        prefixes.prefill.prepare(&mut step.parts, &parts)?;
        while step.merges.len() < plan.decoded.len() {
            step.merges.push(prefixes.merge.step(ops.capacity.decode_tokens)?);
        }
        for (step, tokens) in step.merges.iter_mut().zip(&plan.decoded) {
            prefixes.merge.prepare(step, (tokens.clone(), num_parts + 1))?;
        }
        Ok(())
    }

    fn prepare_chunks(&mut self, ops: &Ops<D>, batch: &LayerBatch<'_>) -> Result<()> {
        while self.chunks.len() < self.plan.chunks.len() {
            let (gather, rows) = (ops.gather.step(0)?, ops.k_up.step(0)?);
            self.chunks.push(ChunkStep { gather, rows, rounds: Vec::new() });
        }
        for (step, chunk) in self.chunks.iter_mut().zip(&self.plan.chunks) {
            let (pages, seq_lens, ranges) = (batch.pages, batch.seq_lens, &chunk.ranges[..]);
            ops.gather.prepare(&mut step.gather, GatherBatch { pages, seq_lens, ranges })?;
            ops.k_up.prepare(&mut step.rows, 0..chunk.rows)?;
            while step.rounds.len() < chunk.rounds.len() {
                step.rounds.push([ops.prefill.step(0)?, ops.prefill.step(0)?]);
            }
            for ([first, more], round) in step.rounds.iter_mut().zip(&chunk.rounds) {
                ops.prefill.prepare(first, &round.first)?;
                ops.prefill.prepare(more, &round.more)?;
            }
        }
        Ok(())
    }

    fn note_shape(&mut self) {
        let old = std::mem::take(&mut self.shape);
        let plan = &self.plan;
        let append = match &self.append {
            Append::Rotated(step) => step.capacity(),
            Append::Plain(step) => step.capacity(),
        };
        let Capacity { items, queries, pages, merges, merge_slots, slots } = self.decode.capacity();
        let decode = [items, queries, pages, merges, merge_slots, slots].map(u64::from);
        let runs = plan.decoded.len();
        let shape = &mut self.shape;
        shape.extend([u64::from(plan.positions.is_empty()), append.into(), runs as u64]);
        shape.extend(if runs > 0 { decode } else { [0; 6] });
        shape.extend(self.decoded[..runs].iter().map(|step| u64::from(step.capacity())));
        if let Some(step) = self.prefixes.as_ref().filter(|_| !plan.over_prefixes.is_empty()) {
            shape.push(step.parts.capacity().into());
            shape.extend(step.merges[..runs].iter().map(|step| u64::from(step.capacity())));
        }
        for (step, chunk) in self.chunks.iter().zip(&plan.chunks) {
            let rounds = chunk.rounds.len() as u64;
            shape.extend([step.gather.capacity().into(), step.rows.capacity().into(), rounds]);
            for ([first, more], round) in step.rounds.iter().zip(&chunk.rounds) {
                let merged = u64::from(!round.more.is_empty());
                shape.extend([round.state as u64, merged]);
                shape.extend([first, more].map(|step| u64::from(step.capacity())));
            }
        }
        self.generation += u64::from(old != self.shape);
    }
}

impl<D: Composes> Step<MlaLayerSpec, D> {
    /// Grows with each prepare after which what was recorded before, such as a captured graph, no longer serves and must be recorded
    /// again: where the batch has other runs of decodes or other chunks of prefills, or where a table had to grow. Else what was
    /// recorded runs with the lengths, pages and slots that were prepared last.
    pub fn generation(&self) -> u64 {
        self.raw.generation
    }

    /// How the step is worked off.
    pub fn plan(&self) -> &LayerPlan {
        &self.raw.plan
    }
}

/// What a layer's arrays are bound with.
struct Bind<'a, D: Composes> {
    spec: &'a MlaLayerSpec,
    ops: &'a Ops<D>,
    args: &'a LayerArgs<&'a D::Buffer>,
    room: LayerCapacity,
}

impl<D: Composes> Bind<'_, D> {
    fn all(&self) -> Result<Bindings<D>> {
        let (ops, args, space) = (self.ops, self.args, &self.ops.space);
        let LayerCapacity { decode_tokens, .. } = self.room;
        let dims = self.spec.dims();
        let (w_uk, w_uv) = (WeightView::w_uk(&dims, args.kv_b_proj), WeightView::w_uv(&dims, args.kv_b_proj));
        let (rows, num_rows) = (space.rows(), space.num_rows);
        let gathered = Gather { kv: args.kv, k_scale: args.k_scale, out: rows };
        // All heads read the same row.
        let shared = View { head_stride: 0, ..rows };
        let project = |x, weight, y| Project { x, weight, y };
        Ok(Bindings {
            append: self.append()?,
            absorb: ops.absorb.bind(&project(args.q_nope, w_uk, space.ql_nope()), decode_tokens)?,
            decode: self.decode()?,
            v_up: ops.v_up.bind(&project(space.latent_out(), w_uv, args.out), decode_tokens)?,
            gather: ops.gather.bind(&gathered, num_rows)?,
            rows: [
                ops.k_up.bind(&project(shared, w_uk, space.k_nope()), num_rows)?,
                ops.v_up.bind(&project(shared, w_uv, space.v()), num_rows)?,
            ],
            prefill: [
                self.prefill(Target::Out)?,
                self.prefill(Target::Other)?,
                self.prefill(Target::Partial)?,
            ],
            merge: [self.merge(Target::Out)?, self.merge(Target::Other)?],
            prefixes: match (&ops.prefixes, &args.expanded) {
                (Some(prefixes), Some(expanded)) => Some(self.prefixes(prefixes, expanded)?),
                _ => None,
            },
        })
    }

    fn append(&self) -> Result<Append<Binding<RopeAppendSpec, D>, Binding<AppendSpec, D>>> {
        let (args, space, tokens) = (self.args, &self.ops.space, self.room.tokens);
        let layer = AppendLayer { kv_c: args.kv_c, k_pe: args.k_pe, kv: args.kv, k_scale: args.k_scale };
        Ok(match &self.ops.append {
            Append::Plain(append) => Append::Plain(append.bind(&layer, tokens)?),
            Append::Rotated(append) => {
                let args = RopeAppend {
                    q_pe: args.q_pe,
                    q_pe_out: space.q_pe(),
                    layer,
                    positions: &space.positions,
                    cos_sin: args.cos_sin,
                    max_position: args.max_position,
                };
                Append::Rotated(append.bind(&args, tokens)?)
            }
        })
    }

    fn decode(&self) -> Result<Binding<MlaSpec, D>> {
        let (args, space) = (self.args, &self.ops.space);
        // Nobody reads the LSE but the merge with prefixes.
        let lse = match self.ops.prefixes {
            Some(_) => space.sets().1,
            None => space.target(args.out, Target::Other).1,
        };
        let layer = Layer {
            query: Query::Split { q_nope: space.ql_nope(), q_pe: space.q_pe() },
            kv: args.kv,
            out: space.latent_out(),
            lse,
            lse_base: LseBase::E,
            softmax_scale: args.softmax_scale,
            k_scale: args.k_scale,
            q_scale: 1.0,
        };
        self.ops.decode.bind(&layer, self.room.decode_tokens)
    }

    /// The rotated part of the query, if it has one.
    fn q_pe(&self) -> View<&D::Buffer> {
        if self.spec.shape.qk_rope_head_dim > 0 { self.ops.space.q_pe() } else { self.args.q_nope }
    }

    fn prefill(&self, target: Target) -> Result<Binding<PrefillSpec, D>> {
        let (args, space) = (self.args, &self.ops.space);
        let (out, lse) = space.target(args.out, target);
        let rows = space.rows();
        let prefill = Prefill {
            q_nope: args.q_nope,
            q_pe: self.q_pe(),
            k_nope: space.k_nope(),
            k_pe: View { offset: self.spec.shape.kv_lora_rank.into(), head_stride: 0, ..rows },
            v: space.v(),
            out,
            lse,
            softmax_scale: args.softmax_scale,
        };
        // Without rows there is nothing to attend, and no step does.
        let tokens = if space.num_rows > 0 { self.room.tokens } else { 0 };
        self.ops.prefill.bind(&prefill, PrefillExtent { tokens, keys: space.num_rows, rows: tokens })
    }

    /// From `state` to what takes turns with it.
    fn merge(&self, state: Target) -> Result<Binding<MergeAttnStatesSpec, D>> {
        let target = |target| self.ops.space.target(self.args.out, target);
        let ((prefix_output, prefix_lse), (suffix_output, suffix_lse)) =
            (target(state), target(Target::Partial));
        let (output, output_lse) = target(state.turned());
        // The op's LSEs are [heads, tokens] by name only: any strides do.
        let args = MergeStates {
            prefix_output,
            prefix_lse,
            suffix_output,
            suffix_lse,
            output,
            output_lse: Some(output_lse),
            num_tokens: self.room.tokens,
            num_heads: self.spec.shape.num_heads,
        };
        self.ops.merge.bind(&args, ())
    }

    fn prefixes(&self, prefixes: &Prefixes<D>, expanded: &Expanded<&D::Buffer>) -> Result<BoundPrefixes<D>> {
        let (spec, args, ops) = (self.spec, self.args, self.ops);
        let LayerCapacity { decode_tokens, prefix_rows, .. } = self.room;
        let (states, lse) = ops.space.sets();
        // From a set to the next: of the workspace, whatever the binding has room for.
        let set_rows = u64::from(ops.capacity.decode_tokens);
        let sets = StateSets {
            states,
            set_stride: states.token_stride * set_rows,
            lse,
            lse_set_stride: lse.token_stride * set_rows,
            output: args.out,
            output_lse: None,
            num_heads: spec.shape.num_heads,
        };
        let parts = Prefill {
            q_nope: args.q_nope,
            q_pe: self.q_pe(),
            k_nope: expanded.k_nope,
            k_pe: expanded.k_pe(spec),
            v: expanded.v,
            out: states,
            lse,
            softmax_scale: args.softmax_scale,
        };
        let rows = ops.capacity.decode_tokens * prefixes.num_sets;
        let w_uv = WeightView::w_uv(&spec.dims(), args.kv_b_proj);
        let own = Project { x: ops.space.latent_out(), weight: w_uv, y: states };
        Ok(BoundPrefixes {
            v_up: ops.v_up.bind(&own, decode_tokens)?,
            parts: prefixes
                .prefill
                .bind(&parts, PrefillExtent { tokens: decode_tokens, keys: prefix_rows, rows })?,
            merge: prefixes
                .merge
                .bind(&sets, SetsExtent { tokens: decode_tokens, sets: prefixes.num_sets })?,
        })
    }
}
