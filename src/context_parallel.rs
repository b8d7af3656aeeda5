//! Decode context parallelism: joins the partial results that the ranks of a group have of one batch.
//!
//! ```text
//! once       cp = ContextParallel::new(&device, spec)?            buffers of the exchange, and what combines
//!            args = MlaDecodeArgs { out, lse, .. }                out and lse from cp.partial(): the decode writes there
//! per step   cp.prepare(tokens)?                                  a plan of this rank's own tokens is the host's, as ever
//!            digest.agree(&communicator)?                         once a step, where ranks may differ
//! per layer  mla.run(&step, &binding)?; cp.combine(&communicator)?
//!            cp.out(), cp.lse()                                   all keys of all ranks, for this rank's heads
//! ```

use crate::communicator::{Communicator, Exchange, StepDigest, check_world};
use crate::ops::op::{Binding, Compiled, Kernel, Step};
use crate::{
    CorrectAttnOut, CorrectAttnOutArgs, Dtype, Error, LseBase, MergeStates, MergeStatesArgs,
    MergeStatesExtent, MlaDecode, Result, View,
};

/// How partial results are exchanged. All give the same numbers, within rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CombineForm {
    /// LSEs are gathered, each rank scales its output by its weight, and the outputs are summed, heads scattered over the ranks: vLLM's
    /// `cp_lse_ag_out_rs`. Two exchanges; sums are of the output's dtype.
    AllGatherReduceScatter,
    /// Each rank gets the partial results of its heads from all ranks and merges them: vLLM's all-to-all form. One exchange.
    #[default]
    AllToAll,
    /// Every rank gets the partial results of all heads from all ranks and merges them: for heads that the ranks cannot share out, or
    /// where every rank needs all. One exchange, of `world` times the bytes.
    AllGather,
}

/// What a [`ContextParallel`] is made for.
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

    /// Bytes that a rank sends to the others in one [`ContextParallel::combine`], in exchanges of pairs.
    #[must_use]
    pub fn bytes_sent(&self) -> u64 {
        let (world, tokens) = (u64::from(self.world), u64::from(self.max_tokens));
        let others = world.saturating_sub(1);
        let out = u64::from(self.kv_lora_rank) * self.out.bytes() as u64;
        let heads = u64::from(self.num_heads);
        match self.form {
            CombineForm::AllGather => others * tokens * heads * (out + 4),
            CombineForm::AllToAll => others * tokens * (heads / world.max(1)) * (out + 4),
            CombineForm::AllGatherReduceScatter => others * tokens * (heads * 4 + heads / world.max(1) * out),
        }
    }

    /// # Errors
    /// [`Error::Shape`].
    fn check(&self) -> Result<()> {
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

    /// Heads of the joined LSE: a reduce-scatter is of outputs, each rank knows the LSEs of all heads.
    fn joined_lse_heads(&self) -> u32 {
        let all = self.world == 1 || self.form == CombineForm::AllGatherReduceScatter;
        if all { self.num_heads } else { self.local_heads() }
    }

    fn rows(&self, heads: u32) -> u64 {
        u64::from(heads) * u64::from(self.max_tokens)
    }

    fn out_bytes(&self, heads: u32) -> u64 {
        self.rows(heads) * u64::from(self.kv_lora_rank) * self.out.bytes() as u64
    }

    fn lse_bytes(&self, heads: u32) -> u64 {
        self.rows(heads) * 4
    }

    /// `[heads, max_tokens, L]`, so that the heads of a rank lie together.
    fn out_view<B>(&self, buffer: B) -> View<B> {
        let token_stride = self.kv_lora_rank.into();
        View { buffer, offset: 0, token_stride, head_stride: token_stride * u64::from(self.max_tokens) }
    }

    /// `[heads, max_tokens]`.
    fn lse_view<B>(&self, buffer: B) -> View<B> {
        View { buffer, offset: 0, token_stride: 1, head_stride: self.max_tokens.into() }
    }
}

