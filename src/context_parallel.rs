//! Decode context parallelism: joins the partial results that the ranks of a group have of one batch.
//!
//! ```text
//! once       cp = ContextParallel::new(&device, spec)?            buffers of the exchange, and what combines
//!            args = cp.decode_args(query, kv, softmax_scale)      the decode writes where the exchange reads
//! per step   cp.prepare(tokens)?                                  a plan of this rank's own tokens is the host's, as ever
//!            cp.digest().layer(&args).agree(&communicator)?       once a step, where ranks may differ
//! per layer  mla.run(&step, &binding)?; cp.combine(&communicator)?
//!            cp.out(), cp.lse()                                   all keys of all ranks, for this rank's heads
//! ```

mod layout;
mod merged;
mod spec;
#[cfg(test)]
mod tests;
mod weighted;

pub use spec::ContextParallelSpec;

use layout::Pair;
use merged::{Merged, Sets};
use weighted::Weighted;

use crate::base::error::{Error, Result};
use crate::base::view::View;
use crate::cache::KvView;
use crate::communicator::form::CombineForm;
use crate::communicator::{Communicator, StepDigest, digest_fields as field};
use crate::ops::op::Kernel;
use crate::ops::{CorrectAttnOut, MergeStates, MlaDecodeArgs, Query};

/// Joins the partial results of a group's ranks, on one rank's device. It owns the buffers: the decode writes its `out` and `lse` to
/// [`ContextParallel::partial`], and [`ContextParallel::combine`] leaves the joined ones in [`ContextParallel::out`] and
/// [`ContextParallel::lse`].
///
/// Ranks are joined by their LSEs, which f32 rounds: of a magnitude above about 256 they cost more than 1e-5 (docs/numbers.md).
///
/// With one rank these are the same buffers, and nothing is copied, launched or exchanged.
///
/// Layers run one after another: each combine reads what its decode wrote, and overwrites the one before. So one thread at a time decodes
/// into it and combines; threads that decode at once have one each, with a communicator each.
///
/// A sequence of 40 tokens on two CPUs, a thread each:
///
/// ```
/// use std::time::Duration;
/// use wgpu_mla::communicator::{Communicator, InProcess};
/// use wgpu_mla::{
///     Batch, ContextParallel, ContextParallelSpec, Device, Dtype, KvSpec, KvView, Mask, MlaDecode, MlaShape, PageTable, Plan, Query,
///     Result, Shares, SplitPolicy, View, cpu::Cpu,
/// };
///
/// fn rank(communicator: &dyn Communicator<Cpu>) -> Result<()> {
///     let (rank, world) = (communicator.rank(), communicator.world());
///     let shape = MlaShape { num_heads: 4, kv_lora_rank: 256, qk_rope_head_dim: 32 };
///     let kv = KvSpec { layout: Dtype::F32.into(), page_size: 16, num_pages: 2 };
///     let spec = MlaDecode { shape, kv, query: Dtype::F32, out: Dtype::F32 };
///     let cpu = Cpu::with_threads(1);
///     let (q, cache) = (cpu.buffer(spec.query_bytes(1))?, cpu.buffer(spec.cache_bytes())?);
///     // Rank 0 holds tokens of 1, rank 1 tokens of 2.
///     cpu.upload(&cache, 0, &Dtype::F32.encode_all(&vec![rank as f32 + 1.0; 2 * 16 * 288]))?;
///
///     // Once: the decode writes where the exchange reads.
///     let mla = cpu.compile(spec)?;
///     let mut cp = ContextParallel::new(&cpu, ContextParallelSpec::of(&spec, rank, world, 1))?;
///     let args = cp.decode_args(Query::Whole(View::dense(&q, 4, 288)), KvView::dense(&cache, &spec), 0.1);
///     let layer = mla.bind(&args, 1)?;
///     let alike = cp.digest().spec(&spec).layer(&args);
///
///     // Every step: all ranks know the whole batch, and each plans its own tokens of it, every other block of 4.
///     let (seq_lens, starts, shares) = ([40], [0, 1], Shares::even(world, 4)?);
///     alike.shares(&shares).batch(&Batch::new(&seq_lens, &starts)).agree(communicator)?;
///     let local = shares.local_seq_lens(rank, &seq_lens)?;
///     let bounds = shares.local_bounds(rank, &seq_lens, &starts)?;
///     let batch = Batch { mask: Mask::Bounds(&bounds), ..Batch::new(&local, &starts) };
///     let plan = Plan::new(&spec, &mla.tiling(), &batch, SplitPolicy::Auto)?;
///     let mut step = mla.step(Default::default())?;
///     mla.prepare(&mut step, (&plan, PageTable::Dense { block_table: &[1, 0], max_pages: 2 }))?;
///     cp.prepare(1)?;
///
///     // Every layer.
///     mla.run(&step, &layer)?;
///     cp.combine(communicator)?;
///     communicator.wait(&cpu)?;
///
///     // Two of the four heads, the average of 20 tokens of 1 and 20 of 2.
///     assert_eq!(cp.spec().local_heads(), 2);
///     let out = Dtype::F32.decode_all(&cpu.download(cp.out().buffer, 2 * 256 * 4)?);
///     assert!(out.iter().all(|x| (x - 1.5).abs() < 1e-6));
///     Ok(())
/// }
///
/// # fn main() -> Result<()> {
/// let group = InProcess::group(2, Duration::from_secs(30))?;
/// std::thread::scope(|scope| {
///     for communicator in group {
///         scope.spawn(move || rank(&communicator).expect("both came"));
///     }
/// });
/// # Ok(()) }
/// ```
pub struct ContextParallel<D: Kernel<MergeStates> + Kernel<CorrectAttnOut>> {
    device: D,
    spec: ContextParallelSpec,
    partial: Pair<D::Buffer>,
    /// With one rank, clones of the partial ones. Of a reduce-scatter, the LSEs are those of all heads.
    joined: Pair<D::Buffer>,
    combine: Combine<D>,
}

