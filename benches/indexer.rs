//! Times the ops of a lightning indexer. Each shape is compared with the oracle first; a wrong one is not timed, and the run ends with
//! status 1.
//!
//! ```text
//! cargo bench --bench indexer -- [--only TEXT].. [--replays N] [--json FILE] [--full | --test] [--list]
//! cargo bench --bench indexer -- --backend cpu
//! cargo bench --bench indexer --features cuda -- --backend cuda
//! ```
//! BENCHMARKS.md says what the figures mean.

#[allow(dead_code)]
mod support;

/// Its files are in `benches/indexer`.
mod indexer {
    pub mod append;
    pub mod logits;
    pub mod top_k;
}

use support::Result;
use support::args::Args;
use support::device::Timed;
use support::record::Records;

fn main() {
    let args = Args::parse();
    support::end(match args.backend.as_str() {
        "wgpu" => wgpu_mla::gpu::Gpu::new().map_err(Into::into).and_then(|gpu| run(&gpu, &args)),
        "cpu" => run(&wgpu_mla::cpu::Cpu::new(), &args),
        #[cfg(feature = "cuda")]
        "cuda" => wgpu_mla::cuda::Cuda::new(0).map_err(Into::into).and_then(|cuda| run(&cuda, &args)),
        other => Err(format!("--backend {other}: wgpu or cpu, or cuda with that feature").into()),
    });
}

/// A table for each part of the indexer.
fn run<D: Timed>(device: &D, args: &Args) -> Result<()> {
    let mut records = Records::new("indexer", device.facts());
    indexer::append::run(device, args, &mut records)?;
    indexer::logits::run(device, args, &mut records)?;
    indexer::top_k::run(device, args, &mut records)?;
    if args.list {
        return Ok(());
    }
    records.save(args.json.as_deref())
}