/// Joins the partial results of a group's ranks, on one rank's device. It owns the buffers: the decode writes its `out` and `lse` to
/// [`ContextParallel::partial`], and [`ContextParallel::combine`] leaves the joined ones in [`ContextParallel::out`] and
/// [`ContextParallel::lse`].
///
/// With one rank these are the same buffers, and nothing is copied, launched or exchanged.
///
/// Layers run one after another: each combine reads what its decode wrote, and overwrites the one before.
///
/// A sequence of 40 tokens on two CPUs, a thread each:
///
/// ```
/// use std::time::Duration;
/// use wgpu_mla::communicator::{Communicator, InProcess};
/// use wgpu_mla::{
///     Batch, ContextParallel, ContextParallelSpec, Device, Dtype, KvSpec, Mask, MlaDecode, MlaDecodeArgs, MlaShape, PageTable, Plan, Result,
///     Shares, SplitPolicy, cpu::Cpu,
/// };
///
/// fn rank(communicator: &dyn Communicator<Cpu>) -> Result<()> {
///     let (rank, world) = (communicator.rank(), communicator.world());
///     let shape = MlaShape { num_heads: 4, kv_lora_rank: 256, qk_rope_head_dim: 32 };
///     let kv = KvSpec { dtype: Dtype::F32, page_size: 16, num_pages: 2 };
///     let spec = MlaDecode { shape, kv, query: Dtype::F32, out: Dtype::F32 };
///     let cpu = Cpu::with_threads(1);
///     let (q, cache) = (cpu.buffer(spec.query_bytes(1))?, cpu.buffer(spec.cache_bytes())?);
///     // Rank 0 holds tokens of 1, rank 1 tokens of 2.
///     cpu.upload(&cache, 0, &Dtype::F32.encode_all(&vec![rank as f32 + 1.0; 2 * 16 * 288]))?;
///
///     // Once: the decode writes where the exchange reads.
///     let mla = cpu.compile(spec)?;
///     let mut cp = ContextParallel::new(&cpu, ContextParallelSpec::of(&spec, rank, world, 1))?;
///     let (out, lse) = cp.partial();
///     let dense = MlaDecodeArgs::dense(&spec, &q, &cache, out.buffer, lse.buffer, 0.1);
///     let layer = mla.bind(&MlaDecodeArgs { out, lse, ..dense }, 1)?;
///
///     // Every step: all ranks know the whole batch, and each plans its own tokens of it, every other block of 4.
///     let (seq_lens, starts, shares) = ([40], [0, 1], Shares::even(world, 4)?);
///     cp.digest().spec(&spec).batch(&Batch::new(&seq_lens, &starts)).agree(communicator)?;
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