impl<D: Kernel<MergeStates> + Kernel<CorrectAttnOut>> std::fmt::Debug for ContextParallel<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ContextParallel").field("spec", &self.spec).finish_non_exhaustive()
    }
}

/// A form, compiled.
// A host has few of them: their size matters less than a box's indirection.
#[allow(clippy::large_enum_variant)]
enum Combine<D: Kernel<MergeStates> + Kernel<CorrectAttnOut>> {
    /// With one rank.
    Nothing,
    Merged(Merged<D>),
    Weighted(Weighted<D>),
}

impl<D: Kernel<MergeStates> + Kernel<CorrectAttnOut>> ContextParallel<D> {
    /// Makes the buffers and compiles what combines.
    ///
    /// # Errors
    /// [`Error::Shape`] and [`Error::DtypeUnsupported`] for a spec that is not served, such as heads that the ranks cannot share out;
    /// those of [`buffer`](crate::Device::buffer), [`compile`](crate::Device::compile) and [`Compiled::bind`](crate::Compiled::bind).
    pub fn new(device: &D, spec: ContextParallelSpec) -> Result<Self> {
        spec.check()?;
        if spec.world == 1 {
            let partial = Pair::new(device, &spec, spec.num_heads)?;
            let joined = partial.clone();
            return Ok(Self { device: device.clone(), spec, partial, joined, combine: Combine::Nothing });
        }
        let joined = Pair {
            out: device.buffer(spec.out_bytes(spec.local_heads()))?,
            lse: device.buffer(spec.lse_bytes(spec.joined_lse_heads()))?,
        };
        let (partial, combine) = match spec.form {
            CombineForm::AllGatherReduceScatter => {
                let partial = Pair::new(device, &spec, spec.num_heads)?;
                let weighted = Weighted::new(device, spec, &partial, &joined)?;
                (partial, Combine::Weighted(weighted))
            }
            CombineForm::AllToAll | CombineForm::AllGather => {
                let sets = Sets::new(device, &spec)?;
                (sets.partial.clone(), Combine::Merged(Merged::new(device, spec, sets, &joined)?))
            }
        };
        Ok(Self { device: device.clone(), spec, partial, joined, combine })
    }

    /// What it was made for.
    #[must_use]
    pub fn spec(&self) -> &ContextParallelSpec {
        &self.spec
    }

    /// Where it runs.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// `out` and `lse` of the decode's [`MlaDecodeArgs`], with `lse_base` as in the spec: `[num_heads, max_tokens, L]` and
    /// `[num_heads, max_tokens]`, so that the heads of a rank lie together.
    pub fn partial(&self) -> (View<&D::Buffer>, View<&D::Buffer>) {
        (self.spec.out_view(&self.partial.out), self.spec.lse_view(&self.partial.lse))
    }

