//! The LSEs are gathered, the outputs weighted, and summed by a reduce-scatter.

use super::layout::Pair;
use super::spec::ContextParallelSpec;
use crate::base::error::Result;
use crate::communicator::{Communicator, Exchange};
use crate::ops::op::{Binding, Compiled, Kernel, Step};
use crate::ops::{CorrectAttnOut, CorrectAttnOutArgs};

/// This form on one device.
pub struct Weighted<D: Kernel<CorrectAttnOut>> {
    device: D,
    spec: ContextParallelSpec,
    /// `[world, num_heads, max_tokens]`.
    lses: D::Buffer,
    /// `[num_heads, max_tokens, L]`.
    weighted: D::Buffer,
    /// `[local_heads, max_tokens, L]`.
    out: D::Buffer,
    correct: Compiled<CorrectAttnOut, D>,
    step: Step<CorrectAttnOut, D>,
    binding: Binding<CorrectAttnOut, D>,
}

impl<D: Kernel<CorrectAttnOut>> Weighted<D> {
    pub fn new(
        device: &D,
        spec: ContextParallelSpec,
        partial: &Pair<D::Buffer>,
        joined: &Pair<D::Buffer>,
    ) -> Result<Self> {
        let heads = spec.num_heads;
        let lses = device.buffer(spec.lse_bytes(heads) * u64::from(spec.world))?;
        let weighted = device.buffer(spec.out_bytes(heads))?;
        let correct = device.compile(CorrectAttnOut { dtype: spec.out, head_size: spec.kv_lora_rank })?;
        let args = CorrectAttnOutArgs {
            out: spec.out_view(&partial.out),
            lses: spec.lse_view(&lses),
            lse_rank_stride: spec.rows(heads),
            output: spec.out_view(&weighted),
            output_lse: Some(spec.lse_view(&joined.lse)),
            lse_base: spec.lse_base,
            world: spec.world,
            rank: spec.rank,
            num_heads: heads,
        };
        let binding = correct.bind(&args, spec.max_tokens)?;
        let step = correct.step(spec.max_tokens)?;
        let (device, out) = (device.clone(), joined.out.clone());
        Ok(Self { device, spec, lses, weighted, out, correct, step, binding })
    }

    pub fn prepare(&mut self, tokens: u32) -> Result<()> {
        self.correct.prepare(&mut self.step, 0..tokens)
    }

    pub fn run(&self, communicator: &dyn Communicator<D>, partial: &Pair<D::Buffer>) -> Result<()> {
        // Nothing is exchanged before the correction is known to fit.
        self.correct.check(&self.step, &self.binding)?;
        let bytes = self.spec.lse_bytes(self.spec.num_heads);
        let lses = Exchange { from: &partial.lse, to: &self.lses, bytes };
        communicator.all_gather(&self.device, &[lses])?;
        self.correct.run(&self.step, &self.binding)?;
        let bytes = self.spec.out_bytes(self.spec.local_heads());
        let sums = Exchange { from: &self.weighted, to: &self.out, bytes };
        communicator.reduce_scatter(&self.device, &sums, self.spec.out)
    }
}
