//! Cases of context parallelism: a decode cut into ranks, all on this device, and the merge of their results.

use mla_support::case::{DcpCombineCase, DcpDecodeCase, Saved};
use mla_support::paint::Problem;
use mla_support::ranks::cut;
use wgpu_mla::any::{AnyBackend, Buffer};
use wgpu_mla::{
    Batch, Capacity, Device, Dtype, LseBase, MergeStates, MergeStatesArgs, MlaDecodeArgs, PageTable, Plan,
    Result, SplitPolicy, View,
};

use crate::check::{self, dtypes};
use crate::run::{Ran, Runner, decode_shape, download, poisoned, time, upload};

/// Decodes each rank's part into f32 and merges them.
pub fn run_decode(runner: &mut Runner<'_>, case: &DcpDecodeCase) -> Result<Ran> {
    let whole = Problem::of_case("", &case.decode);
    let (backend, shares, world) = (runner.backend, &case.shares, case.shares.world());
    let (heads, latent) = (whole.spec.shape.num_heads, whole.spec.shape.kv_lora_rank);
    let tokens = whole.total_q();
    let rows = tokens * heads as usize;
    let sets = Sets::new(backend, world, tokens, heads, latent)?;

    let q = upload(backend, &whole.q)?;
    let mut ranks = Vec::new();
    let mut local_seq_lens = Vec::new();
    let (mut variant, mut rounds_weights) = ("-", false);
    for rank in 0..world {
        let part = cut(&whole, shares, rank)?;
        let decode = runner.decode(&part.spec)?;
        (variant, rounds_weights) = (decode.variant(), decode.rounds_weights());
        let batch = Batch { mask: part.mask(), ..Batch::new(&part.seq_lens, &part.query_start_loc) };
        let plan = Plan::new(&part.spec, &decode.tiling(), &batch, SplitPolicy::Auto)?;
        let mut step = decode.step(Capacity::of(&plan))?;
        let pages = PageTable::Dense { block_table: &part.block_table, max_pages: part.max_pages as u32 };
        decode.prepare(&mut step, (&plan, pages))?;
        let kv = upload(backend, &part.kv)?;
        let dense = MlaDecodeArgs::dense(&part.spec, &q, &kv, &sets.outs, &sets.lses, part.softmax_scale);
        let at = |view: View<_>, dim: u64| View { offset: u64::from(rank) * rows as u64 * dim, ..view };
        let layer = MlaDecodeArgs {
            out: at(dense.out, latent.into()),
            lse: at(dense.lse, 1),
            k_scale: part.k_scale,
            q_scale: part.q_scale,
            ..dense
        };
        let binding = decode.bind(&layer, tokens as u32)?;
        local_seq_lens.extend(part.seq_lens);
        ranks.push((decode, step, binding));
    }
    let spec = MergeStates { dtype: Dtype::F32, head_size: latent };
    let merge = sets.merge(backend, spec, LseBase::E)?;
    let seconds = time(backend, || {
        ranks.iter().try_for_each(|(decode, step, binding)| decode.run(step, binding))?;
        merge.run()
    })?;

    let (out, lse) = sets.results(backend, Dtype::F32)?;
    let out = Dtype::F32.decode_all(&out);
    let verdict = check::dcp_decode(case, rounds_weights, &out, &lse, &local_seq_lens);
    let computed = vec![
        Saved::f32s("out", &[tokens, heads as usize, latent as usize], &out),
        Saved::f32s("lse", &[tokens, heads as usize], &lse),
        Saved::i32s("local_seq_lens", &[world as usize, whole.seq_lens.len()], &local_seq_lens),
    ];
    Ok(Ran { seconds, variant, verdict, computed })
}

/// Merges the results of a file.
pub fn run_combine(backend: &AnyBackend, case: &DcpCombineCase) -> Result<Ran> {
    let (tokens, heads, size) = (case.num_tokens, case.num_heads, case.spec.head_size);
    let mut sets = Sets::new(backend, case.world as u32, tokens, heads as u32, size)?;
    sets.outs = upload(backend, &case.outs)?;
    sets.lses = upload(backend, &Dtype::F32.encode_all(&case.lses))?;
    let merge = sets.merge(backend, case.spec, case.lse_base)?;
    let seconds = time(backend, || merge.run())?;

    let (out, lse) = sets.results(backend, case.spec.dtype)?;
    let out = case.spec.dtype.decode_all(&out);
    let verdict = check::dcp_combine(case, &out, &lse);
    let computed = vec![
        Saved::f32s("out", &[tokens, heads, size as usize], &out),
        Saved::f32s("lse", &[tokens, heads], &lse),
    ];
    Ok(Ran { seconds, variant: "-", verdict, computed })
}

