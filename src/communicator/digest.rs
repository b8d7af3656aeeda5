//! A digest of a step, by which ranks check that they all work on the same one.

use super::Communicator;
use super::digest_fields::{self as field, Field, Known, differs};
use crate::base::error::{Error, Result};
use crate::base::fnv::{FNV_START, fnv1a};
use crate::base::mask::Mask;
use crate::cache::decode_spec::MlaDecode;
use crate::ops::{Device, MlaDecodeArgs};
use crate::plan::Batch;
use crate::plan::shares::Shares;

/// What all ranks of a group must have in common in a step. Ranks that differ would give wrong numbers, or wait for each other.
///
/// What may differ is left out: the cache's dtype, pages and `k_scale`, the kernel variant, how work is split, a rank's own tokens.
///
/// ```
/// use std::time::Duration;
/// use wgpu_mla::communicator::{InProcess, StepDigest};
/// use wgpu_mla::{Batch, cpu::Cpu};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// let group = InProcess::group(2, Duration::from_secs(5))?;
/// std::thread::scope(|scope| {
///     for (rank, tokens) in group.into_iter().zip([100, 101]) {
///         scope.spawn(move || {
///             let digest = StepDigest::new().batch(&Batch::new(&[tokens], &[0, 1]));
///             let error = digest.agree::<Cpu>(&rank).expect_err("another length");
///             assert!(error.to_string().contains("the ranks differ in seq_lens[0]: rank 0 has 100, rank 1 has 101"));
///         });
///     }
/// });
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepDigest(Known);

impl Default for StepDigest {
    fn default() -> Self {
        Self::new()
    }
}

impl StepDigest {
    /// Nothing in common yet but the group itself.
    #[must_use]
    pub fn new() -> Self {
        Self(Known::NOTHING)
    }

    /// Adds a number of the host's that is the same on all ranks, such as a count of steps.
    #[must_use]
    pub fn step(self, step: u64) -> Self {
        self.with(field::STEP, step)
    }

    /// Adds what the decode computes, but not the cache that it reads.
    #[must_use]
    pub fn spec(self, spec: &MlaDecode) -> Self {
        self.with(field::HEADS, spec.shape.num_heads)
            .with(field::LATENT, spec.shape.kv_lora_rank)
            .with(field::ROPE, spec.shape.qk_rope_head_dim)
            .with(field::QUERY, spec.query as u64)
            .with(field::OUT, spec.out as u64)
    }

    /// The scales of a layer's decode and the base of its LSEs, but not `k_scale`, which is of a rank's own cache. Of several layers, call
    /// it for each, on every rank in the same order: the first is shown where the ranks differ.
    #[must_use]
    pub fn layer<B>(self, args: &MlaDecodeArgs<B>) -> Self {
        let [softmax_scale, q_scale] = [args.softmax_scale, args.q_scale].map(f32::to_bits);
        if self.0.get(field::SOFTMAX_SCALE).is_none() {
            return self
                .with(field::SOFTMAX_SCALE, softmax_scale)
                .with(field::Q_SCALE, q_scale)
                .with(field::DECODE_BASE, args.lse_base as u64);
        }
        let before = self.0.get(field::OTHER_LAYERS).unwrap_or(FNV_START);
        let own = [softmax_scale.into(), q_scale.into(), args.lse_base as u64];
        self.with(field::OTHER_LAYERS, hash_on(before, own))
    }

    /// Adds which rank holds which token.
    #[must_use]
    pub fn shares(self, shares: &Shares) -> Self {
        self.with(field::SHARES_WORLD, shares.world()).with(field::SHARES, hash(shares.numbers()))
    }

    /// Adds how partial results are combined, and by which rank.
    pub(crate) fn combine(self, facts: impl IntoIterator<Item = (Field, u64)>) -> Self {
        facts.into_iter().fold(self, |all, (field, value)| all.with(field, value))
    }

