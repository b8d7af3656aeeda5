//! The table on the CUDA backend: a graph of many layers, replayed.

use wgpu_mla::Backend;
use wgpu_mla::cuda::Cuda;

use super::problem::{Pool, Problem};
use super::run::{ROTATED_BYTES, Report, host_step};
use super::workload::Workload;
use crate::support::Result;
use crate::support::args::Args;
use crate::support::ceiling::Kind;
use crate::support::device::Device;

pub fn run(table: &[Workload], args: &Args) -> Result<()> {
    let cuda = Cuda::new(0)?;
    let (ceiling, bytes) = cuda.ceiling(Kind::Read, args.test)?;
    let mut report = Report::new(&cuda.name(), cuda.facts(), ceiling);
    report.records.note("read_ceiling_bytes", bytes);
    for group in table.chunk_by(|a, b| a.kv == b.kv) {
        let elems = group.iter().map(|w| w.layer_elems() * u64::from(copies(w))).max().unwrap_or(0);
        let pool = Pool::new(&cuda, group[0].kv, elems)?;
        for workload in group.iter().filter(|workload| !workload.plain) {
            if let Err(error) = time(&cuda, &pool, workload, args, &mut report) {
                report.records.fail(&workload.name(), error.as_ref());
            }
        }
    }
    report.records.save(args.json.as_deref())
}

fn copies(workload: &Workload) -> u32 {
    let layer = (workload.layer_elems() * workload.kv.bytes() as u64) as f64;
    (ROTATED_BYTES / layer).ceil().clamp(2.0, 128.0) as u32
}

fn time(cuda: &Cuda, pool: &Pool<Cuda>, workload: &Workload, args: &Args, report: &mut Report) -> Result<()> {
    let problem = Problem::new(cuda, pool, workload, args.variant.as_deref(), args.items, copies(workload))?;
    let row = problem.decode.variant();
    let right = problem.check(cuda).map_err(|error| format!("{}: {row}: {error}", workload.name()))?;
    let [timing, _] = cuda.time(args.replays(), |launches, call| {
        let binding = &problem.bindings[call % problem.bindings.len()];
        launches.add(problem.decode.record(&problem.step, binding));
    })?;
    let step = host_step(cuda, workload, &problem)?;
    report.add(workload, row, &timing, step, problem.plan.items.len(), &right);
    Ok(())
}
