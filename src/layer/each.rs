//! The ops that a layer records, in order. The list is traversed twice: to check every op's step and binding, and to record them.

use super::bound::Bindings;
use super::bound_lists::BoundLists;
use super::composed::{Append, Ops};
use super::list_steps::ListsStep;
use super::plan::{Chunk, Target};
use super::selects::Lists;
use super::steps::{ChunkStep, MIXED, Steps};
use crate::base::error::Result;
use crate::ops::composes::Composes;
use crate::ops::op::{Binding, Compiled, Device, Kernel, Op, Step};

/// What a traversal does with each op.
pub(super) trait Visit<D: Device> {
    fn op<O: Op>(&mut self, op: &Compiled<O, D>, step: &Step<O, D>, binding: &Binding<O, D>) -> Result<()>
    where
        D: Kernel<O>;
}

/// Whether step and binding fit, so that nothing is recorded where one does not.
pub(super) struct Check;

impl<D: Device> Visit<D> for Check {
    fn op<O: Op>(&mut self, op: &Compiled<O, D>, step: &Step<O, D>, binding: &Binding<O, D>) -> Result<()>
    where
        D: Kernel<O>,
    {
        op.check(step, binding)
    }
}

/// Records what passed [`Check`].
pub(super) struct Record<'a, 'r, D: Device>(pub(super) &'a mut D::Recorder<'r>);

impl<D: Device> Visit<D> for Record<'_, '_, D> {
    fn op<O: Op>(&mut self, op: &Compiled<O, D>, step: &Step<O, D>, binding: &Binding<O, D>) -> Result<()>
    where
        D: Kernel<O>,
    {
        op.add(self.0, step, binding)
    }
}

impl<D: Composes> Ops<D> {
    pub(super) fn each(
        &self,
        step: &Steps<D>,
        binding: &Bindings<D>,
        visit: &mut impl Visit<D>,
    ) -> Result<()> {
        let [coded, wide] = step.appends();
        if let (true, Some(append), Some(step), Some(layer)) =
            (coded, &self.codes, &step.codes, &binding.codes)
        {
            visit.op(append, step, layer)?;
        }
        match (&self.append, &step.append, &binding.append) {
            _ if !wide => {}
            (Append::Rotated(append), Append::Rotated(step), Append::Rotated(layer)) => {
                visit.op(append, step, layer)?;
            }
            (Append::Plain(append), Append::Plain(step), Append::Plain(layer)) => {
                visit.op(append, step, layer)?;
            }
            _ => return Err(MIXED),
        }
        if let (Some(ops), Some(lists), Some(bound)) = (&self.lists, &step.lists, &binding.lists) {
            each_of_own(ops, lists, bound, step.plan.lists.rounds.len(), visit)?;
        }
        let mut merges_left = step.plan.num_merges;
        for (chunk, plan) in step.chunks.iter().zip(&step.plan.chunks) {
            self.each_of_chunk(chunk, plan, binding, &mut merges_left, visit)?;
        }
        self.each_of_decodes(step, binding, visit)
    }

    fn each_of_chunk(
        &self,
        step: &ChunkStep<D>,
        chunk: &Chunk,
        binding: &Bindings<D>,
        merges_left: &mut u32,
        visit: &mut impl Visit<D>,
    ) -> Result<()> {
        visit.op(&self.gather, &step.gather, &binding.gather)?;
        visit.op(&self.k_up, &step.rows, &binding.rows[0])?;
        visit.op(&self.v_up, &step.rows, &binding.rows[1])?;
        for ([first, more], round) in step.rounds.iter().zip(&chunk.rounds) {
            // The state of what no merge follows is the output.
            let into = match *merges_left {
                0 => &binding.last_prefill,
                _ => &binding.prefill[round.state as usize],
            };
            visit.op(&self.prefill, first, into)?;
            if !round.more.is_empty() {
                visit.op(&self.prefill, more, &binding.prefill[Target::Partial as usize])?;
                let merge = match *merges_left {
                    1 => &binding.last_merge,
                    _ => &binding.merge[round.state as usize],
                };
                *merges_left -= 1;
                visit.op(&self.merge, &self.merge_step, merge)?;
            }
        }
        Ok(())
    }

    fn each_of_decodes(
        &self,
        step: &Steps<D>,
        binding: &Bindings<D>,
        visit: &mut impl Visit<D>,
    ) -> Result<()> {
        let plan = &step.plan;
        let absorbed = &step.absorbed[..plan.absorbed.len()];
        absorbed.iter().try_for_each(|tokens| visit.op(&self.absorb, tokens, &binding.absorb))?;
        if !plan.decoded.is_empty() {
            visit.op(&self.decode, &step.decode, &binding.decode)?;
        }
        let has_lists = !plan.lists.tokens.is_empty();
        if let (true, Some(ops), Some(lists), Some(bound)) =
            (has_lists, &self.lists, &step.lists, &binding.lists)
        {
            visit.op(&ops.decode, &lists.decode, &bound.decode)?;
        }
        let attends = !plan.over_prefixes.is_empty();
        // With prefixes the values of decodes come from the merge, those of tokens with lists never.
        if has_lists || !attends {
            absorbed.iter().try_for_each(|tokens| visit.op(self.v_out(), tokens, &binding.v_up))?;
        }
        match (&self.prefixes, &step.prefixes, &binding.prefixes) {
            (Some(ops), Some(step), Some(bound)) if attends => {
                absorbed.iter().try_for_each(|tokens| visit.op(&self.v_up, tokens, &bound.v_up))?;
                visit.op(&ops.prefill, &step.parts, &bound.parts)?;
                let merges = &step.merges[..plan.decoded.len()];
                merges.iter().try_for_each(|tokens| visit.op(&ops.merge, tokens, &bound.merge))
            }
            _ => Ok(()),
        }
    }
}

