//! Decodes batches over several devices of this process, or over cards through NCCL.

use std::process::ExitCode;

use context_parallel::args::{Args, Engine, HELP, Parsed};
use context_parallel::{Result, bench, model, problems, report, threads};

fn main() -> ExitCode {
    let parsed = Args::parse(std::env::args_os().skip(1)).and_then(|parsed| match parsed {
        Parsed::Run(args) => args.shares(args.interleave.unwrap_or(16)).map(|_| Parsed::Run(args)),
        Parsed::Help => Ok(Parsed::Help),
    });
    let args = match parsed {
        Ok(Parsed::Run(args)) => args,
        Ok(Parsed::Help) => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(why) => {
            eprintln!("error: {why}\nsee --help");
            return ExitCode::from(2);
        }
    };
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<bool> {
    if args.model {
        model::print();
        return Ok(true);
    }
    match args.engine {
        Engine::Threads if args.bench => Ok(bench::over_threads(args)),
        Engine::Threads => {
            let work = problems::load(&args.paths, args.world())?;
            let ranks = threads::run(args, &work);
            Ok(report::print(&work, |heads| threads::forms(args, heads), &ranks))
        }
        #[cfg(feature = "nccl")]
        Engine::Nccl => context_parallel::nccl::run(args),
        #[cfg(not(feature = "nccl"))]
        Engine::Nccl => Err("--engine nccl: built without it; build with `--features nccl`".into()),
    }
}
