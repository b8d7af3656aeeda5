//! The exchange and combine of a step, without a decode.

use mla_support::paint::Rng;
use wgpu_mla::{CombineForm, ContextParallel, ContextParallelSpec, Dtype, Error, LseBase};

use super::{Bench, Launch, us};
use crate::report::name;

/// Combines in one graph, as layers of a model: the launch of the graph is shared among them.
const LAYERS: u32 = 10;
const HEADS: u32 = 128;

pub fn run<D: Launch>(bench: &Bench<'_, D>) -> Result<(), Error> {
    let graph = if bench.in_graph() { "10 in a captured graph" } else { "each launched by the host" };
    bench.say(&format!(
        "\nExchange and combine of a step, {HEADS} heads x 512, {} ranks, rank 0 on {}, {graph}\n\n\
         | sequences | form | dtype | MB sent by a rank | us | GB/s sent |\n|---|---|---|---|---|---|",
        bench.world,
        bench.device.name(),
    ));
    for tokens in [1, D::SEQUENCES] {
        for form in [CombineForm::AllToAll, CombineForm::AllGatherReduceScatter, CombineForm::AllGather] {
            let divides = HEADS.is_multiple_of(bench.world) || form == CombineForm::AllGather;
            for dtype in [Dtype::Bf16, Dtype::F32].into_iter().filter(|_| divides) {
                row(bench, tokens, form, dtype)?;
            }
        }
    }
    Ok(())
}

fn row<D: Launch>(bench: &Bench<'_, D>, tokens: u32, form: CombineForm, dtype: Dtype) -> Result<(), Error> {
    let Bench { device, communicator, rank, world, .. } = *bench;
    let spec = ContextParallelSpec {
        num_heads: HEADS,
        kv_lora_rank: 512,
        out: dtype,
        lse_base: LseBase::E,
        rank,
        world,
        max_tokens: tokens,
        form,
    };
    let mut cp = match ContextParallel::new(device, spec) {
        Ok(cp) => cp,
        // The same on every rank of one kind: the others go on.
        Err(error) => {
            bench.say(&format!("| {tokens} | {} | {dtype} | not here: {error} | | |", name(form)));
            return Ok(());
        }
    };
    cp.prepare(tokens)?;
    let mut rng = Rng(u64::from(rank) + 9);
    let mut values = |count: u32| (0..count).map(|_| rng.randn()).collect::<Vec<f32>>();
    let (out, lse) = cp.partial();
    device.upload(out.buffer, 0, &dtype.encode_all(&values(HEADS * tokens * 512)))?;
    device.upload(lse.buffer, 0, &Dtype::F32.encode_all(&values(HEADS * tokens)))?;
    let launch = device.again(bench.in_graph(), || (0..LAYERS).try_for_each(|_| cp.combine(communicator)))?;
    let seconds = bench.time(&*launch)? / f64::from(LAYERS);
    let sent = cp.spec().bytes_sent() as f64;
    bench.say(&format!(
        "| {tokens} | {} | {dtype} | {:.3} | {} | {:.1} |",
        name(form),
        sent / 1e6,
        us(seconds),
        sent / seconds / 1e9
    ));
    Ok(())
}
