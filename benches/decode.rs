//! Times decodes. Each workload is checked against the oracle first; a wrong one is not timed, and the run ends with status 1.
//!
//! ```text
//! cargo bench --bench decode -- [--only TEXT].. [--variant NAME] [--items N] [--replays N] [--json FILE] [--full | --test] [--list]
//! cargo bench --bench decode -- --only sparse --only dense      lists of slots and records alone
//! cargo bench --bench decode -- --backend cpu [--threads N]
//! cargo bench --bench decode --features cuda -- --backend cuda
//! cargo bench --bench decode -- --host            host time of plan, prepare and record, of a decode and a whole layer
//! cargo bench --bench decode -- --startup DIR     first and second start with a pipeline cache in DIR
//! ```
//! BENCHMARKS.md says what the figures mean.

#[allow(dead_code)]
mod support;

/// Its files are in `benches/decode`.
mod decode {
    pub mod host;
    mod problem;
    pub mod run;
    mod serving;
    mod sparse;
    pub mod startup;
    mod workload;
}

use decode::{host, run, startup};

fn main() {
    let args = support::args::Args::parse();
    support::end(match (&args.startup, &args.startup_child) {
        (Some(directory), _) => startup::run(directory, &args.backend),
        (_, Some(directory)) => startup::child(directory, &args.backend),
        _ if args.host => host::run(),
        _ => run::run(&args),
    });
}
