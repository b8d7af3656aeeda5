//! What one rank does with a batch.

use std::time::{Duration, Instant};

use mla_support::case::DcpCombineCase;
use mla_support::close::{Report, Tolerance, close};
use mla_support::paint::Problem;
use mla_support::ranks;
use wgpu_mla::communicator::Communicator;
use wgpu_mla::{
    Backend, Batch, CombineForm, ContextParallel, ContextParallelSpec, Dtype, Error, KvView, MlaDecodeArgs,
    PageTable, Plan, Query, Shares, SplitPolicy, View,
};

use crate::problems::Whole;
use crate::timed::Timed;

/// How a batch is decoded.
#[derive(Debug, Clone)]
pub struct Setup {
    pub shares: Shares,
    pub form: CombineForm,
    /// Decodes of the batch; the last is timed.
    pub steps: u64,
    /// The last rank dies in this step.
    pub kill: Option<(u64, Kill)>,
}

/// How a rank dies.
#[derive(Debug, Clone, Copy)]
pub enum Kill {
    /// Its thread.
    Panic,
    /// Its process, without a word to anyone.
    Abort,
}

/// What a rank did, and whether it was right.
#[derive(Debug, Clone)]
pub struct Did {
    pub rank: u32,
    pub device: String,
    pub variant: &'static str,
    pub form: CombineForm,
    /// Tokens of all sequences that it holds.
    pub tokens: u64,
    /// Bytes of the cache that a decode reads.
    pub read: u64,
    /// Bytes that it sends to the others.
    pub sent: u64,
    /// Time of the decode.
    pub computed: Duration,
    /// Time in exchanges, most of it waiting for other ranks.
    pub waited: Duration,
    /// The largest error, as a share of what is allowed.
    pub error: f64,
    pub failure: Option<String>,
}

/// Decodes a rank's part of a batch, joins it with the others', and checks the heads that it gets.
///
/// # Errors
/// The device's, and the communicator's: a rank that is gone, or differs.
pub fn run<D: Backend + 'static>(
    device: &D,
    communicator: &dyn Communicator<D>,
    whole: &Whole,
    setup: &Setup,
) -> Result<Did, Error> {
    let Setup { shares, form, steps, kill } = setup;
    let communicator = Timed::new(communicator);
    let (rank, world) = (communicator.rank(), communicator.world());
    let part = ranks::cut(&whole.problem, shares, rank)?;
    let tokens = part.total_q() as u32;
    let spec = part.spec;

    // Once a model.
    let mla = device.compile(spec)?;
    let of_decode = ContextParallelSpec::of(&spec, rank, world, tokens.max(1));
    let mut cp = ContextParallel::new(device, ContextParallelSpec { form: *form, ..of_decode })?;

    // Once a layer: the decode writes where the exchange reads.
    let (q, cache) = (upload(device, &part.q)?, upload(device, &part.kv)?);
    let query = Query::Whole(View::dense(&q, spec.shape.num_heads, spec.shape.row_elems()));
    let args = cp.decode_args(query, KvView::dense(&cache, &spec), part.softmax_scale);
    let args = MlaDecodeArgs { k_scale: part.k_scale, q_scale: part.q_scale, ..args };
    let binding = mla.bind(&args, tokens)?;
    let alike = cp.digest().spec(&spec).layer(&args).shares(shares);

    let mut step = mla.step(Default::default())?;
    let (mut computed, mut waited) = Default::default();
    for count in 1..=*steps {
        if let Some((after, how)) = kill
            && rank + 1 == world
            && *after == count
        {
            die(*how);
        }
        // Once a step, for all layers: all ranks are of one mind about the whole, then each plans its own part.
        let all = Batch {
            mask: whole.problem.mask(),
            ..Batch::new(&whole.problem.seq_lens, &whole.problem.query_start_loc)
        };
        alike.step(count).batch(&all).agree(&communicator)?;
        let batch = Batch { mask: part.mask(), ..Batch::new(&part.seq_lens, &part.query_start_loc) };
        let plan = Plan::new(&spec, &mla.tiling(), &batch, SplitPolicy::Auto)?;
        let pages = PageTable::Dense { block_table: &part.block_table, max_pages: part.max_pages as u32 };
        mla.prepare(&mut step, (&plan, pages))?;
        cp.prepare(tokens)?;

        // Every layer.
        let begin = Instant::now();
        mla.run(&step, &binding)?;
        device.download(cp.partial().1.buffer, 4)?;
        computed = begin.elapsed();
        communicator.take();
        cp.combine(&communicator)?;
        communicator.wait(device)?;
        waited = communicator.take();
    }

    let heads = cp.spec().local_heads();
    let first_head = if heads == spec.shape.num_heads { 0 } else { rank * heads };
    let out = read(device, cp.out(), tokens, heads, spec.shape.kv_lora_rank, spec.out)?;
    let lse = read(device, cp.lse(), tokens, heads, 1, Dtype::F32)?;
    let (error, failure) = check(whole, mla.rounds_weights(), first_head..first_head + heads, &out, &lse);
    Ok(Did {
        rank,
        device: device.name(),
        variant: mla.variant(),
        form: *form,
        tokens: part.seq_lens.iter().map(|&len| len as u64).sum(),
        read: bytes_read(&part),
        sent: cp.spec().bytes_sent(),
        computed,
        waited,
        error,
        failure,
    })
}