/// The results of ranks and of their merge, dense.
struct Sets {
    world: u32,
    tokens: usize,
    heads: u32,
    head_size: u32,
    /// `[world, tokens, heads, head_size]`.
    outs: Buffer,
    /// `[world, tokens, heads]`.
    lses: Buffer,
    /// `[tokens, heads, head_size]`.
    out: Buffer,
    /// `[tokens, heads]`.
    lse: Buffer,
}

/// A merge that is ready to run.
struct Merge {
    op: wgpu_mla::Compiled<MergeStates, AnyBackend>,
    step: wgpu_mla::Step<MergeStates, AnyBackend>,
    binding: wgpu_mla::Binding<MergeStates, AnyBackend>,
}

impl Merge {
    fn run(&self) -> Result<()> {
        self.op.run(&self.step, &self.binding)
    }
}

impl Sets {
    /// All poisoned, with room for f32.
    fn new(backend: &AnyBackend, world: u32, tokens: usize, heads: u32, head_size: u32) -> Result<Self> {
        let rows = tokens * heads as usize;
        let (all, size) = (world as usize * rows, head_size as usize);
        let buffer = |elements: usize| poisoned(backend, elements * 4);
        let (outs, lses) = (buffer(all * size)?, buffer(all)?);
        let (out, lse) = (buffer(rows * size)?, buffer(rows)?);
        Ok(Self { world, tokens, heads, head_size, outs, lses, out, lse })
    }

    fn rows(&self) -> usize {
        self.tokens * self.heads as usize
    }

    fn merge(&self, backend: &AnyBackend, spec: MergeStates, lse_base: LseBase) -> Result<Merge> {
        let args = MergeStatesArgs {
            states: View::dense(&self.outs, self.heads, self.head_size),
            set_stride: self.rows() as u64 * u64::from(self.head_size),
            lse: View::dense(&self.lses, self.heads, 1),
            lse_set_stride: self.rows() as u64,
            output: View::dense(&self.out, self.heads, self.head_size),
            output_lse: Some(View::dense(&self.lse, self.heads, 1)),
            lse_base,
            num_heads: self.heads,
            output_scale: 1.0,
        };
        let op = backend.compile(spec)?;
        let mut step = op.step(self.tokens as u32)?;
        op.prepare(&mut step, (0..self.tokens as u32, self.world))?;
        let binding = op.bind(&args, step.used())?;
        Ok(Merge { op, step, binding })
    }

    /// The bytes of the merged output, and its LSE.
    fn results(&self, backend: &AnyBackend, dtype: Dtype) -> Result<(Vec<u8>, Vec<f32>)> {
        let bytes = self.rows() * self.head_size as usize * dtype.bytes();
        let lse = download(backend, &self.lse, self.rows() * 4)?;
        Ok((download(backend, &self.out, bytes)?, Dtype::F32.decode_all(&lse)))
    }
}

/// `w` and `i`: world and interleave.
pub fn dcp_decode_shape(case: &DcpDecodeCase) -> String {
    let (world, interleave) = (case.shares.world(), case.shares.interleave());
    format!("w{world} i{interleave} {}", decode_shape(&case.decode))
}

pub fn combine_shape(case: &DcpCombineCase) -> String {
    let DcpCombineCase { world, num_tokens, num_heads, spec, lse_base, .. } = case;
    let base = if *lse_base == LseBase::Two { "2" } else { "e" };
    let dtype = dtypes(spec.dtype, spec.dtype);
    format!("w{world} tokens {num_tokens} H{num_heads} head_size {} {dtype} base {base}", spec.head_size)
}

/// Read and written.
pub fn combine_bytes(case: &DcpCombineCase) -> u64 {
    let one = (case.outs.len() + case.lses.len() * 4) / case.world;
    ((case.world + 1) * one) as u64
}
