//! Whether all ranks are at the same step.

use super::Communicator;
use crate::fnv::{FNV_START, fnv1a};
use crate::{Batch, Device, Error, Mask, MlaDecode, Result, Shares};

/// What all ranks of a group must have in common in a step. Ranks that differ would give wrong numbers, or wait for each other.
///
/// What may differ is left out: the cache's dtype, pages and scale, the kernel variant, a rank's own tokens.
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
pub struct StepDigest([u64; FIELDS.len()]);

const FIELDS: [&str; 15] = [
    "their place in the group",
    "world",
    "step",
    "num_heads",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "the query's dtype",
    "the output's dtype",
    "the ContextParallelSpec",
    "the shares of the context",
    "the number of sequences",
    "seq_lens[0]",
    "seq_lens",
    "query_start_loc",
    "the mask",
];

const RANK: usize = 0;
const WORLD: usize = 1;
const STEP: usize = 2;
const SPEC: usize = 3;
const COMBINE: usize = 8;
const SHARES: usize = 9;
const BATCH: usize = 10;

impl Default for StepDigest {
    fn default() -> Self {
        Self::new()
    }
}

impl StepDigest {
    /// Nothing in common yet but the group itself.
    #[must_use]
    pub fn new() -> Self {
        Self([0; FIELDS.len()])
    }

    /// A number of the host's that all ranks count alike, such as of the step.
    #[must_use]
    pub fn step(self, step: u64) -> Self {
        self.with(STEP, [step])
    }

    /// What the decode computes, but not the cache that it reads.
    #[must_use]
    pub fn spec(self, spec: &MlaDecode) -> Self {
        let dims = [spec.shape.num_heads, spec.shape.kv_lora_rank, spec.shape.qk_rope_head_dim];
        let [heads, latent, rope] = dims.map(u64::from);
        self.with(SPEC, [heads, latent, rope, spec.query as u64, spec.out as u64])
    }

    /// Which rank holds which token.
    #[must_use]
    pub fn shares(self, shares: &Shares) -> Self {
        self.with(SHARES, [hash(shares.numbers())])
    }

    /// How partial results are combined.
    pub(crate) fn combine(self, world: u32, facts: impl IntoIterator<Item = u64>) -> Self {
        self.with(WORLD, [world.into()]).with(COMBINE, [hash(facts)])
    }

    /// The whole batch, before it is shared out: the lengths of the whole sequences.
    #[must_use]
    pub fn batch(self, batch: &Batch<'_>) -> Self {
        let numbers = |xs: &[i32]| hash(xs.iter().map(|&x| x as u64));
        let (first, count) =
            (batch.seq_lens.first().map_or(0, |&len| len as u64), batch.seq_lens.len() as u64);
        let mask = match batch.mask {
            Mask::Causal => 0,
            Mask::Full => 1,
            Mask::CausalFrom(from) => hash([2, from as u64]),
            Mask::Bounds(bounds) => hash(bounds.iter().map(|&bound| bound.into())),
        };
        self.with(BATCH, [count, first, numbers(batch.seq_lens), numbers(batch.query_start_loc), mask])
    }

    fn with<const N: usize>(mut self, at: usize, values: [u64; N]) -> Self {
        self.0[at..at + N].copy_from_slice(&values);
        self
    }

    /// Compares this with every rank's: one exchange of a few bytes, once a step.
    ///
    /// # Errors
    /// [`Error::RanksDiffer`], the same on every rank, which names the first field that differs; those of
    /// [`Communicator::all_gather_host`].
    pub fn agree<D: Device>(&self, communicator: &dyn Communicator<D>) -> Result<()> {
        let (rank, world) = (communicator.rank(), communicator.world());
        let world_too = if self.0[WORLD] == 0 { self.with(WORLD, [world.into()]) } else { *self };
        let mine = world_too.with(RANK, [rank.into()]).0.map(u64::to_le_bytes);
        let all = communicator.all_gather_host(mine.as_flattened())?;
        let digests: Vec<[u64; FIELDS.len()]> = all
            .as_chunks::<8>()
            .0
            .chunks_exact(FIELDS.len())
            .map(|words| std::array::from_fn(|i| u64::from_le_bytes(words[i])))
            .collect();
        if all.len() != world as usize * mine.as_flattened().len() {
            let detail = format!("{} ranks came, not {world}", digests.len());
            return Err(Error::Exchange { what: "the digest of a step", rank, detail });
        }
        differs(&digests, world.into()).map_or(Ok(()), Err)
    }
}

fn differs(digests: &[[u64; FIELDS.len()]], world: u64) -> Option<Error> {
    let first = digests.first()?;
    for (field, what) in FIELDS.into_iter().enumerate() {
        for (other, digest) in (0u32..).zip(digests) {
            // Of the first field a rank's own place is expected.
            let (first_has, other_has) = (first[field], digest[field]);
            let alike = if field == RANK { other_has == other.into() } else { other_has == first_has };
            if !alike {
                return Some(Error::RanksDiffer { what, first: 0, first_has, other, other_has });
            }
        }
    }
    // All agree on a world that is not the group's.
    let (first_has, other_has) = (first[WORLD], world);
    let what = "world (the last is that of the communicator)";
    (first_has != world).then_some(Error::RanksDiffer { what, first: 0, first_has, other: 0, other_has })
}

fn hash(values: impl IntoIterator<Item = u64>) -> u64 {
    values.into_iter().fold(FNV_START, |state, value| fnv1a(state, &value.to_le_bytes()))
}
