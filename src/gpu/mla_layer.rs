//! The whole attention layer, recorded: see [`crate::mla_layer`].

mod bind;
mod prefixes;
mod space;

use std::sync::atomic::{AtomicU64, Ordering};

pub use bind::MlaLayerBinding;
pub use prefixes::PrefixStep;

use bind::BoundAppend;
use prefixes::{Prefixes, PrefixesStep};
use space::Space;

use super::ops::{
    AppendStep, GatherStep, HeadProject, KvAppend, KvGather, MergeAttnStates, MlaPrefill, PrefillStep,
    ProjectStep, RotateAppend,
};
use super::{MlaDecode, Options, Pipelines, Step};
use crate::mla_layer::{Chunk, ExpandedPrefix, LayerBatch, LayerPlan, MlaLayerSpec, Target};
use crate::ops::ProjectSpec;
use crate::tables::{Capacity, PageTable};
use crate::{Error, Policy, Result};

/// The attention layer of a model on a wgpu device, made for one [`MlaLayerSpec`]: prepared once a step, bound once a layer, recorded
/// for each layer of each step.
///
/// It owns a workspace for [`LayerCapacity`], which all layers share, and the positions of the step that was prepared last: submit
/// what was recorded for a step before another is prepared.
#[derive(Debug)]
pub struct MlaLayer {
    pipelines: Pipelines,
    spec: MlaLayerSpec,
    capacity: LayerCapacity,
    append: Append,
    absorb: HeadProject,
    k_up: HeadProject,
    v_up: HeadProject,
    decode: MlaDecode,
    gather: KvGather,
    prefill: MlaPrefill,
    merge: MergeAttnStates,
    /// `None` without room for any.
    prefixes: Option<Prefixes>,
    space: Space,
    id: u64,
}

/// How much a step may have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct LayerCapacity {
    /// Query tokens in all.
    pub tokens: u32,
    /// Those that are decoded have to be among the first so many of a batch: they take `2 * H * L` elements of workspace each.
    pub decode_tokens: u32,
    /// Rows of [`LayerArgs::expanded`](crate::LayerArgs::expanded), the prefixes that decodes share and that are kept as keys and values; usually 0, without any.
    pub prefix_rows: u32,
}

#[derive(Debug)]
enum Append {
    Rotated(RotateAppend),
    /// Without a rotary part.
    Plain(KvAppend),
}

/// A step's tables: what [`MlaLayer::prepare`] uploads and every layer's record reads. It grows as needed.
#[derive(Debug)]
pub struct MlaLayerStep {
    append: AppendStep,
    decode: Step,
    plan: LayerPlan,
    /// As many as there are runs of decoded tokens, or more from an earlier step.
    decoded: Vec<ProjectStep>,
    chunks: Vec<ChunkStep>,
    prefixes: PrefixesStep,
    owner: u64,
}

/// Like the plan's chunk of the same index.
#[derive(Debug, Default)]
struct ChunkStep {
    gather: GatherStep,
    rows: ProjectStep,
    /// What a round's sequences attend that begin, and that go on.
    rounds: Vec<[PrefillStep; 2]>,
}

impl MlaLayer {
    /// Compiles the ops of a spec and makes the workspace.
    ///
    /// # Errors
    /// Those of [`MlaLayerSpec::check`] and of the ops; [`Error::Limit`] and [`Error::OutOfMemory`] for a workspace that the device
    /// does not hold.
    pub fn new(pipelines: &Pipelines, spec: &MlaLayerSpec, capacity: LayerCapacity) -> Result<Self> {
        Self::with_variant(pipelines, spec, capacity, None)
    }

