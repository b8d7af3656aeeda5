//! Many steps with other lengths each, over the same recorded commands, compared with one device's.

use std::time::Instant;

use mla_support::close::{Tolerance, close};
use mla_support::paint::{Make, Rng, sequences};
use mla_support::ranks;
use wgpu_mla::{
    Batch, Capacity, Compiled, ContextParallel, ContextParallelSpec, Dtype, Error, Mask, MlaDecode,
    MlaDecodeArgs, PageTable, Plan, Shares, SplitPolicy, Step, View,
};

use super::{Bench, Launch, us};
use crate::rank::{read, upload};

const LEN: u32 = 1500;
const SEQUENCES: usize = 6;

pub fn run<D: Launch>(bench: &Bench<'_, D>) -> Result<(), Error> {
    let Bench { device, communicator, rank, world, .. } = *bench;
    let replays = if D::HAS_GRAPHS { 1000 } else { 40 };
    let lens: Vec<(u32, u32)> = (0..SEQUENCES as u32).map(|i| (LEN - i, 1)).collect();
    let whole = Make {
        dims: (512, 64),
        heads: 16,
        page_size: 64,
        cache: Dtype::Bf16,
        query: Dtype::Bf16,
        sequences: sequences(&lens),
        ..Make::default()
    };
    let whole = whole.build();
    let bad = |detail| Error::Exchange { what: "the comparison", rank, detail };
    let shares = bench.args.shares(bench.args.interleave.unwrap_or(16)).map_err(bad)?;
    let part = ranks::cut(&whole, &shares, rank)?;
    let (spec, part_spec, heads) = (whole.spec, part.spec, whole.spec.shape.num_heads);
    let queries = SEQUENCES as u32;

    let [q, kv, part_kv] = [&whole.q, &whole.kv, &part.kv].map(|bytes| upload(device, bytes));
    let (q, kv, part_kv) = (q?, kv?, part_kv?);
    let [out, lse] = [device.buffer(spec.out_bytes(queries))?, device.buffer(spec.lse_bytes(queries))?];
    let (mla, part_mla) = (device.compile(spec)?, device.compile(part_spec)?);
    let dense = MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, whole.softmax_scale);
    let binding = mla.bind(&dense, queries)?;
    let mut cp = ContextParallel::new(device, ContextParallelSpec::of(&part_spec, rank, world, queries))?;
    cp.prepare(queries)?;
    let (cp_out, cp_lse) = cp.partial();
    let part_binding = part_mla.bind(
        &MlaDecodeArgs {
            kv: MlaDecodeArgs::dense(&part_spec, &q, &part_kv, &out, &lse, 1.0).kv,
            out: cp_out,
            lse: cp_lse,
            ..dense
        },
        queries,
    )?;

    // All plans first: a graph serves what fits the step that it was captured of.
    let mut rng = Rng(11);
    let mut steps = Vec::new();
    let (mut room, mut part_room) = (Capacity::default(), Capacity::default());
    for _ in 0..replays {
        let lens: Vec<i32> = whole.seq_lens.iter().map(|&len| rng.below(len as usize + 1) as i32).collect();
        let plans = Plans::new(&mla, &part_mla, &shares, rank, &lens, &whole.query_start_loc)?;
        room = room.max(Capacity::of(&plans.whole));
        part_room = part_room.max(Capacity::of(&plans.part));
        steps.push((lens, plans));
    }
    let table = PageTable::Dense { block_table: &whole.block_table, max_pages: whole.max_pages as u32 };
    let part_table = PageTable::Dense { block_table: &part.block_table, max_pages: part.max_pages as u32 };
    let (mut step, mut part_step): (Step<MlaDecode, D>, Step<MlaDecode, D>) =
        (mla.step(room)?, part_mla.step(part_room)?);
    let tolerance = Tolerance::decode(
        Dtype::Bf16,
        Dtype::Bf16,
        Dtype::F32,
        mla.rounds_weights() || part_mla.rounds_weights(),
        2.0 * whole.largest_latent(),
        512,
    );
    mla.prepare(&mut step, (&steps[0].1.whole, table))?;
    part_mla.prepare(&mut part_step, (&steps[0].1.part, part_table))?;

    let begin = Instant::now();
    let (mut worst, mut seconds) = (0f64, 0.0);
    // Steps are borrowed by what launches them, and a graph by none: it is captured once, and launched for all.
    let graph = bench.in_graph();
    let captured = if graph {
        Some(D::captured(device, || {
            part_mla.run(&part_step, &part_binding)?;
            cp.combine(communicator)
        })?)
    } else {
        None
    };
    for (count, (lens, plans)) in (0u64..).zip(&steps) {
        let all = Batch::new(lens, &whole.query_start_loc);
        cp.digest().step(count).spec(&spec).batch(&all).shares(&shares).agree(communicator)?;
        mla.prepare(&mut step, (&plans.whole, table))?;
        part_mla.prepare(&mut part_step, (&plans.part, part_table))?;
        let since = Instant::now();
        match &captured {
            Some(launch) => launch()?,
            None => {
                part_mla.run(&part_step, &part_binding)?;
                cp.combine(communicator)?;
            }
        }
        bench.finish()?;
        seconds += since.elapsed().as_secs_f64();
        mla.run(&step, &binding)?;
        let local = cp.spec().local_heads();
        let first = if local == heads { 0 } else { rank * local };
        let got = read(device, cp.out(), queries, local, 512, Dtype::F32)?;
        let want = read(device, View::dense(&out, heads, 512), queries, heads, 512, Dtype::F32)?;
        let rows = first as usize * 512..(first + local) as usize * 512;
        let want: Vec<f64> = want
            .chunks(heads as usize * 512)
            .flat_map(|row| row[rows.clone()].iter().map(|&x| x.into()))
            .collect();
        let report = close("out", &got, &want, &tolerance);
        worst = worst.max(report.worst_ratio);
        if !report.ok() {
            return Err(bad(format!("step {count}, {lens:?}: {report}")));
        }
    }
    bench.say(&format!(
        "\n{} steps of {SEQUENCES} sequences of 0 to {LEN} tokens, {heads} heads, bf16, {world} ranks, {}\n\n\
         | us from launch to result, mean | error of the allowed | whole time s |\n|---|---|---|\n| {} | {worst:.3} | {:.1} |",
        steps.len(),
        if graph { "one captured graph, launched for each" } else { "launched by the host" },
        us(seconds / steps.len() as f64),
        begin.elapsed().as_secs_f64(),
    ));
    Ok(())
}

/// A step's plans: of the whole, and of a rank's part.
struct Plans {
    whole: Plan,
    part: Plan,
}

impl Plans {
    fn new<D: Launch>(
        mla: &Compiled<MlaDecode, D>,
        part_mla: &Compiled<MlaDecode, D>,
        shares: &Shares,
        rank: u32,
        lens: &[i32],
        starts: &[i32],
    ) -> Result<Self, Error> {
        let whole = Plan::new(mla.op(), &mla.tiling(), &Batch::new(lens, starts), SplitPolicy::Auto)?;
        let local = shares.local_seq_lens(rank, lens)?;
        let bounds = shares.local_bounds(rank, lens, starts)?;
        let batch = Batch { mask: Mask::Bounds(&bounds), ..Batch::new(&local, starts) };
        let part = Plan::new(part_mla.op(), &part_mla.tiling(), &batch, SplitPolicy::Auto)?;
        Ok(Self { whole, part })
    }
}
