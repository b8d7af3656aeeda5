//! One long sequence: alone on each device, and shared out.

use mla_support::close::{Tolerance, close};
use mla_support::paint::Rng;
use wgpu_mla::{
    Batch, Binding, Compiled, ContextParallel, ContextParallelSpec, Dtype, Error, KvSpec, Mask, MlaDecode,
    MlaDecodeArgs, MlaShape, PageTable, Plan, SplitPolicy, Step, View,
};

use super::{Bench, Launch, us};
use crate::rank::read;
use crate::report::name;
use crate::threads;

const PAGE: u32 = 64;
/// Pages whose content differs: uploads are from these.
const PAGES: usize = 61;
const SCALE: f32 = 0.114_721;
/// Decodes in a graph, as a model's layers are: replays one after the other have gaps of 10 to 20 us between them.
const LAYERS: u32 = 10;

pub fn run<D: Launch>(bench: &Bench<'_, D>) -> Result<(), Error> {
    let tokens = bench.args.tokens.unwrap_or(D::LONG).next_multiple_of(PAGE * bench.world);
    let graph = if bench.in_graph() { "10 layers in a captured graph" } else { "each launched by the host" };
    bench.say(&format!(
        "\n1 x {tokens} tokens, {} ranks, rank 0 on {}, {graph}; alone: the whole on each device\n\n\
         | heads | cache | variant | alone us | alone GB/s | form | {} ranks us | faster | decode of the part us | exchange and merge us | error of the allowed |\n\
         |---|---|---|---|---|---|---|---|---|---|---|",
        bench.world,
        bench.device.name(),
        bench.world,
    ));
    for heads in [16, 128] {
        for cache in [Dtype::Bf16, Dtype::E4m3] {
            row(bench, tokens, heads, cache)?;
        }
    }
    Ok(())
}

fn row<D: Launch>(bench: &Bench<'_, D>, tokens: u32, heads: u32, cache: Dtype) -> Result<(), Error> {
    let Bench { device, communicator, rank, world, .. } = *bench;
    let shape = MlaShape { num_heads: heads, kv_lora_rank: 512, qk_rope_head_dim: 64 };
    let spec = |pages| MlaDecode {
        shape,
        kv: KvSpec { layout: cache.into(), page_size: PAGE, num_pages: pages },
        query: Dtype::Bf16,
        out: Dtype::F32,
    };
    let shares =
        bench.args.shares(PAGE).map_err(|detail| Error::Exchange { what: "--shares", rank, detail })?;
    let q = query(device, &shape)?;
    let content = content(cache, shape.row_elems());

    // The whole, alone.
    let whole = spec(tokens / PAGE);
    let mut reference = [Vec::new(), Vec::new()];
    let alone = {
        let kv = fill(device, &whole, &content, 0..tokens / PAGE)?;
        let [out, lse] = [device.buffer(whole.out_bytes(1))?, device.buffer(whole.lse_bytes(1))?];
        let args = MlaDecodeArgs::dense(&whole, &q, &kv, &out, &lse, SCALE);
        let decode = Decode::new(device, whole, &args, tokens)?;
        let seconds = time_layers(bench, D::HAS_GRAPHS, &|| decode.run())?;
        reference[0] = read(device, View::dense(&out, heads, 512), 1, heads, 512, Dtype::F32)?;
        reference[1] = read(device, View::dense(&lse, heads, 1), 1, heads, 1, Dtype::F32)?;
        seconds
    };

    // This rank's part.
    let len = shares.local_len(rank, tokens)?;
    let part = spec(len.div_ceil(PAGE).max(1));
    let pages = (0..len.div_ceil(PAGE)).map(|page| shares.token(rank, page * PAGE).map(|token| token / PAGE));
    let kv = fill(device, &part, &content, pages.collect::<Result<Vec<_>, _>>()?)?;
    let mut of_part = None;
    for form in threads::forms(bench.args, heads) {
        let spec = ContextParallelSpec { form, ..ContextParallelSpec::of(&part, rank, world, 1) };
        let Ok(mut cp) = ContextParallel::new(device, spec) else { continue };
        cp.prepare(1)?;
        let (out, lse) = cp.partial();
        let dense = MlaDecodeArgs::dense(&part, &q, &kv, out.buffer, lse.buffer, SCALE);
        let decode = Decode::new(device, part, &MlaDecodeArgs { out, lse, ..dense }, len)?;
        if of_part.is_none() {
            of_part = Some(time_layers(bench, D::HAS_GRAPHS, &|| decode.run())?);
        }
        let alone_of_part = of_part.unwrap_or_default();
        let layer = || {
            decode.run()?;
            cp.combine(communicator)
        };
        layer()?;
        bench.finish()?;
        let error = compare(bench, &cp, decode.mla.rounds_weights(), &reference, cache)?;
        let joined = time_layers(bench, bench.in_graph(), &layer)?;
        let bytes = f64::from(tokens) * f64::from(shape.row_elems()) * cache.bytes() as f64;
        bench.say(&format!(
            "| {heads} | {cache} | {} | {} | {:.0} | {} | {} | {:.3} | {} | {} | {error:.2} |",
            decode.mla.variant(),
            us(alone),
            bytes / alone / 1e9,
            name(form),
            us(joined),
            alone / joined,
            us(alone_of_part),
            us(joined - alone_of_part),
        ));
    }
    Ok(())
}