/// Joins the partial results of a case, of which each rank holds its own, and checks the heads that it gets.
///
/// # Errors
/// The errors of [`run`].
pub fn combine<D: Backend + 'static>(
    device: &D,
    communicator: &dyn Communicator<D>,
    case: &DcpCombineCase,
    form: CombineForm,
) -> Result<Did, Error> {
    let communicator = Timed::new(communicator);
    let (rank, world) = (communicator.rank(), communicator.world());
    let (tokens, num_heads) = (case.num_tokens as u32, case.num_heads as u32);
    let (dim, dtype) = (case.spec.head_size, case.spec.dtype);
    let spec = ContextParallelSpec {
        num_heads,
        kv_lora_rank: dim,
        out: dtype,
        lse_base: case.lse_base,
        rank,
        world,
        max_tokens: tokens,
        form,
    };
    let mut cp = ContextParallel::new(device, spec)?;
    cp.prepare(tokens)?;
    cp.digest().agree(&communicator)?;

    // Partial results lie by head, as a decode leaves them.
    let rows = case.num_tokens * case.num_heads;
    let row_bytes = dim as usize * dtype.bytes();
    let (outs, lses) = (&case.outs[rank as usize * rows * row_bytes..], &case.lses[rank as usize * rows..]);
    let by_head = (0..case.num_heads).flat_map(|head| (0..case.num_tokens).map(move |token| (token, head)));
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for row in by_head.map(|(token, head)| token * case.num_heads + head) {
        out.extend_from_slice(&outs[row * row_bytes..][..row_bytes]);
        lse.extend_from_slice(&lses[row].to_le_bytes());
    }
    let partial = cp.partial();
    device.upload(partial.0.buffer, 0, &out)?;
    device.upload(partial.1.buffer, 0, &lse)?;
    communicator.take();
    cp.combine(&communicator)?;
    communicator.wait(device)?;
    let waited = communicator.take();

    let heads = cp.spec().local_heads();
    let first_head = if heads == num_heads { 0 } else { rank * heads };
    let out = read(device, cp.out(), tokens, heads, dim, dtype)?;
    let lse = read(device, cp.lse(), tokens, heads, 1, Dtype::F32)?;
    let wide = |xs: &[f32]| xs.iter().map(|&x| x.into()).collect::<Vec<f64>>();
    let heads = first_head..first_head + heads;
    let want_out = of_heads(&wide(&case.out), case.num_heads, &heads, dim as usize);
    let want_lse = of_heads(&wide(&case.lse), case.num_heads, &heads, 1);
    let (error, failure) = worst([
        close("out", &out, &want_out, &Tolerance::merge(dtype)),
        close("lse", &lse, &want_lse, &Tolerance::merge_lse()),
    ]);
    Ok(Did {
        rank,
        device: device.name(),
        variant: "combine",
        form,
        tokens: tokens.into(),
        read: 0,
        sent: cp.spec().bytes_sent(),
        computed: Duration::ZERO,
        waited,
        error,
        failure,
    })
}

