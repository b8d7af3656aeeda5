//! Times decodes. Each workload is checked against the oracle first; a wrong result ends the run with status 1.
//!
//! ```text
//! cargo bench --bench decode -- [--backend wgpu|cpu] [--variant NAME] [--only TEXT] [--threads N] [--test] [--items N]
//! cargo bench --bench decode -- --host            host time of plan, prepare and record
//! cargo bench --bench decode -- --startup DIR     first and second start with a pipeline cache in DIR
//! ```
//! GPU time is the median over submits of timestamp queries around many layers, each with a cache of its own so that
//! together they are larger than the device's cache memory. Without timestamps and on the CPU it is host time.

#[path = "../tests/common/close.rs"]
#[allow(dead_code)]
mod close;
#[path = "support/mod.rs"]
mod support;

use support::{Args, Mode};

fn main() {
    let args = Args::parse();
    let done = match &args.mode {
        Mode::Decode => support::workload::run(&args),
        Mode::Host => support::host::run(),
        Mode::Startup(directory) => support::startup::run(directory),
        Mode::StartupChild(directory) => support::startup::child(directory),
    };
    if let Err(error) = done {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}