/// Seconds of a layer: of [`LAYERS`] in a graph, or of one that the host launches.
fn time_layers<D: Launch>(
    bench: &Bench<'_, D>,
    in_graph: bool,
    layer: &dyn Fn() -> Result<(), Error>,
) -> Result<f64, Error> {
    let layers = if in_graph { LAYERS } else { 1 };
    let launch = bench.device.again(in_graph, || (0..layers).try_for_each(|_| layer()))?;
    Ok(bench.time(&*launch)? / f64::from(layers))
}

/// Compares the joined heads with those of the whole on one device: the largest error as a share of what is allowed.
fn compare<D: Launch>(
    bench: &Bench<'_, D>,
    cp: &ContextParallel<D>,
    rounds_weights: bool,
    reference: &[Vec<f32>; 2],
    cache: Dtype,
) -> Result<f64, Error> {
    let (device, rank, local) = (bench.device, bench.rank, cp.spec().local_heads());
    let first = if local == cp.spec().num_heads { 0 } else { rank * local };
    let got = [
        read(device, cp.out(), 1, local, 512, Dtype::F32)?,
        read(device, cp.lse(), 1, local, 1, Dtype::F32)?,
    ];
    // Both sides round.
    let mut tolerance = Tolerance::decode(cache, Dtype::Bf16, Dtype::F32, rounds_weights, 1.0, 512);
    tolerance.abs *= 2.0;
    let want = |i: usize, dim: u32| -> Vec<f64> {
        let rows = (first * dim) as usize..((first + local) * dim) as usize;
        reference[i][rows].iter().map(|&x| x.into()).collect()
    };
    let reports = [
        close("out", &got[0], &want(0, 512), &tolerance),
        close("lse", &got[1], &want(1, 1), &Tolerance::lse()),
    ];
    match reports.iter().find(|report| !report.ok()) {
        Some(report) => Err(Error::Exchange { what: "the comparison", rank, detail: report.to_string() }),
        None => Ok(reports.iter().map(|report| report.worst_ratio).fold(0.0, f64::max)),
    }
}

/// A decode of one query token of one sequence, prepared.
struct Decode<D: Launch> {
    mla: Compiled<MlaDecode, D>,
    step: Step<MlaDecode, D>,
    binding: Binding<MlaDecode, D>,
}

impl<D: Launch> Decode<D> {
    fn new(
        device: &D,
        spec: MlaDecode,
        args: &MlaDecodeArgs<&D::Buffer>,
        tokens: u32,
    ) -> Result<Self, Error> {
        let mla = device.compile(spec)?;
        let mut step = mla.step(Default::default())?;
        let (lens, starts, bounds) = ([tokens as i32], [0, 1], [tokens]);
        let batch = Batch { mask: Mask::Bounds(&bounds), ..Batch::new(&lens, &starts) };
        let plan = Plan::new(&spec, &mla.tiling(), &batch, SplitPolicy::Auto)?;
        let table: Vec<i32> = (0..spec.kv.num_pages as i32).collect();
        let pages = PageTable::Dense { block_table: &table, max_pages: spec.kv.num_pages };
        mla.prepare(&mut step, (&plan, pages))?;
        let binding = mla.bind(args, 1)?;
        Ok(Self { mla, step, binding })
    }

    fn run(&self) -> Result<(), Error> {
        self.mla.run(&self.step, &self.binding)
    }
}

/// Large enough that few tokens take much of the weight: an output near 0 would compare with anything.
fn query<D: Launch>(device: &D, shape: &MlaShape) -> Result<D::Buffer, Error> {
    let mut rng = Rng(5);
    let values: Vec<f32> = (0..shape.num_heads * shape.row_elems()).map(|_| rng.randn() * 4.0).collect();
    crate::rank::upload(device, &Dtype::Bf16.encode_all(&values))
}

fn content(cache: Dtype, row: u32) -> Vec<Vec<u8>> {
    let mut rng = Rng(6);
    let mut page = || (0..PAGE * row).map(|_| rng.randn() * 0.3).collect::<Vec<f32>>();
    (0..PAGES).map(|_| cache.encode_all(&page())).collect()
}

/// A cache whose pages hold the content of these pages of the whole.
fn fill<D: Launch>(
    device: &D,
    spec: &MlaDecode,
    content: &[Vec<u8>],
    pages: impl IntoIterator<Item = u32>,
) -> Result<D::Buffer, Error> {
    let kv = device.buffer(spec.cache_bytes())?;
    for (to, page) in (0u64..).zip(pages) {
        let bytes = &content[page as usize % PAGES];
        device.upload(&kv, to * bytes.len() as u64, bytes)?;
    }
    Ok(kv)
}
