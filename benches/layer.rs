//! Times the whole layer (`MlaLayer`), recorded as one op, beside the ops that it is made of, each by itself: a decode step and a prompt.
//! The layer's output is first compared with that of its ops, byte for byte; a wrong one is not timed, and the run ends with status 1.
//!
//! ```text
//! cargo bench --bench layer -- [--only TEXT].. [--replays N] [--json FILE] [--full | --test] [--list]
//! cargo bench --bench layer --features cuda -- --backend cuda
//! cargo bench --bench layer -- --backend cpu
//! ```
//! BENCHMARKS.md says what the figures mean.

#[allow(dead_code)]
mod support;

/// Their files are in `benches/layer`.
mod layer {
    pub mod ops;
    pub mod problem;
}

use layer::ops::Ops;
use layer::problem::{Problem, Shape};
use serde_json::json;
use support::Result;
use support::args::Args;
use support::device::{Layers, Timed};
use support::record::{Records, figure, micros, timing_fields};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::{Capacity, LayerOptions, SplitPolicy};

/// Layers of DeepSeek-V3: a step of the model is so many.
const MODEL_LAYERS: f64 = 61.0;

fn main() {
    let args = Args::parse();
    if args.backend == "cpu" {
        return support::end(run(&args.threads.map_or_else(Cpu::new, Cpu::with_threads), &args));
    }
    support::on_cards!(run);
}

fn shapes(args: &Args, small: bool) -> Vec<Shape> {
    if args.test {
        return vec![Shape::decode(2, 3, 70), Shape::prompt(2, 70)];
    }
    if small && !args.full {
        return vec![Shape::decode(16, 1, 512), Shape::prompt(16, 512)];
    }
    vec![
        Shape::decode(16, 1, 8192),
        Shape::decode(16, 64, 8192),
        Shape::decode(128, 1, 8192),
        Shape::decode(128, 64, 8192),
        Shape::prompt(16, 8192),
        Shape::prompt(128, 8192),
    ]
}

fn run<D: Timed>(gpu: &D, args: &Args) -> Result<()> {
    let shapes = shapes(args, gpu.is_small()).into_iter().filter(|shape| args.wants(&shape.name()));
    if args.list {
        shapes.for_each(|shape| println!("{}", shape.name()));
        return Ok(());
    }
    let mut records = Records::new("layer", gpu.facts());
    println!(
        "# mla_layer on {}\n\nbf16, page size 64, P = V = 128. us: device time of a layer, many layers in a pass or graph; ms: of {MODEL_LAYERS} layers. \
         Sum: of the ops, each by itself; parts: the sum over the layer. Host: us to record a layer.\n",
        gpu.name()
    );
    println!("| workload | us | min | ms | sum | parts | host | ops: us (share of the layer) |");
    println!("|---|---|---|---|---|---|---|---|");
    for shape in shapes {
        match time(gpu, &shape, args) {
            Ok(record) => records.add(record),
            Err(error) => records.fail(&shape.name(), error.as_ref()),
        }
    }
    records.save(args.json.as_deref())
}

fn time<D: Timed>(gpu: &D, shape: &Shape, args: &Args) -> Result<serde_json::Value> {
    let problem = Problem::new(gpu, *shape)?;
    let options = LayerOptions { capacity: problem.capacity(), ..LayerOptions::default() };
    let op = gpu.compile_with(problem.spec, &options)?;
    let variant = op.why().to_owned();
    let layers = (0..problem.copies).map(|copy| problem.args(copy));
    let batch = problem.batch();
    let layer = Layers::new(op, Capacity::default(), (&batch, SplitPolicy::Auto), layers)?;
    layer.run_first()?;
    let out = gpu.download(&problem.out, problem.out_bytes())?;
    if !problem.is_finite(&out) {
        return Err("the output is not finite".into());
    }
    let ops = Ops::new(gpu, &problem)?;
    ops.run_first()?;
    if gpu.download(&problem.out, problem.out_bytes())? != out {
        return Err("the ops one by one write another output".into());
    }

    // A prompt takes a CPU seconds.
    let replays = args.replays().min(if gpu.is_software() { 9 } else { usize::MAX });
    let whole = gpu.time(replays, |recorder, call| layer.record(recorder, call))?;
    let parts = ops.time(gpu, replays)?;
    let us = |seconds: f64| seconds * 1e6;
    let sum: f64 = parts.iter().map(|(_, part)| part.median).sum();
    let shares: Vec<String> = parts
        .iter()
        .map(|(name, part)| {
            format!("{name} {} ({:.0} %)", micros(us(part.median)), 100.0 * part.median / whole.median)
        })
        .collect();
    println!(
        "| {} | {} | {} | {} | {} | {:.3} | {} | {} |",
        shape.name(),
        micros(us(whole.median)),
        micros(us(whole.min)),
        figure(whole.median * 1e3 * MODEL_LAYERS),
        micros(us(sum)),
        sum / whole.median,
        figure(us(whole.host)),
        shares.join(", "),
    );
    let parts: serde_json::Map<String, serde_json::Value> =
        parts.iter().map(|(name, part)| ((*name).to_owned(), json!(us(part.median)))).collect();
    let mut record =
        json!({ "workload": shape.name(), "variant": variant, "ops_us": parts, "parts": sum / whole.median });
    if let Some(fields) = record.as_object_mut() {
        fields.extend(timing_fields(&whole));
    }
    Ok(record)
}