/// The layer's own list: index keys of all new tokens, then the lists of those that attend one, in so many rounds.
fn each_of_own<D: Composes>(
    ops: &Lists<D>,
    step: &ListsStep<D>,
    binding: &BoundLists<D>,
    num_rounds: usize,
    visit: &mut impl Visit<D>,
) -> Result<()> {
    let (Some(ops), Some(step), Some(bound)) = (&ops.indexer, &step.indexer, &binding.indexer) else {
        return Ok(());
    };
    visit.op(&ops.append, &step.append, &bound.append)?;
    if num_rounds == 0 {
        return Ok(());
    }
    visit.op(&ops.query, &step.query, &bound.query)?;
    for (logits, top_k) in &step.rounds[..num_rounds] {
        visit.op(&ops.logits, logits, &bound.logits)?;
        visit.op(&ops.top_k, top_k, &bound.top_k)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::base::dtype::Dtype;
    use crate::base::view::View;
    use crate::cache::{KvSpec, KvView, MlaShape};
    use crate::cpu::Cpu;
    use crate::layer::{
        Expanded, LayerBatch, LayerCapacity, LayerOptions, MlaLayer, MlaLayerArgs, Selection,
    };
    use crate::ops::RopeLayout;
    use crate::ops::op::{Device, Step};
    use crate::plan::SplitPolicy;
    use crate::plan::tables::PageTable;

    /// Any op of a layer that does not fit leaves the cache as it was: the append, which comes first, is not recorded either.
    #[test]
    fn nothing_runs_before_all_fits() {
        let spec = MlaLayer {
            shape: MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 },
            qk_nope_head_dim: 16,
            v_head_dim: 24,
            kv: KvSpec { layout: Dtype::F32.into(), page_size: 4, num_pages: 4 },
            dtype: Dtype::F32,
            query: Dtype::F32,
            weight: Dtype::F32,
            out: Dtype::F32,
            rope: RopeLayout::Interleaved,
            decode_threshold: 1,
            workspace_bytes: 1 << 16,
        };
        let cpu = Cpu::with_threads(1);
        let capacity = LayerCapacity { tokens: 4, decode_tokens: 4, ..LayerCapacity::default() };
        let options = LayerOptions { capacity, ..LayerOptions::default() };
        let layer = cpu.compile_with(spec, &options).expect("a layer");
        let array = |elems: usize| {
            let buffer = cpu.buffer(elems as u64 * 4).expect("memory");
            cpu.upload(&buffer, 0, &Dtype::F32.encode_all(&vec![1.0; elems])).expect("uploaded");
            buffer
        };
        let [q, kv_c, k_pe, kv, weight, cos_sin, out] =
            [4 * 48, 4 * 256, 4 * 32, 16 * 288, 40 * 256, 16 * 32, 4 * 24].map(array);
        cpu.upload(&kv, 0, &vec![0; 16 * 288 * 4]).expect("uploaded");
        let q_nope = View::dense(&q, 1, 48);
        let args = MlaLayerArgs {
            q_nope,
            q_pe: View { offset: 16, ..q_nope },
            kv_c: View::dense(&kv_c, 1, 256),
            k_pe: View::dense(&k_pe, 1, 32),
            kv: KvView::dense(&kv, &spec.mla()),
            kv_b_proj: &weight,
            kv_b_scales: None,
            cos_sin: &cos_sin,
            max_position: 16,
            out: View::dense(&out, 1, 24),
            softmax_scale: 0.1,
            q_scale: 1.0,
            k_scale: 1.0,
            out_scale: 1.0,
            expanded: None::<Expanded<_>>,
            selection: Selection::All,
            guard: None,
        };
        let binding = layer.bind(&args, capacity).expect("binds");
        let batch = LayerBatch {
            seq_lens: &[3, 6],
            query_start_loc: &[0, 1, 4],
            slot_mapping: &[2, 11, 12, 13],
            pages: PageTable::Dense { block_table: &[0, -1, 2, 3], max_pages: 2 },
            shared_prefixes: &[],
            expanded: &[],
        };
        let cache = || cpu.download(&kv, 16 * 288 * 4).expect("read");
        type Spoil = fn(&mut Step<MlaLayer, Cpu>);
        let spoil: [Spoil; 6] = [
            |step| step.raw.decode.used = None,
            |step| step.raw.absorbed[0].used = Some(u32::MAX),
            |step| step.raw.chunks[0].gather.used = None,
            |step| step.raw.chunks[0].rows.used = Some(u32::MAX),
            |step| step.raw.chunks[0].rounds[0][0].used = None,
            |_| {},
        ];
        for (place, spoil) in spoil.into_iter().enumerate() {
            let mut step = layer.step(Default::default()).expect("a step");
            layer.prepare(&mut step, (&batch, SplitPolicy::Auto)).expect("prepared");
            spoil(&mut step);
            let (ran, untouched) = (layer.run(&step, &binding), cache().iter().all(|&byte| byte == 0));
            let is_last = place == 5;
            assert_eq!((ran.is_ok(), untouched), (is_last, !is_last), "{place}: {ran:?}");
        }
    }
}
