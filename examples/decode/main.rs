//! Runs conformance cases on the best backend here, CUDA, wgpu or the CPU, and checks every result.
//!
//! ```text
//! cargo run --release --example decode -- [FILE | DIRECTORY]... [--backend cuda|wgpu|cpu]
//!                                         [--variant NAME] [--list] [--save DIRECTORY]
//! ```
//! `--backend cuda` is there with `--features cuda`.
//! Without files it runs the repository's `tests/cases`. Status 0: all that the backend serves passed; 1: one failed or could not be
//! read, or none is served; 2: bad arguments.

mod args;
mod check;
mod files;
mod index_logits;
mod indexer;
mod list;
mod ranks;
mod report;
mod run;
mod sparse;
mod top_k;

use std::process::ExitCode;

use args::{Args, Parsed, Where};
use files::Found;
use report::{Output, Row, Tally};
use run::Runner;
use wgpu_mla::any::{AnyBackend, Chosen};
use wgpu_mla::{Device, Dtype, KvSpec, MlaDecode, MlaShape, cpu::Cpu};

const FAILED: ExitCode = ExitCode::FAILURE;

fn main() -> ExitCode {
    let mut out = Output::default();
    let args = match Args::parse(std::env::args_os().skip(1)) {
        Ok(Parsed::Help) => {
            out.line(args::HELP);
            return ExitCode::SUCCESS;
        }
        Ok(Parsed::Run(args)) => args,
        Err(error) => return bad_arguments(&error),
    };
    let found = match files::find(&args.paths) {
        Ok(found) => found,
        Err(error) => return bad_arguments(&error),
    };
    if args.list {
        list::list(&mut out, &found);
        return ExitCode::SUCCESS;
    }
    match backend(&args, &mut out) {
        Ok(backend) => run_all(&backend, &args, &found, &mut out),
        Err(error) => {
            report::complain(&error);
            FAILED
        }
    }
}

fn bad_arguments(error: &str) -> ExitCode {
    report::complain(&format!("{error}\nsee --help"));
    ExitCode::from(2)
}

/// The backend of `--backend`; without it, the best for the common shape.
fn backend(args: &Args, out: &mut Output) -> Result<AnyBackend, String> {
    if let Some(wish) = args.backend {
        return wanted(wish).map(AnyBackend::from);
    }
    let best = AnyBackend::best(&common_spec(Dtype::Bf16));
    out.line(&format!("backend:  {}", best.why()));
    if matches!(best.chosen(), Chosen::Cpu(_)) {
        out.line("notice:   running on the CPU path instead");
    }
    Ok(best)
}

fn wanted(wish: Where) -> Result<Chosen, String> {
    match wish {
        #[cfg(feature = "cuda")]
        Where::Cuda => wgpu_mla::cuda::Cuda::new(0).map(Chosen::from).map_err(|error| error.to_string()),
        #[cfg(not(feature = "cuda"))]
        Where::Cuda => Err("built without the feature `cuda`: build with `--features cuda`".into()),
        #[cfg(feature = "wgpu")]
        Where::Wgpu => wgpu_mla::gpu::Gpu::new().map(Chosen::from).map_err(|error| error.to_string()),
        #[cfg(not(feature = "wgpu"))]
        Where::Wgpu => Err("built without the feature `wgpu`: build with `--features wgpu`".into()),
        Where::Cpu => Ok(Cpu::new().into()),
    }
}

fn run_all(backend: &AnyBackend, args: &Args, found: &Found, out: &mut Output) -> ExitCode {
    let known: Vec<_> =
        backend.variants(&common_spec(Dtype::Bf16)).iter().map(|variant| variant.name).collect();
    if let Some(name) = args.variant.as_deref().filter(|name| !known.contains(name)) {
        return bad_arguments(&format!("--variant {name}: must be one of {}", known.join(", ")));
    }
    if let Some(directory) = &args.save
        && let Err(error) = std::fs::create_dir_all(directory)
    {
        return bad_arguments(&format!("--save {}: {error}", directory.display()));
    }
    let mut runner = Runner::new(backend, args.variant.as_deref(), args.save.as_deref());
    out.line(&format!("adapter:  {}", backend.name()));
    let mut why = runner.why_of_first_decode(&found.files);
    out.line(&format!("variant:  {}", why.as_deref().unwrap_or("no decode case to choose one for")));
    out.line("time:     median of up to 9 runs after a warm-up, host clock, from submit to done");
    out.line("GB/s:     cache rows read by a decode, of all ranks; bytes read and written by a merge, a combine or an append\n");
    let width = found.names().map(|name| name.chars().count()).max().unwrap_or(0);
    out.line(&report::heading(width));

    let mut tally = Tally::default();
    for error in &found.errors {
        out.row(&mut tally, width, &Row::unreadable(&error.name, error.why.clone()));
    }
    for file in &found.files {
        let name = files::stem(file);
        out.progress(&format!("{} of {}: {name}", tally.total() + 1, found.len()));
        let row = runner.run(&name, file);
        if let Some(new) = runner.why().filter(|new| why.as_deref() != Some(*new)) {
            out.line(&format!("# from here on: {new}"));
            why = Some(new.to_owned());
        }
        out.row(&mut tally, width, &row);
    }
    out.line(&format!("\n{tally}"));
    if tally.all_passed() && out.ok() { ExitCode::SUCCESS } else { FAILED }
}

/// The shape of most released models.
fn common_spec(cache: Dtype) -> MlaDecode {
    MlaDecode {
        shape: MlaShape { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64 },
        kv: KvSpec { layout: cache.into(), page_size: 64, num_pages: 64 },
        query: if cache == Dtype::E4m3 { Dtype::Bf16 } else { cache },
        out: Dtype::F32,
    }
}