    /// Adds the whole batch, before it is shared out: the lengths of the whole sequences.
    #[must_use]
    pub fn batch(self, batch: &Batch<'_>) -> Self {
        let numbers = |xs: &[i32]| hash(xs.iter().map(|&x| x as u64));
        let first = batch.seq_lens.first().map_or(0, |&len| len as u64);
        // The kind comes first: no number of one can be taken for another's.
        let mask = match batch.mask {
            Mask::Causal => hash([0]),
            Mask::Full => hash([1]),
            Mask::CausalFrom(from) => hash([2, from as u64]),
            Mask::Bounds(bounds) => {
                let bounds = bounds.iter().map(|&bound| bound.into());
                hash([3].into_iter().chain(bounds))
            }
        };
        self.with(field::SEQUENCES, batch.seq_lens.len() as u64)
            .with(field::FIRST_LEN, first)
            .with(field::LENS, numbers(batch.seq_lens))
            .with(field::STARTS, numbers(batch.query_start_loc))
            .with(field::MASK, mask)
    }

    fn with(mut self, field: Field, value: impl Into<u64>) -> Self {
        self.0.set(field, value.into());
        self
    }

    /// Compares this with every rank's: one exchange of a few bytes, once a step.
    ///
    /// # Errors
    /// [`Error::RanksDiffer`], the same on every rank, which names the first field that differs; [`Error::Shape`] for a communicator
    /// without ranks; those of [`Communicator::all_gather_host`].
    pub fn agree<D: Device>(&self, communicator: &dyn Communicator<D>) -> Result<()> {
        let (rank, world) = (communicator.rank(), communicator.world());
        super::check_world(world)?;
        let mine = self.with(field::PLACE, rank).with(field::WORLD, world).0.bytes();
        let all = communicator.all_gather_host(&mine)?;
        let (got, want) = (all.len(), world as usize * mine.len());
        if got != want {
            let detail = format!(
                "{got} bytes came of {world} ranks, not {want}: the ranks are of different versions, or the engine lost some"
            );
            return Err(Error::Exchange { what: "the digest of a step", rank, detail });
        }
        let digests: Vec<_> = all.chunks_exact(mine.len()).map(Known::from_bytes).collect();
        differs(&digests).map_or(Ok(()), Err)
    }
}

/// The hash of one list, however long: its length goes in first, so that no list is the beginning of another.
fn hash(values: impl IntoIterator<Item = u64>) -> u64 {
    let values: Vec<u64> = values.into_iter().collect();
    hash_on(hash_on(FNV_START, [values.len() as u64]), values)
}

fn hash_on(state: u64, values: impl IntoIterator<Item = u64>) -> u64 {
    values.into_iter().fold(state, |state, value| fnv1a(state, &value.to_le_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_masks_are_alike() {
        let masks = [
            Mask::Causal,
            Mask::Full,
            Mask::CausalFrom(0),
            Mask::CausalFrom(1),
            Mask::CausalFrom(5),
            Mask::CausalFrom(-5),
            Mask::Bounds(&[]),
            Mask::Bounds(&[0]),
            Mask::Bounds(&[1]),
            Mask::Bounds(&[2, 5]),
            Mask::Bounds(&[3, 2, 5]),
            Mask::Bounds(&[2, 5, 0]),
            Mask::Bounds(&[2]),
            Mask::Bounds(&[5]),
        ];
        let of = |mask| StepDigest::new().batch(&Batch { mask, ..Batch::new(&[7], &[0, 1]) });
        for (i, &a) in masks.iter().enumerate() {
            for &b in &masks[..i] {
                assert_ne!(of(a), of(b), "{a:?} {b:?}");
            }
        }
    }

    #[test]
    fn no_part_is_taken_for_another() {
        let empty = StepDigest::new();
        let of = |lens: &[i32], starts: &[i32]| empty.batch(&Batch::new(lens, starts));
        let shares = |world, interleave| Shares::even(world, interleave).expect("shares");
        let all = [
            empty,
            empty.step(0),
            empty.step(1),
            of(&[], &[]),
            of(&[], &[0]),
            of(&[0], &[0]),
            of(&[0], &[]),
            of(&[0, 0], &[0]),
            of(&[1], &[0, 2]),
            of(&[1, 0], &[2]),
            of(&[1, 0, 2], &[]),
            empty.shares(&shares(1, 1)),
            empty.shares(&shares(2, 1)),
            empty.shares(&shares(1, 2)),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a != b), "{i}");
        }
    }
}