#[derive(Debug, Clone)]
struct Pair<B> {
    out: B,
    lse: B,
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
    /// those of [`buffer`](crate::Device::buffer), [`compile`](crate::Device::compile) and [`Compiled::bind`].
    pub fn new(device: &D, spec: ContextParallelSpec) -> Result<Self> {
        spec.check()?;
        let pair = |heads: u32| {
            let out = device.buffer(spec.out_bytes(heads))?;
            Ok::<_, Error>(Pair { out, lse: device.buffer(spec.lse_bytes(heads))? })
        };
        if spec.world == 1 {
            let partial = pair(spec.num_heads)?;
            let joined = partial.clone();
            return Ok(Self { device: device.clone(), spec, partial, joined, combine: Combine::Nothing });
        }
        let joined = Pair {
            out: device.buffer(spec.out_bytes(spec.local_heads()))?,
            lse: device.buffer(spec.lse_bytes(spec.joined_lse_heads()))?,
        };
        let sets = Sets::new(device, &spec)?;
        let partial = sets.partial.clone();
        let combine = match spec.form {
            CombineForm::AllGatherReduceScatter => {
                Combine::Weighted(Weighted::new(device, spec, &partial, &joined)?)
            }
            _ => Combine::Merged(Merged::new(device, spec, sets, &joined)?),
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

    /// `out` and `lse` of the decode's [`crate::MlaDecodeArgs`], with `lse_base` as in the spec: `[num_heads, max_tokens, L]` and
    /// `[num_heads, max_tokens]`, so that the heads of a rank lie together.
    pub fn partial(&self) -> (View<&D::Buffer>, View<&D::Buffer>) {
        (self.spec.out_view(&self.partial.out), self.spec.lse_view(&self.partial.lse))
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
    /// [`Error::Shape`] for more, and those of [`Compiled::prepare`].
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

    /// What the ranks must have in common, as far as it is known here; the host adds the batch, the shares and the decode's spec.
    #[must_use]
    pub fn digest(&self) -> StepDigest {
        let spec = &self.spec;
        let dims = [spec.num_heads, spec.kv_lora_rank, spec.max_tokens].map(u64::from);
        let facts = dims.into_iter().chain([spec.out as u64, spec.form as u64, spec.lse_base as u64]);
        StepDigest::new().combine(spec.world, facts)
    }

    /// Exchanges the partial results of a layer and joins them. Called after the decode was submitted. With an engine in stream order
    /// all of it is put on the stream, and may be captured together with the decode; otherwise it waits for the decode.
    ///
    /// # Errors
    /// Those of the [`Communicator`], [`Error::RanksDiffer`] for one of another world, and those of [`Compiled::run`].
    pub fn combine(&self, communicator: &dyn Communicator<D>) -> Result<()> {
        let world = communicator.world();
        if world != self.spec.world {
            let (first_has, other_has) = (self.spec.world.into(), world.into());
            let rank = communicator.rank();
            let what = "world (of the ContextParallel and of its communicator)";
            return Err(Error::RanksDiffer { what, first: rank, first_has, other: rank, other_has });
        }
        match &self.combine {
            Combine::Nothing => Ok(()),
            Combine::Merged(merged) => merged.run(communicator, &self.partial),
            Combine::Weighted(weighted) => weighted.run(communicator, &self.partial),
        }
    }
}

/// What is exchanged: this rank's partial results, and those that come.
struct Sets<B> {
    partial: Pair<B>,
    gathered: Pair<B>,
    /// Both pairs as one piece of memory each, where the device has parts of buffers: an exchange is then one message.
    whole: Option<(B, B)>,
    /// Heads of a rank that come to each rank.
    heads: u32,
    /// Bytes of a rank's set in `whole`.
    set_bytes: u64,
}

/// Up to so many bytes all heads are gathered, though a rank needs only some: an all-gather of few bytes is sooner done than sends and
/// receives are (`benches/results/h200x2-context-parallel-2026-11-25.md`).
const SMALL_GATHER: u64 = 1 << 20;

impl<B: Clone> Sets<B> {
    fn new<D: crate::Device<Buffer = B>>(device: &D, spec: &ContextParallelSpec) -> Result<Self> {
        let world = u64::from(spec.world);
        let [out, lse] = [spec.out_bytes(spec.num_heads), spec.lse_bytes(spec.num_heads)];
        // A set begins where vector loads may.
        let set_bytes = (out + lse).next_multiple_of(32);
        let heads = match spec.form {
            CombineForm::AllToAll if world * set_bytes > SMALL_GATHER => spec.local_heads(),
            _ => spec.num_heads,
        };
        if heads == spec.num_heads
            && spec.form != CombineForm::AllGatherReduceScatter
            && out.is_multiple_of(16)
        {
            let (from, to) = (device.buffer(set_bytes)?, device.buffer(set_bytes * world)?);
            let parts = |whole: &B, bytes: u64| D::part(whole, 0, bytes).zip(D::part(whole, out, lse));
            if let (Some(partial), Some(gathered)) = (parts(&from, out), parts(&to, out)) {
                let [partial, gathered] = [partial, gathered].map(|(out, lse)| Pair { out, lse });
                return Ok(Self { partial, gathered, whole: Some((from, to)), heads, set_bytes });
            }
        }
        let partial = Pair { out: device.buffer(out)?, lse: device.buffer(lse)? };
        let gathered = Pair {
            out: device.buffer(spec.out_bytes(heads) * world)?,
            lse: device.buffer(spec.lse_bytes(heads) * world)?,
        };
        Ok(Self { partial, gathered, whole: None, heads, set_bytes })
    }

    /// The heads that this rank merges: views of their first set, and strides from a set to the next.
    fn merged(&self, spec: &ContextParallelSpec) -> [(View<&B>, u64); 2] {
        let first = if self.heads == spec.local_heads() { 0 } else { spec.rank * spec.local_heads() };
        let Pair { out, lse } = &self.gathered;
        let [out, lse] = [spec.out_view(out), spec.lse_view(lse)]
            .map(|view| View { offset: u64::from(first) * view.head_stride, ..view });
        let Some((_, all)) = &self.whole else {
            let rows = spec.rows(self.heads);
            return [(out, rows * u64::from(spec.kv_lora_rank)), (lse, rows)];
        };
        let lse_at = spec.out_bytes(self.heads) / 4;
        let (out, lse) =
            (View { buffer: all, ..out }, View { buffer: all, offset: lse_at + lse.offset, ..lse });
        [(out, self.set_bytes / spec.out.bytes() as u64), (lse, self.set_bytes / 4)]
    }
}

/// All-to-all, or all-gather, and a merge.
struct Merged<D: Kernel<MergeStates>> {
    device: D,
    spec: ContextParallelSpec,
    sets: Sets<D::Buffer>,
    merge: Compiled<MergeStates, D>,
    step: Step<MergeStates, D>,
    binding: Binding<MergeStates, D>,
}

impl<D: Kernel<MergeStates>> Merged<D> {
    fn new(
        device: &D,
        spec: ContextParallelSpec,
        sets: Sets<D::Buffer>,
        joined: &Pair<D::Buffer>,
    ) -> Result<Self> {
        let merge = device.compile(MergeStates { dtype: spec.out, head_size: spec.kv_lora_rank })?;
        let [(states, set_stride), (lse, lse_set_stride)] = sets.merged(&spec);
        let args = MergeStatesArgs {
            states,
            set_stride,
            lse,
            lse_set_stride,
            lse_base: spec.lse_base,
            output: spec.out_view(&joined.out),
            output_lse: Some(spec.lse_view(&joined.lse)),
            num_heads: spec.local_heads(),
        };
        let room = MergeStatesExtent { tokens: spec.max_tokens, sets: spec.world };
        let binding = merge.bind(&args, room)?;
        let step = merge.step(spec.max_tokens)?;
        Ok(Self { device: device.clone(), spec, sets, merge, step, binding })
    }

    fn prepare(&mut self, tokens: u32) -> Result<()> {
        self.merge.prepare(&mut self.step, (0..tokens, self.spec.world))
    }

    fn run(&self, communicator: &dyn Communicator<D>, partial: &Pair<D::Buffer>) -> Result<()> {
        let Sets { gathered, whole, heads, set_bytes, .. } = &self.sets;
        if let Some((from, to)) = whole {
            communicator.all_gather(&self.device, &[Exchange { from, to, bytes: *set_bytes }])?;
            return self.merge.run(&self.step, &self.binding);
        }
        let exchanges = [
            (&partial.out, &gathered.out, self.spec.out_bytes(*heads)),
            (&partial.lse, &gathered.lse, self.spec.lse_bytes(*heads)),
        ]
        .map(|(from, to, bytes)| Exchange { from, to, bytes });
        if *heads == self.spec.num_heads {
            communicator.all_gather(&self.device, &exchanges)?;
        } else {
            communicator.all_to_all(&self.device, &exchanges)?;
        }
        self.merge.run(&self.step, &self.binding)
    }
}

/// The LSEs are gathered, the outputs weighted, and summed by a reduce-scatter.
struct Weighted<D: Kernel<CorrectAttnOut>> {
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
    fn new(
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

    fn prepare(&mut self, tokens: u32) -> Result<()> {
        self.correct.prepare(&mut self.step, 0..tokens)
    }

    fn run(&self, communicator: &dyn Communicator<D>, partial: &Pair<D::Buffer>) -> Result<()> {
        let bytes = self.spec.lse_bytes(self.spec.num_heads);
        let lses = Exchange { from: &partial.lse, to: &self.lses, bytes };
        communicator.all_gather(&self.device, &[lses])?;
        self.correct.run(&self.step, &self.binding)?;
        let bytes = self.spec.out_bytes(self.spec.local_heads());
        let sums = Exchange { from: &self.weighted, to: &self.out, bytes };
        communicator.reduce_scatter(&self.device, &sums, self.spec.out)
    }
}
