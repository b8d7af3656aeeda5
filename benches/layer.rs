//! Times the whole layer (`MlaLayer`), recorded as one op, beside the ops that it is made of, each by itself: a decode step and a prompt.
//! The layer's output is first compared with that of its ops, byte for byte; a wrong one is not timed, and the run ends with status 1.
//! Rows "e4m3 cache" have queries and weights in bf16 and in e4m3. Then a decode step whose layer makes its own list of
//! slots, beside one whose layer shares that list.
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
    pub mod lists;
    pub mod ops;
    pub mod problem;
    pub mod step;
}

use std::cell::RefCell;

use layer::lists::{self, ListShape};
use layer::ops::Ops;
use layer::problem::{HostBatch, Problem, Shape};
use layer::step::{StepTiming, Steps};
use serde_json::json;
use support::Result;
use support::args::Args;
use support::device::Layers;
use support::record::{Records, figure, micros, timing_fields};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::{
    Capacity, Dtype, GuardCounts, GuardView, LayerGuard, LayerOptions, MlaLayer, MlaLayerArgs, SplitPolicy,
};

fn main() {
    let args = Args::parse();
    if args.backend == "cpu" {
        return support::end(run(&args.threads.map_or_else(Cpu::new, Cpu::with_threads), &args));
    }
    support::on_cards!(run);
}

fn shapes(args: &Args, small: bool) -> Vec<Shape> {
    if args.test {
        let decode = Shape::decode(2, 3, 70);
        return vec![decode, decode.over_codes(Dtype::E4m3, Dtype::E4m3), Shape::prompt(2, 70)];
    }
    if small && !args.full {
        return vec![Shape::decode(16, 1, 512), Shape::prompt(16, 512)];
    }
    vec![
        Shape::decode(16, 1, 8192),
        Shape::decode(16, 64, 8192),
        Shape::decode(128, 1, 8192),
        Shape::decode(128, 64, 8192),
        Shape::decode(128, 64, 8192).over_codes(Dtype::Bf16, Dtype::Bf16),
        Shape::decode(128, 64, 8192).over_codes(Dtype::E4m3, Dtype::Bf16),
        Shape::decode(128, 64, 8192).over_codes(Dtype::E4m3, Dtype::E4m3),
        Shape::prompt(16, 8192),
        Shape::prompt(128, 8192),
    ]
}

/// Decode steps of sequences that are longer than a list.
fn list_shapes(args: &Args, small: bool) -> Vec<ListShape> {
    let of = |heads, sequences, len, topk| ListShape { shape: Shape::decode(heads, sequences, len), topk };
    if args.test {
        return vec![of(2, 3, 70, 16)];
    }
    if small && !args.full {
        return vec![of(16, 1, 512, 128)];
    }
    vec![of(128, 64, 32768, 2048)]
}

fn run<D: Steps>(gpu: &D, args: &Args) -> Result<()> {
    let shapes = shapes(args, gpu.is_small()).into_iter().filter(|shape| args.wants(&shape.name()));
    let list_shapes = list_shapes(args, gpu.is_small()).into_iter().filter(|shape| args.wants(&shape.name()));
    if args.list {
        shapes.for_each(|shape| println!("{}", shape.name()));
        list_shapes.for_each(|shape| println!("{}", shape.name()));
        return Ok(());
    }
    let mut records = Records::new("layer", gpu.facts());
    println!(
        "# mla_layer on {}\n\nbf16, page size 64, P = V = 128. us: device time of a layer, many layers in a pass or graph. Guard: time with counters of what rounding loses, over that without. Sum: of the ops, each by \
         itself; parts: the sum over the layer. Step: 61 layers, of a prompt one, prepared each time with other pages, lengths and slots; \
         host, us of a step: to prepare it; to launch it (the graph on CUDA, record and submit on wgpu); to capture the graph.\n",
        gpu.name()
    );
    println!(
        "| workload | us | min | guard | sum | parts | step: ms | host: prepare | host: launch | host: capture | ops: us (share of the layer) |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for shape in shapes {
        match time(gpu, &shape, args) {
            Ok(record) => records.add(record),
            Err(error) => records.fail(&shape.name(), error.as_ref()),
        }
    }
    println!(
        "\n64 index heads, e4m3 index keys. Own list: a layer that appends index keys, scores, chooses and attends its list; shared list: one \
         that attends the same list. Sum: of the ops of a list, each by itself, and the layer that shares it.\n\n{}",
        lists::HEADER
    );
    for shape in list_shapes {
        match lists::time(gpu, &shape, args) {
            Ok(record) => records.add(record),
            Err(error) => records.fail(&shape.name(), error.as_ref()),
        }
    }
    records.save(args.json.as_deref())
}

