//! The layer as an op made of ops: the same for every device that has them, recorded.

use super::batch::LayerBatch;
use super::bound::{Bind, Bindings};
use super::composed::Ops;
use super::each::{Check, Record};
use super::plan::LayerPlan;
use super::selects::Lists;
use super::steps::Steps;
use super::{LayerCapacity, LayerFacts, LayerOptions, MlaLayer, MlaLayerArgs};
use crate::base::error::Result;
use crate::ops::composes::Composes;
use crate::ops::op::{Compiled, Kernel};
use crate::ops::variants::{Candidate, Choice};
use crate::plan::tables::Capacity;
use crate::plan::{SplitPolicy, check_slabs};

impl<D: Composes> Kernel<MlaLayer> for D {
    type Kernels = Ops<D>;
    type Step = Steps<D>;
    type Binding = Bindings<D>;

    /// The variants of its decode.
    fn kernel_variants(&self, spec: &MlaLayer) -> Vec<Candidate> {
        self.variants(&spec.mla())
    }

    fn kernel_compile(
        &self,
        spec: &MlaLayer,
        options: &LayerOptions,
    ) -> Result<(Ops<D>, LayerFacts, Choice)> {
        let ops = Ops::new(self, spec, options)?;
        let facts = LayerFacts {
            tiling: ops.decode.tiling(),
            workspace_bytes: ops.space.chunk_bytes(),
            workspace_rows: ops.space.num_rows,
            capacity: ops.capacity,
            spec: *spec,
            prefix_cost: ops.prefix_cost,
            round_tokens: ops.lists.as_ref().and_then(Lists::round_tokens).unwrap_or(0),
        };
        let lists =
            ops.lists.as_ref().map_or(String::new(), |lists| format!("; lists {}", lists.decode.why()));
        let choice = Choice {
            variant: ops.decode.variant(),
            why: format!("decode {}; prefill {}{lists}", ops.decode.why(), ops.prefill.why()),
            rounds_weights: ops.decodes().any(Compiled::rounds_weights) || ops.prefill.rounds_weights(),
            tensor_cores: ops.decodes().any(Compiled::tensor_cores) || ops.prefill.tensor_cores(),
        };
        Ok((ops, facts, choice))
    }

    fn kernel_step(&self, _: &MlaLayer, ops: &Ops<D>, decode: Capacity) -> Result<Steps<D>> {
        Steps::new(ops, decode)
    }

    fn kernel_capacity(step: &Steps<D>) -> Capacity {
        step.decode.capacity()
    }

    fn recording_key(step: &Steps<D>) -> u64 {
        step.generation
    }

    fn kernel_prepare(
        &self,
        spec: &MlaLayer,
        ops: &Ops<D>,
        step: &mut Steps<D>,
        (batch, policy): (&LayerBatch<'_>, SplitPolicy),
    ) -> Result<LayerCapacity> {
        let listing = ops.lists.as_ref().map(Lists::listing);
        let how = (Some(&ops.prefix_cost), listing.as_ref());
        let plan = LayerPlan::by_cost(spec, &ops.decode.tiling(), batch, policy, ops.slab_pages, how)?;
        let used = plan.used();
        ops.capacity.check_holds(&used, plan.num_absorbed())?;
        step.plan = plan;
        step.prepare_appends(ops, batch)?;
        step.prepare_decodes(ops)?;
        step.prepare_lists(ops, batch)?;
        step.prepare_chunks(ops, batch)?;
        step.note_shape();
        Ok(used)
    }

    fn kernel_bind(
        &self,
        spec: &MlaLayer,
        ops: &Ops<D>,
        args: &MlaLayerArgs<&D::Buffer>,
        room: LayerCapacity,
    ) -> Result<Bindings<D>> {
        ops.capacity.check_holds(&room, room.decode_tokens)?;
        check_slabs(ops.slab_pages, args.kv.slabs.slab_pages())?;
        Bind { spec, ops, args, room }.all()
    }

    fn kernel_record(
        &self,
        _: &MlaLayer,
        ops: &Ops<D>,
        recorder: &mut D::Recorder<'_>,
        step: &Steps<D>,
        binding: &Bindings<D>,
    ) -> Result<()> {
        if step.plan.positions.is_empty() {
            return Ok(());
        }
        // Nothing is recorded before all is known to fit.
        ops.each(step, binding, &mut Check)?;
        let _turn = self.turn(&ops.turn);
        ops.each(step, binding, &mut Record::<D>(recorder))
    }
}
