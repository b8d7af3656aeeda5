//! What a [`super::ContextParallel`] is made for.

use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::cache::decode_spec::MlaDecode;
use crate::communicator::check_world;
use crate::communicator::form::CombineForm;
use crate::ops::LseBase;

/// What a [`ContextParallel`](super::ContextParallel) is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContextParallelSpec {
    /// Heads of the decode, all of which every rank computes for its own tokens.
    pub num_heads: u32,
    /// Elements of a head's output.
    pub kv_lora_rank: u32,
    /// Dtype of partial results and of the output: f32, f16 or bf16.
    pub out: Dtype,
    /// Base of the LSEs, which the decode must write.
    pub lse_base: LseBase,
    /// This rank, below `world`.
    pub rank: u32,
    /// Ranks in the group.
    pub world: u32,
    /// Query tokens of the largest step. An exchange is of so many, however few a step has: make one for each size that is
    /// captured in a graph.
    pub max_tokens: u32,
    /// How partial results are exchanged.
    pub form: CombineForm,
}

impl ContextParallelSpec {
    /// For a decode: LSEs are natural, the form is an all-to-all where the ranks can share out the heads and an all-gather otherwise.
    #[must_use]
    pub fn of(decode: &MlaDecode, rank: u32, world: u32, max_tokens: u32) -> Self {
        let num_heads = decode.shape.num_heads;
        let divides = num_heads.is_multiple_of(world.max(1));
        let form = if divides { CombineForm::AllToAll } else { CombineForm::AllGather };
        let (kv_lora_rank, out) = (decode.shape.kv_lora_rank, decode.out);
        Self { num_heads, kv_lora_rank, out, lse_base: LseBase::E, rank, world, max_tokens, form }
    }

    /// Heads whose output a rank gets: those from `rank * local_heads()` on, or all.
    #[must_use]
    pub fn local_heads(&self) -> u32 {
        match self.form {
            CombineForm::AllGather => self.num_heads,
            _ => self.num_heads / self.world.max(1),
        }
    }

    /// # Errors
    /// [`Error::Shape`].
    pub(super) fn check(&self) -> Result<()> {
        check_world(self.world)?;
        let shape = |what, got: u32, cure| Err(Error::Shape { what, got: got.into(), cure });
        if self.rank >= self.world {
            return shape("rank", self.rank, "must be below world");
        }
        if self.max_tokens == 0 || self.max_tokens > 1 << 20 {
            return shape("max_tokens", self.max_tokens, "must be from 1 to 2^20 query tokens");
        }
        if !(1..=128).contains(&self.num_heads) {
            return shape("num_heads", self.num_heads, "must be 1..=128");
        }
        if self.form != CombineForm::AllGather && !self.num_heads.is_multiple_of(self.world) {
            let cure =
                "must be a multiple of the ranks, which share the heads out: use CombineForm::AllGather";
            return shape("num_heads", self.num_heads, cure);
        }
        let row_bytes = u64::from(self.kv_lora_rank) * self.out.bytes() as u64;
        if row_bytes == 0 || !row_bytes.is_multiple_of(4) {
            let cure = "must be elements of whole words: exchanges are of multiples of 4 bytes";
            return shape("kv_lora_rank", self.kv_lora_rank, cure);
        }
        Ok(())
    }
}
