//! A continuous batch: sequences join, fork from a shared prefix, grow over page borders and leave, for some hundred
//! steps of a model of two layers. Every sequence is checked against the f64 oracle when it leaves and at the end.
//!
//! ```text
//! cargo run --release --example batch -- [--backend cuda|wgpu|cpu] [--steps N] [--seed N]
//! ```
//! What to copy from here: `gpu.rs` runs a step on wgpu, in one encoder and one submit; `traffic.rs` keeps the pages;
//! `any.rs` runs the same step on any backend, by their common verbs. Status 0: all right; 1: a mismatch or an error; 2: bad arguments.

mod any;
mod args;
#[cfg(feature = "wgpu")]
mod gpu;
mod model;
mod oracle;
mod progress;
mod traffic;

use std::process::ExitCode;
use std::time::Instant;

use args::{Args, Where};
use model::{Model, StepData};
use oracle::Oracle;
use progress::Progress;
use traffic::Traffic;
use wgpu_mla::any::{AnyBackend, Chosen};
use wgpu_mla::{Batch, PageTable, Plan, Policy, SharedPrefix, Tiling};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Everything that a step hands to a backend. The plan and the tables serve every layer of the model.
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

/// Where a step runs.
pub trait Runner {
    /// For a person.
    fn describe(&self) -> String;

    /// Whether it rounds the softmax weights, for which the check allows more.
    fn rounds_weights(&self) -> bool;

    /// How plans are to be cut.
    fn tiling(&self) -> Tiling;

    /// Runs a step, all layers, and waits for it as a sampler would.
    fn step(&mut self, work: &Work<'_>) -> Result<()>;

    /// `out` and `lse` of the first `tokens` query tokens of the last step, as bytes.
    fn read(&self, layer: usize, tokens: usize) -> Result<[Vec<u8>; 2]>;
}

fn main() -> ExitCode {
    let args = match Args::parse(std::env::args().skip(1)) {
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
    let mut runner = runner(args, &model)?;
    progress::say(&format!("{} on {}", model.describe(), runner.describe()));
    serve(args, &model, runner.as_mut())
}

/// What runs a step on the backend that was asked for; without a wish, on the best one.
fn runner<'a>(args: &Args, model: &'a Model) -> Result<Box<dyn Runner + 'a>> {
    let backend = match args.backend {
        Some(wish) => wanted(wish)?.into(),
        None => {
            let best = AnyBackend::best(&model.spec);
            progress::say(&format!("backend: {}", best.why()));
            if matches!(best.chosen(), Chosen::Cpu(_)) {
                progress::say("notice: running on the CPU path instead");
            }
            best
        }
    };
    match backend.chosen() {
        #[cfg(feature = "wgpu")]
        Chosen::Wgpu(gpu) => Ok(Box::new(gpu::GpuRunner::new(gpu.clone(), model)?)),
        _ => Ok(Box::new(any::AnyRunner::new(backend, model)?)),
    }
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

fn serve(args: &Args, model: &Model, runner: &mut dyn Runner) -> Result<()> {
    let mut traffic = Traffic::new(model, args.seed)?;
    let mut oracle = Oracle::new(model);
    let mut progress = Progress::new(args.steps);
    let mut plan = Plan::default();
    let mut layers = vec![StepData::default(); model.layers];
    for step in 0..args.steps {
        traffic.admit()?;
        // Grows every sequence by its next tokens; what is given to whom is settled before anything is uploaded.
        traffic.grow()?;
        let ids = traffic.ids();
        let (seq_lens, starts) = (traffic.pool.seq_lens(&ids)?, traffic.query_start_loc());
        let slot_mapping = traffic.pool.slot_mapping(&traffic.append.tokens)?;
        let csr = traffic.pool.csr(&ids)?;
        let shared: Vec<SharedPrefix> = traffic.pool.shared_prefixes(&ids)?;
        let batch = Batch { shared_prefixes: &shared, ..Batch::new(&seq_lens, &starts) };
        plan.update(&model.spec, &runner.tiling(), &batch, Policy::Auto)?;
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