fn time<D: Steps>(gpu: &D, shape: &Shape, args: &Args) -> Result<serde_json::Value> {
    let problem = Problem::new(gpu, *shape)?;
    let options = LayerOptions { capacity: problem.capacity(), ..LayerOptions::default() };
    let op = gpu.compile_with(problem.spec, &options)?;
    let variant = op.why().to_owned();
    let layers = (0..problem.copies).map(|copy| problem.args(copy));
    let batch = problem.batch.of_layer();
    let mut layer = Layers::new(op, Capacity::default(), (&batch, SplitPolicy::Auto), layers)?;
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
    let step = steps(gpu, shape, &mut layer, replays)?;
    let guard = guarded(gpu, &problem, replays)? / whole.median;
    let us = |seconds: f64| seconds * 1e6;
    let sum: f64 = parts.iter().map(|(_, part)| part.median).sum();
    let shares: Vec<String> = parts
        .iter()
        .map(|(name, part)| {
            format!("{name} {} ({:.0} %)", micros(us(part.median)), 100.0 * part.median / whole.median)
        })
        .collect();
    println!(
        "| {} | {} | {} | {guard:.3} | {} | {:.3} | {} | {} | {} | {} | {} |",
        shape.name(),
        micros(us(whole.median)),
        micros(us(whole.min)),
        micros(us(sum)),
        sum / whole.median,
        figure(step.device * 1e3),
        figure(us(step.prepare)),
        figure(us(step.launch)),
        figure(us(step.capture)),
        shares.join(", "),
    );
    let parts: serde_json::Map<String, serde_json::Value> =
        parts.iter().map(|(name, part)| ((*name).to_owned(), json!(us(part.median)))).collect();
    let mut record = json!({ "workload": shape.name(), "variant": variant, "ops_us": parts, "parts": sum / whole.median, "guard": guard });
    if let Some(fields) = record.as_object_mut() {
        fields.extend(timing_fields(&whole));
        let times = [
            ("step_us", step.device),
            ("step_prepare_us", step.prepare),
            ("step_launch_us", step.launch),
            ("step_capture_us", step.capture),
        ];
        fields.extend(times.map(|(name, seconds)| (name.to_owned(), json!(us(seconds)))));
        fields.insert("step_layers".into(), json!(layers_of(gpu, shape)));
    }
    Ok(record)
}

/// Seconds of a layer that counts what rounding loses.
fn guarded<D: Steps>(gpu: &D, problem: &Problem<D::Buffer>, replays: usize) -> Result<f64> {
    let options = LayerOptions { capacity: problem.capacity(), guard: true, ..LayerOptions::default() };
    let op = gpu.compile_with(problem.spec, &options)?;
    let rows = u64::from(problem.copies * LayerGuard::ROWS);
    let counters = gpu.buffer(rows * GuardCounts::BYTES)?;
    let args = |copy: u32| {
        let guard = Some(GuardView { counters: &counters, row: copy * LayerGuard::ROWS });
        MlaLayerArgs { guard, ..problem.args(copy) }
    };
    let batch = problem.batch.of_layer();
    let layers = (0..problem.copies).map(args);
    let layer = Layers::new(op, Capacity::default(), (&batch, SplitPolicy::Auto), layers)?;
    Ok(gpu.time(replays, |recorder, call| layer.record(recorder, call))?.median)
}

/// Times steps, each with another batch.
fn steps<D: Steps>(
    gpu: &D,
    shape: &Shape,
    layer: &mut Layers<MlaLayer, D>,
    replays: usize,
) -> Result<StepTiming> {
    let batches: Vec<HostBatch> = (0..8).map(|turn| HostBatch::new(shape, turn)).collect();
    let Layers { op, step, bindings } = layer;
    // The first may still grow tables.
    for batch in &batches {
        op.prepare(step, (&batch.of_layer(), SplitPolicy::Auto))?;
    }
    let step = RefCell::new(step);
    let prepare = |turn: usize| {
        let batch = batches[turn % batches.len()].of_layer();
        op.prepare(&mut step.borrow_mut(), (&batch, SplitPolicy::Auto))
    };
    let num_layers = layers_of(gpu, shape);
    gpu.steps(replays, prepare, |recorder| {
        let step = step.borrow();
        let layers = bindings.iter().cycle().take(num_layers);
        layers.into_iter().try_for_each(|binding| op.record_on(recorder, &step, binding))
    })
}

/// Layers of a step, where the device is fast enough.
fn layers_of<D: Steps>(gpu: &D, shape: &Shape) -> usize {
    if gpu.is_software() { 1 } else { shape.layers() }
}