    /// As [`MlaLayer::new`]; `variant` forces a row for the decode, as [`Options::variant`] does, such as one that rounds no softmax
    /// weights.
    ///
    /// # Errors
    /// Those of [`MlaLayer::new`], and [`Error::VariantUnavailable`].
    pub fn with_variant(
        pipelines: &Pipelines,
        spec: &MlaLayerSpec,
        capacity: LayerCapacity,
        variant: Option<&str>,
    ) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        spec.check()?;
        let capacity =
            LayerCapacity { decode_tokens: capacity.decode_tokens.min(capacity.tokens), ..capacity };
        let project = |project| HeadProject::new(pipelines, project);
        let (dims, dtype, weight) = (spec.dims(), spec.dtype, spec.weight);
        let variant = variant.map(Into::into);
        let options = Options { variant, query_tokens: spec.decode_threshold, ..Options::default() };
        let append = spec.append();
        let has_prefixes = capacity.prefix_rows > 0 && capacity.decode_tokens > 0;
        let prefixes = has_prefixes.then(|| Prefixes::new(pipelines, spec, &capacity)).transpose()?;
        Ok(Self {
            append: if spec.shape.qk_rope_head_dim == 0 {
                Append::Plain(KvAppend::new(pipelines, append)?)
            } else {
                Append::Rotated(RotateAppend::new(pipelines, spec.rope_append())?)
            },
            absorb: project(ProjectSpec::absorb(&dims, dtype, weight, dtype))?,
            k_up: project(ProjectSpec::k_up(&dims, dtype, weight, dtype))?,
            v_up: project(ProjectSpec::v_up(&dims, dtype, weight, dtype))?,
            decode: MlaDecode::new(pipelines, &spec.mla(), &options)?,
            gather: KvGather::new(pipelines, spec.gather())?,
            prefill: MlaPrefill::new(pipelines, spec.prefill())?,
            merge: MergeAttnStates::new(pipelines, spec.merge())?,
            space: Space::new(pipelines, spec, &capacity, prefixes.as_ref().map_or(0, Prefixes::num_sets))?,
            prefixes,
            pipelines: pipelines.clone(),
            spec: *spec,
            capacity,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// What it was made for.
    pub fn spec(&self) -> &MlaLayerSpec {
        &self.spec
    }

    /// The decode of short sequences, such as for its row.
    pub fn decode(&self) -> &MlaDecode {
        &self.decode
    }

    /// The attention of the others.
    pub fn prefill(&self) -> &MlaPrefill {
        &self.prefill
    }

    /// Bytes of the keys and values of prefills: never more than [`MlaLayerSpec::workspace_bytes`].
    pub fn workspace_bytes(&self) -> u64 {
        self.space.chunk_bytes()
    }

    /// An empty step.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::DeviceLost`].
    pub fn step(&self) -> Result<MlaLayerStep> {
        Ok(MlaLayerStep {
            append: AppendStep::default(),
            decode: self.decode.step(Capacity::default())?,
            plan: LayerPlan::default(),
            decoded: Vec::new(),
            chunks: Vec::new(),
            prefixes: PrefixesStep::default(),
            owner: self.id,
        })
    }

    /// Plans a step for all layers and uploads its tables.
    ///
    /// # Errors
    /// Those of [`LayerPlan::new`] and of the ops; [`Error::Limit`] for a batch beyond the capacity; [`Error::LayoutMismatch`] for
    /// a step of another layer. The step is then not to be recorded.
    pub fn prepare(
        &self,
        queue: &wgpu::Queue,
        step: &mut MlaLayerStep,
        batch: &LayerBatch<'_>,
        policy: Policy,
    ) -> Result<()> {
        if step.owner != self.id {
            return Err(Error::LayoutMismatch { detail: "the step was made by another layer" });
        }
        step.plan = LayerPlan::default();
        let plan = LayerPlan::new(&self.spec, &self.decode.tiling(), batch, policy)?;
        self.check_capacity(&plan)?;
        let prefix_rows = |prefix: &ExpandedPrefix| u64::from(prefix.first_row) + u64::from(prefix.tokens);
        self.check_prefix_rows(batch.expanded.iter().map(prefix_rows).max().unwrap_or(0))?;
        let device = self.pipelines.device();
        match &self.append {
            Append::Rotated(append) => append.prepare(device, queue, &mut step.append, batch.slot_mapping)?,
            Append::Plain(append) => append.prepare(device, queue, &mut step.append, batch.slot_mapping)?,
        }
        queue.write_buffer(&self.space.positions, 0, bytemuck::cast_slice(&plan.positions));
        if !plan.decoded.is_empty() {
            let (kv_indptr, kv_indices) = &plan.decode_pages;
            let pages = PageTable::Csr { kv_indptr, kv_indices };
            self.decode.prepare(queue, &mut step.decode, &plan.decode, pages)?;
        }
        step.decoded.resize_with(plan.decoded.len().max(step.decoded.len()), ProjectStep::default);
        for (step, tokens) in step.decoded.iter_mut().zip(&plan.decoded) {
            self.absorb.prepare(device, queue, step, tokens.start, tokens.end - tokens.start)?;
        }
        self.prepare_prefixes(queue, &mut step.prefixes, &plan)?;
        step.chunks.resize_with(plan.chunks.len().max(step.chunks.len()), ChunkStep::default);
        for (step, chunk) in step.chunks.iter_mut().zip(&plan.chunks) {
            self.gather.prepare(
                device,
                queue,
                &mut step.gather,
                batch.pages,
                batch.seq_lens,
                &chunk.ranges,
            )?;
            self.k_up.prepare(device, queue, &mut step.rows, 0, chunk.rows)?;
            step.rounds.resize_with(chunk.rounds.len().max(step.rounds.len()), Default::default);
            for ([first, more], round) in step.rounds.iter_mut().zip(&chunk.rounds) {
                self.prefill.prepare(device, queue, first, &round.first)?;
                self.prefill.prepare(device, queue, more, &round.more)?;
            }
        }
        step.plan = plan;
        Ok(())
    }

    fn check_capacity(&self, plan: &LayerPlan) -> Result<()> {
        let (have, tokens) = (&self.capacity, plan.positions.len() as u64);
        let decoded = plan.decoded.last().map_or(0, |tokens| tokens.end).into();
        for (what, need, limit, cure) in [
            ("query tokens of a step", tokens, have.tokens, "make the layer with more LayerCapacity::tokens"),
            (
                "tokens up to the last that is decoded",
                decoded,
                have.decode_tokens,
                "put decodes first in a batch, or make the layer with more LayerCapacity::decode_tokens",
            ),
        ] {
            if need > limit.into() {
                return Err(Error::Limit { what, need, limit: limit.into(), cure });
            }
        }
        Ok(())
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &MlaLayerStep, binding: &MlaLayerBinding) -> Result<()> {
        if step.owner != self.id || binding.owner != self.id {
            return Err(Error::LayoutMismatch { detail: "one of them was made by another layer" });
        }
        if !step.plan.over_prefixes.is_empty() && binding.prefixes.is_none() {
            let detail = "the step attends expanded prefixes: bind the layer with LayerArgs::expanded";
            return Err(Error::LayoutMismatch { detail });
        }
        Ok(())
    }

    /// Records one layer in a pass of its own. Creates nothing and cannot fail: a pair that [`MlaLayer::check`] refuses records
    /// nothing and logs an error.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder, step: &MlaLayerStep, binding: &MlaLayerBinding) {
        let descriptor = wgpu::ComputePassDescriptor { label: Some("mla.layer"), timestamp_writes: None };
        self.record_in(&mut encoder.begin_compute_pass(&descriptor), step, binding);
    }

    /// As [`MlaLayer::record`], in the host's pass.
    pub fn record_in(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        step: &MlaLayerStep,
        binding: &MlaLayerBinding,
    ) {
        if let Err(error) = self.check(step, binding) {
            log::error!("nothing recorded: {error}");
            return;
        }
        if step.plan.positions.is_empty() {
            return;
        }
        match (&self.append, &binding.append) {
            (Append::Rotated(append), BoundAppend::Rotated(layer)) => {
                append.record_in(pass, &step.append, layer)
            }
            (Append::Plain(append), BoundAppend::Plain(layer)) => append.record_in(pass, &step.append, layer),
            _ => log::error!("nothing appended: a layer has one kind of append"),
        }
        for (chunk, plan) in step.chunks.iter().zip(&step.plan.chunks) {
            self.record_chunk(pass, chunk, plan, binding);
        }
        if step.plan.decoded.is_empty() {
            return;
        }
        let decoded = &step.decoded[..step.plan.decoded.len()];
        decoded.iter().for_each(|tokens| self.absorb.record_in(pass, tokens, &binding.absorb));
        self.decode.record_in(pass, &step.decode, &binding.decode);
        match &binding.prefixes {
            Some(bound) if !step.plan.over_prefixes.is_empty() => {
                self.record_prefixes(pass, &step.prefixes, decoded, bound);
            }
            _ => decoded.iter().for_each(|tokens| self.v_up.record_in(pass, tokens, &binding.v_up)),
        }
    }

    fn record_chunk(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        step: &ChunkStep,
        chunk: &Chunk,
        binding: &MlaLayerBinding,
    ) {
        self.gather.record_in(pass, &step.gather, &binding.gather);
        self.k_up.record_in(pass, &step.rows, &binding.rows[0]);
        self.v_up.record_in(pass, &step.rows, &binding.rows[1]);
        for ([first, more], round) in step.rounds.iter().zip(&chunk.rounds) {
            self.prefill.record_in(pass, first, &binding.prefill[round.state as usize]);
            if !round.more.is_empty() {
                self.prefill.record_in(pass, more, &binding.prefill[Target::Partial as usize]);
                self.merge.record_in(pass, &binding.merge[round.state as usize]);
            }
        }
    }
}