/// Bytes of the cache that a decode of this batch reads, once.
fn bytes_read(part: &Problem) -> u64 {
    let row = u64::from(part.spec.shape.row_elems()) * part.spec.kv.dtype().bytes() as u64;
    let queried = part.seq_lens.iter().zip(part.query_start_loc.windows(2)).filter(|(_, q)| q[1] > q[0]);
    queried.map(|(&len, _)| len.max(0) as u64 * row).sum()
}

fn die(how: Kill) {
    match how {
        Kill::Panic => panic!("killed, as --kill-after says"),
        Kill::Abort => std::process::abort(),
    }
}

/// A buffer that holds `bytes`.
///
/// # Errors
/// The device's.
pub fn upload<D: Backend>(device: &D, bytes: &[u8]) -> Result<D::Buffer, Error> {
    let mut words = bytes.to_vec();
    words.resize(bytes.len().next_multiple_of(4), 0);
    let buffer = device.buffer(words.len() as u64)?;
    device.upload(&buffer, 0, &words)?;
    Ok(buffer)
}

/// `[tokens, heads, dim]` of a view.
///
/// # Errors
/// The device's.
pub fn read<D: Backend>(
    device: &D,
    view: View<&D::Buffer>,
    tokens: u32,
    heads: u32,
    dim: u32,
    dtype: Dtype,
) -> Result<Vec<f32>, Error> {
    let at = |token: u32, head: u32| {
        (view.offset + u64::from(token) * view.token_stride + u64::from(head) * view.head_stride) as usize
    };
    if tokens == 0 {
        return Ok(Vec::new());
    }
    let end = at(tokens - 1, heads - 1) + dim as usize;
    let bytes = device.download(view.buffer, ((end * dtype.bytes()) as u64).next_multiple_of(4))?;
    let all = dtype.decode_all(&bytes);
    let rows = (0..tokens).flat_map(|token| (0..heads).map(move |head| (token, head)));
    Ok(rows.flat_map(|(token, head)| all[at(token, head)..][..dim as usize].iter().copied()).collect())
}

/// Compares some heads with what is expected: the largest error as a share of what is allowed, and what is wrong.
fn check(
    whole: &Whole,
    rounds_weights: bool,
    heads: std::ops::Range<u32>,
    out: &[f32],
    lse: &[f32],
) -> (f64, Option<String>) {
    let spec = whole.problem.spec;
    let (all, latent) = (spec.shape.num_heads as usize, spec.shape.kv_lora_rank as usize);
    let u = whole.problem.largest_latent();
    let tolerance = Tolerance::decode(spec.kv.dtype(), spec.query, spec.out, rounds_weights, u, latent);
    worst([
        close("out", out, &of_heads(&whole.out, all, &heads, latent), &tolerance),
        close("lse", lse, &of_heads(&whole.lse, all, &heads, 1), &Tolerance::lse()),
    ])
}

/// Some heads of `[tokens, all, dim]`.
fn of_heads(values: &[f64], all: usize, heads: &std::ops::Range<u32>, dim: usize) -> Vec<f64> {
    let part = heads.start as usize * dim..heads.end as usize * dim;
    values.chunks(all * dim).flat_map(|row| row[part.clone()].iter().copied()).collect()
}

fn worst(reports: [Report; 2]) -> (f64, Option<String>) {
    let failure = reports.iter().find(|report| !report.ok()).map(ToString::to_string);
    (reports.iter().map(|report| report.worst_ratio).fold(0.0, f64::max), failure)
}
