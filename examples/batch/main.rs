//! A continuous batch: sequences join, fork from a shared prefix, grow over page borders and leave, for some hundred
//! steps of a model of two layers. Every sequence is checked against the f64 oracle when it leaves and at the end.
//!
//! ```text
//! cargo run --release --example batch -- [--backend cuda|wgpu|cpu] [--steps N] [--seed N]
//! ```
//! What to copy from here: `step.rs` runs a step on any backend, in one submit; `traffic.rs` keeps the pages.
//! Status 0: all right; 1: a mismatch or an error; 2: bad arguments.

mod args;
mod model;
mod oracle;
mod progress;
mod step;
mod traffic;

use std::process::ExitCode;
use std::time::Instant;

use args::{Args, Where};
use model::{Model, StepData};
use oracle::Oracle;
use progress::Progress;
use step::Runner;
use traffic::Traffic;
use wgpu_mla::any::{AnyBackend, Chosen};
use wgpu_mla::{Backend, Batch, PageTable, Plan, SharedPrefix, SplitPolicy};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A step's input for a backend. The plan and the tables serve every layer of the model.
pub struct Work<'a> {
    /// Page copies that come before the new rows.
    pub copies: &'a [(u32, u32)],
    /// Where the new rows go.
    pub slot_mapping: &'a [i64],
    /// The decode's work items.
    pub plan: &'a Plan,
    /// The pages of the batch.
    pub pages: PageTable<'a>,
    /// Queries and new rows, a layer.
    pub layers: &'a [StepData],
}

fn main() -> ExitCode {
    let args = match Args::parse(std::env::args_os().skip(1)) {
        Ok(Some(args)) => args,
        Ok(None) => {
            progress::say(args::HELP);
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            progress::complain(&format!("{error}\n{}", args::HELP));
            return ExitCode::from(2);
        }
    };
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            progress::complain(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let model = Model::small();
    let mut runner = Runner::new(backend(args, &model)?, &model)?;
    progress::say(&format!("{} on {}", model.describe(), runner.describe()));
    serve(args, &model, &mut runner)
}

/// The backend of `--backend`; without it, the best one.
fn backend(args: &Args, model: &Model) -> Result<AnyBackend> {
    if let Some(wish) = args.backend {
        return Ok(wanted(wish)?.into());
    }
    let best = AnyBackend::best(&model.spec);
    progress::say(&format!("backend: {}", best.why()));
    if matches!(best.chosen(), Chosen::Cpu(_)) {
        progress::say("notice: running on the CPU path instead");
    }
    Ok(best)
}

fn wanted(wish: Where) -> Result<Chosen> {
    match wish {
        #[cfg(feature = "cuda")]
        Where::Cuda => Ok(wgpu_mla::cuda::Cuda::new(0)?.into()),
        #[cfg(not(feature = "cuda"))]
        Where::Cuda => Err("built without the feature `cuda`: build with `--features cuda`".into()),
        #[cfg(feature = "wgpu")]
        Where::Wgpu => Ok(wgpu_mla::gpu::Gpu::new()?.into()),
        #[cfg(not(feature = "wgpu"))]
        Where::Wgpu => Err("built without the feature `wgpu`: build with `--features wgpu`".into()),
        Where::Cpu => Ok(wgpu_mla::cpu::Cpu::new().into()),
    }
}

fn serve(args: &Args, model: &Model, runner: &mut Runner<'_, impl Backend>) -> Result<()> {
    let mut traffic = Traffic::new(model, args.seed)?;
    let mut oracle = Oracle::new(model);
    let mut progress = Progress::new(args.steps);
    let mut plan = Plan::default();
    let mut layers = vec![StepData::default(); model.layers];
    for step in 0..args.steps {
        traffic.admit()?;
        // Grows every sequence by its next tokens. All pages are allocated before anything is uploaded.
        traffic.grow()?;
        let ids = traffic.ids();
        let (seq_lens, starts) = (traffic.pool.seq_lens(&ids)?, traffic.query_start_loc());
        let slot_mapping = traffic.pool.slot_mapping(&traffic.append.tokens)?;
        let csr = traffic.pool.csr(&ids)?;
        let shared: Vec<SharedPrefix> = traffic.pool.shared_prefixes(&ids)?;
        let batch = Batch { shared_prefixes: &shared, ..Batch::new(&seq_lens, &starts) };
        plan.update(&model.spec, &runner.tiling(), &batch, SplitPolicy::Auto)?;
        model.fill(&traffic.new_tokens(), &mut layers);

        let work = Work {
            copies: &traffic.append.copies,
            slot_mapping: &slot_mapping,
            plan: &plan,
            pages: csr.page_table(),
            layers: &layers,
        };
        let begin = Instant::now();
        runner.step(&work)?;
        progress.step(&traffic, &plan, begin.elapsed());

        let last = step + 1 == args.steps;
        let due: Vec<usize> = if last { (0..ids.len()).collect() } else { traffic.leaving() };
        oracle.check(runner, &traffic, &due)?;
        if !last {
            traffic.leave(&due)?;
        }
        progress.show(&traffic);
    }
    progress.finish(&traffic, &oracle);
    Ok(())
}
