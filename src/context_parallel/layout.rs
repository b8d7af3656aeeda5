//! The arrays of an exchange, by head, so that the heads of a rank lie together; and its bytes.

use super::spec::ContextParallelSpec;
use crate::base::error::Result;
use crate::base::view::View;
use crate::communicator::form::CombineForm;
use crate::ops::Device;

/// For few bytes an all-gather is faster than sends and receives. Between two ranks on NVLink it is, as long as it sends at most about so
/// many bytes more (`benches/results/h200x2-context-parallel-2026-11-25.md`).
const SMALL_GATHER: u64 = 1 << 18;

/// Partial outputs and their LSEs.
#[derive(Debug, Clone)]
pub struct Pair<B> {
    pub out: B,
    pub lse: B,
}

impl<B> Pair<B> {
    /// New buffers, of so many heads.
    pub fn new<D: Device<Buffer = B>>(device: &D, spec: &ContextParallelSpec, heads: u32) -> Result<Self> {
        Ok(Self { out: device.buffer(spec.out_bytes(heads))?, lse: device.buffer(spec.lse_bytes(heads))? })
    }
}

impl ContextParallelSpec {
    /// Bytes that a rank sends to the others in one [`combine`](super::ContextParallel::combine), in exchanges of pairs.
    #[must_use]
    pub fn bytes_sent(&self) -> u64 {
        let to_each = match self.form {
            CombineForm::AllGatherReduceScatter => {
                self.lse_bytes(self.num_heads).saturating_add(self.out_bytes(self.local_heads()))
            }
            CombineForm::AllToAll | CombineForm::AllGather => self.pair_bytes(self.exchanged_heads()),
        };
        self.others_get(to_each)
    }

    /// Heads of a rank that come to each rank. An all-to-all of few bytes is made as an all-gather.
    pub(super) fn exchanged_heads(&self) -> u32 {
        let (all, own) = (self.num_heads, self.local_heads());
        let more = self.others_get(self.pair_bytes(all) - self.pair_bytes(own));
        if self.form == CombineForm::AllToAll && more > SMALL_GATHER { own } else { all }
    }

    fn others_get(&self, bytes: u64) -> u64 {
        bytes.saturating_mul(self.world.saturating_sub(1).into())
    }

    fn pair_bytes(&self, heads: u32) -> u64 {
        self.out_bytes(heads).saturating_add(self.lse_bytes(heads))
    }

    /// Heads of the joined LSE: a reduce-scatter is of outputs, each rank knows the LSEs of all heads.
    pub(super) fn joined_lse_heads(&self) -> u32 {
        let all = self.world == 1 || self.form == CombineForm::AllGatherReduceScatter;
        if all { self.num_heads } else { self.local_heads() }
    }

    pub(super) fn rows(&self, heads: u32) -> u64 {
        u64::from(heads) * u64::from(self.max_tokens)
    }

    pub(super) fn out_bytes(&self, heads: u32) -> u64 {
        self.rows(heads).saturating_mul(u64::from(self.kv_lora_rank) * self.out.bytes() as u64)
    }

    pub(super) fn lse_bytes(&self, heads: u32) -> u64 {
        self.rows(heads).saturating_mul(4)
    }

    /// `[heads, max_tokens, L]`, so that the heads of a rank lie together.
    pub(super) fn out_view<B>(&self, buffer: B) -> View<B> {
        let token_stride = self.kv_lora_rank.into();
        View { buffer, offset: 0, token_stride, head_stride: token_stride * u64::from(self.max_tokens) }
    }

    /// `[heads, max_tokens]`.
    pub(super) fn lse_view<B>(&self, buffer: B) -> View<B> {
        View { buffer, offset: 0, token_stride: 1, head_stride: self.max_tokens.into() }
    }
}
