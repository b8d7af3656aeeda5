//! Prefixes that decodes share, kept as keys and values, recorded: see [`ExpandedPrefix`](crate::ExpandedPrefix).

use super::{MlaLayer, MlaLayerBinding};
use crate::gpu::Pipelines;
use crate::gpu::ops::{
    GatherBinding, GatherStep, MergeSetsBinding, MergeSetsStep, MergeStateSets, MlaPrefill, PrefillBinding,
    PrefillStep, ProjectBinding, ProjectStep,
};
use crate::layer::View;
use crate::mla_layer::{Expanded, LayerArgs, LayerPlan, MlaLayerSpec};
use crate::ops::{Gather, GatherRange, Project, StateSets, WeightView};
use crate::prefill::{Prefill, PrefillExtent};
use crate::tables::PageTable;
use crate::{Error, Result};

use super::LayerCapacity;

/// The ops beyond those of any layer.
#[derive(Debug)]
pub(super) struct Prefixes {
    prefill: MlaPrefill,
    merge: MergeStateSets,
    /// What the decodes attend alone, and as many parts of a prefix as there is room for.
    num_sets: u32,
}

/// A step's tables for them.
#[derive(Debug, Default)]
pub(super) struct PrefixesStep {
    parts: PrefillStep,
    /// As many as there are runs of decoded tokens, or more from an earlier step.
    merges: Vec<MergeSetsStep>,
}

/// One layer's arrays for them.
#[derive(Debug)]
pub(super) struct BoundPrefixes {
    gather: GatherBinding,
    rows: [ProjectBinding; 2],
    v_up: ProjectBinding,
    parts: PrefillBinding,
    merge: MergeSetsBinding,
}

/// Which prefix is expanded: what [`MlaLayer::prepare_prefix`] uploads, and every layer's [`MlaLayer::record_prefix`] reads.
#[derive(Debug, Default)]
pub struct PrefixStep {
    gather: GatherStep,
    rows: ProjectStep,
}

impl Prefixes {
    /// # Errors
    /// Those of the ops.
    pub(super) fn new(pipelines: &Pipelines, spec: &MlaLayerSpec, capacity: &LayerCapacity) -> Result<Self> {
        let prefill = MlaPrefill::for_queries(pipelines, spec.prefill(), capacity.decode_tokens)?;
        // Fewer query tokens are fewer tiles, and leave room for more parts.
        let num_sets = prefill.key_parts(1, capacity.prefix_rows) + 1;
        Ok(Self { prefill, merge: MergeStateSets::new(pipelines, spec.merge())?, num_sets })
    }

    pub(super) fn num_sets(&self) -> u32 {
        self.num_sets
    }
}

impl MlaLayer {
    /// Plans the expansion of a prefix, in its pages, into rows `first_row` to `first_row + tokens` of each layer's
    /// [`Expanded`](crate::Expanded) arrays, and uploads its tables.
    ///
    /// # Errors
    /// [`Error::Limit`] for rows beyond [`LayerCapacity::prefix_rows`], and those of `kv_gather`: pages outside the pool, too few of them.
    pub fn prepare_prefix(
        &self,
        queue: &wgpu::Queue,
        step: &mut PrefixStep,
        pages: &[i32],
        tokens: u32,
        first_row: u32,
    ) -> Result<()> {
        self.check_prefix_rows(u64::from(first_row) + u64::from(tokens))?;
        let device = self.pipelines.device();
        let kv_indptr = [0, i32::try_from(pages.len()).unwrap_or(i32::MAX)];
        let seq_len = i32::try_from(tokens).unwrap_or(i32::MAX);
        self.gather.prepare(
            device,
            queue,
            &mut step.gather,
            PageTable::Csr { kv_indptr: &kv_indptr, kv_indices: pages },
            &[seq_len],
            &[GatherRange { sequence: 0, begin: 0, tokens, out_row: first_row }],
        )?;
        self.k_up.prepare(device, queue, &mut step.rows, first_row, tokens)
    }

    /// Records the expansion for one layer, whose cache holds the prefix by then. It serves every step until the pages change. Creates
    /// nothing and cannot fail: for a layer that was bound without [`LayerArgs::expanded`] it records nothing and logs an error.
    pub fn record_prefix(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        step: &PrefixStep,
        binding: &MlaLayerBinding,
    ) {
        let descriptor = wgpu::ComputePassDescriptor { label: Some("mla.prefix"), timestamp_writes: None };
        self.record_prefix_in(&mut encoder.begin_compute_pass(&descriptor), step, binding);
    }

    /// As [`MlaLayer::record_prefix`], in the host's pass.
    pub fn record_prefix_in(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        step: &PrefixStep,
        binding: &MlaLayerBinding,
    ) {
        let Some(bound) = binding.prefixes.as_ref().filter(|_| binding.owner == self.id) else {
            log::error!("nothing recorded: the layer was bound without arrays for expanded prefixes");
            return;
        };
        self.gather.record_in(pass, &step.gather, &bound.gather);
        self.k_up.record_in(pass, &step.rows, &bound.rows[0]);
        self.v_up.record_in(pass, &step.rows, &bound.rows[1]);
    }