    /// The arguments of a layer's decode into [`ContextParallel::partial`], with the spec's base of LSEs. `k_scale` and `q_scale` are 1:
    /// those of e4m3 elements replace them, `MlaDecodeArgs { k_scale, ..cp.decode_args(query, kv, softmax_scale) }`.
    pub fn decode_args<'a>(
        &'a self,
        query: Query<&'a D::Buffer>,
        kv: KvView<&'a D::Buffer>,
        softmax_scale: f32,
    ) -> MlaDecodeArgs<&'a D::Buffer> {
        let ((out, lse), lse_base) = (self.partial(), self.spec.lse_base);
        MlaDecodeArgs {
            query,
            kv,
            out,
            lse,
            lse_base,
            softmax_scale,
            k_scale: 1.0,
            q_scale: 1.0,
            indices: None,
            attn_sink: None,
        }
    }

    /// The joined output, `[local_heads, max_tokens, L]`.
    pub fn out(&self) -> View<&D::Buffer> {
        self.spec.out_view(&self.joined.out)
    }

    /// The joined LSE, f32 `[local_heads, max_tokens]`, in the spec's base.
    pub fn lse(&self) -> View<&D::Buffer> {
        let lse = self.spec.lse_view(&self.joined.lse);
        let all = self.spec.joined_lse_heads() > self.spec.local_heads();
        let heads_before = if all { self.spec.rank * self.spec.local_heads() } else { 0 };
        View { offset: u64::from(heads_before) * lse.head_stride, ..lse }
    }

    /// Query tokens of the next combines, at most `max_tokens`.
    ///
    /// # Errors
    /// [`Error::Shape`] for more, and those of [`Compiled::prepare`](crate::Compiled::prepare).
    pub fn prepare(&mut self, tokens: u32) -> Result<()> {
        if tokens > self.spec.max_tokens {
            let cure = "must be at most the spec's max_tokens";
            return Err(Error::Shape { what: "query tokens", got: tokens.into(), cure });
        }
        match &mut self.combine {
            Combine::Nothing => Ok(()),
            Combine::Merged(merged) => merged.prepare(tokens),
            Combine::Weighted(weighted) => weighted.prepare(tokens),
        }
    }

    /// What the ranks must have in common, as far as it is known here, and this rank's place; the host adds the batch, the shares, the
    /// decode's spec and its scales ([`StepDigest::layer`]).
    #[must_use]
    pub fn digest(&self) -> StepDigest {
        let spec = &self.spec;
        StepDigest::new().combine([
            (field::CP_WORLD, spec.world.into()),
            (field::CP_RANK, spec.rank.into()),
            (field::CP_HEADS, spec.num_heads.into()),
            (field::CP_LATENT, spec.kv_lora_rank.into()),
            (field::CP_OUT, spec.out as u64),
            (field::CP_TOKENS, spec.max_tokens.into()),
            (field::CP_FORM, spec.form as u64),
            (field::CP_BASE, spec.lse_base as u64),
        ])
    }

    /// Exchanges the partial results of a layer and joins them. Called after the decode was submitted. With an engine in stream order
    /// all of it is put on the stream, and may be captured together with the decode; otherwise it waits for the decode.
    ///
    /// # Errors
    /// The errors of the [`Communicator`], [`Error::RanksDiffer`] for one of another rank or world than the spec's, before anything is
    /// exchanged, and those of [`Compiled::run`](crate::Compiled::run). The other ranks learn of the former by [`StepDigest::agree`].
    pub fn combine(&self, communicator: &dyn Communicator<D>) -> Result<()> {
        self.check_place(communicator.rank(), communicator.world())?;
        match &self.combine {
            Combine::Nothing => Ok(()),
            Combine::Merged(merged) => merged.run(communicator),
            Combine::Weighted(weighted) => weighted.run(communicator, &self.partial),
        }
    }

    /// With another rank's place the wrong heads would be merged, or the wrong weights used.
    ///
    /// # Errors
    /// [`Error::RanksDiffer`].
    fn check_place(&self, rank: u32, world: u32) -> Result<()> {
        for (what, has, of_communicator) in [
            ("world (of its ContextParallel, and of its communicator)", self.spec.world, world),
            ("rank (of its ContextParallel, and of its communicator)", self.spec.rank, rank),
        ] {
            if has != of_communicator {
                let (first_has, other_has) = (has.to_string(), of_communicator.to_string());
                let cure = "make the ContextParallel with the rank and world of its communicator";
                return Err(Error::RanksDiffer {
                    what,
                    first: rank,
                    first_has,
                    other: rank,
                    other_has,
                    cure,
                });
            }
        }
        Ok(())
    }
}
