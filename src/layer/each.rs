//! What a layer records, in order. It is gone through twice: to check every op's step and binding, and to record them.

use super::bound::Bindings;
use super::composed::{Append, Composes, Ops};
use super::plan::{Chunk, Target};
use super::recorded::{ChunkStep, MIXED, Steps};
use crate::Result;
use crate::ops::op::{Binding, Compiled, Device, Kernel, Op, Step};

/// What is done with each op.
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
        match (&self.append, &step.append, &binding.append) {
            (Append::Rotated(append), Append::Rotated(step), Append::Rotated(layer)) => {
                visit.op(append, step, layer)?;
            }
            (Append::Plain(append), Append::Plain(step), Append::Plain(layer)) => {
                visit.op(append, step, layer)?;
            }
            _ => return Err(MIXED),
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
        let decoded = &step.decoded[..step.plan.decoded.len()];
        if decoded.is_empty() {
            return Ok(());
        }
        decoded.iter().try_for_each(|tokens| visit.op(&self.absorb, tokens, &binding.absorb))?;
        visit.op(&self.decode, &step.decode, &binding.decode)?;
        let attends = !step.plan.over_prefixes.is_empty();
        match (&self.prefixes, &step.prefixes, &binding.prefixes) {
            (Some(ops), Some(step), Some(bound)) if attends => {
                decoded.iter().try_for_each(|tokens| visit.op(&self.v_up, tokens, &bound.v_up))?;
                visit.op(&ops.prefill, &step.parts, &bound.parts)?;
                let merges = &step.merges[..decoded.len()];
                merges.iter().try_for_each(|tokens| visit.op(&ops.merge, tokens, &bound.merge))
            }
            _ => decoded.iter().try_for_each(|tokens| visit.op(&self.v_up, tokens, &binding.v_up)),
        }
    }
}