    pub(super) fn check_prefix_rows(&self, need: u64) -> Result<()> {
        let limit = self.capacity.prefix_rows.into();
        if need > limit {
            let cure = "make the layer with more LayerCapacity::prefix_rows";
            return Err(Error::Limit { what: "rows of expanded prefixes", need, limit, cure });
        }
        Ok(())
    }

    /// The tables of a step whose decodes attend prefixes.
    pub(super) fn prepare_prefixes(
        &self,
        queue: &wgpu::Queue,
        step: &mut PrefixesStep,
        plan: &LayerPlan,
    ) -> Result<()> {
        let Some(prefixes) = self.prefixes.as_ref().filter(|_| !plan.over_prefixes.is_empty()) else {
            return Ok(());
        };
        let longest = plan.longest_prefix();
        let num_parts =
            prefixes.prefill.key_parts(plan.decode.num_queries, longest).min(prefixes.num_sets - 1);
        let parts = plan.prefix_parts(num_parts, self.capacity.decode_tokens);
        let device = self.pipelines.device();
        prefixes.prefill.prepare(device, queue, &mut step.parts, &parts)?;
        step.merges.resize_with(plan.decoded.len().max(step.merges.len()), MergeSetsStep::default);
        for (step, tokens) in step.merges.iter_mut().zip(&plan.decoded) {
            prefixes.merge.prepare(device, queue, step, tokens.clone(), num_parts + 1)?;
        }
        Ok(())
    }

    /// # Errors
    /// Those of the ops.
    pub(super) fn bind_prefixes(
        &self,
        args: &LayerArgs<&wgpu::Buffer>,
        expanded: &Expanded<&wgpu::Buffer>,
    ) -> Result<Option<BoundPrefixes>> {
        let Some(prefixes) = &self.prefixes else { return Ok(None) };
        let (spec, space, device) = (&self.spec, &self.space, self.pipelines.device());
        let LayerCapacity { decode_tokens, prefix_rows, .. } = self.capacity;
        let dims = spec.dims();
        let (w_uk, w_uv) = (WeightView::w_uk(&dims, args.kv_b_proj), WeightView::w_uv(&dims, args.kv_b_proj));
        let (states, lse) = space.sets(spec);
        // All heads read the same row.
        let rows = View { head_stride: 0, ..expanded.rows };
        let up = |weight, y| Project { x: rows, weight, y, num_tokens: prefix_rows };
        let gathered = Gather { kv: args.kv, k_scale: args.k_scale, out: expanded.rows };
        let has_rope = spec.shape.qk_rope_head_dim > 0;
        let parts = Prefill {
            q_nope: args.q_nope,
            q_pe: if has_rope { space.q_pe(spec) } else { args.q_nope },
            k_nope: expanded.k_nope,
            k_pe: expanded.k_pe(spec),
            v: expanded.v,
            out: states,
            lse,
            softmax_scale: args.softmax_scale,
        };
        let extent = PrefillExtent {
            tokens: decode_tokens,
            keys: prefix_rows,
            rows: decode_tokens * prefixes.num_sets,
        };
        let sets = StateSets {
            states,
            set_stride: states.token_stride * u64::from(decode_tokens),
            lse,
            lse_set_stride: lse.token_stride * u64::from(decode_tokens),
            output: args.out,
            output_lse: None,
            num_sets: prefixes.num_sets,
            num_tokens: decode_tokens,
            num_heads: spec.shape.num_heads,
        };
        let own = Project { x: space.latent_out(spec), weight: w_uv, y: states, num_tokens: decode_tokens };
        Ok(Some(BoundPrefixes {
            gather: self.gather.bind(device, &gathered, prefix_rows)?,
            rows: [
                self.k_up.bind(device, &up(w_uk, expanded.k_nope))?,
                self.v_up.bind(device, &up(w_uv, expanded.v))?,
            ],
            v_up: self.v_up.bind(device, &own)?,
            parts: prefixes.prefill.bind(device, &parts, extent)?,
            merge: prefixes.merge.bind(device, &sets)?,
        }))
    }

    /// What follows the decode in a step whose decodes attend prefixes.
    pub(super) fn record_prefixes(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        step: &PrefixesStep,
        decoded: &[ProjectStep],
        bound: &BoundPrefixes,
    ) {
        let Some(prefixes) = &self.prefixes else { return };
        decoded.iter().for_each(|tokens| self.v_up.record_in(pass, tokens, &bound.v_up));
        prefixes.prefill.record_in(pass, &step.parts, &bound.parts);
        let merges = &step.merges[..decoded.len()];
        merges.iter().for_each(|tokens| prefixes.merge.record_in(pass, tokens, &bound.merge));
    }
}
