//! Times decodes of sequences that share a prefix: attended per sequence, shared in absorbed form, and as a cascade in expanded form.
//! Every way is compared with the oracle before it is timed; a wrong one is not timed, and the run ends with status 1.
//!
//! ```text
//! cargo bench --bench cascade -- [--only TEXT].. [--variant NAME] [--items PARTS] [--replays N] [--json FILE] [--full | --test] [--list]
//! cargo bench --bench cascade --features cuda -- --backend cuda
//! ```
//! `--variant` forces a variant of `mla_prefill`, `--items` the parts that its keys are split into.

#[allow(dead_code)]
mod support;

/// Its file is in `benches/cascade`.
mod cascade {
    pub mod problem;
}

use cascade::problem::{Problem, Shape};
use serde_json::json;
use support::Result;
use support::args::Args;
use support::device::Timed;
use support::record::{Records, figure, micros, timing_fields};
use wgpu_mla::Dtype;

fn shapes(test: bool, small: bool) -> Vec<Shape> {
    let card = Shape {
        sequences: 64,
        prefix: 8192,
        context: 9216,
        heads: 16,
        dims: [512, 64, 128, 128],
        dtype: Dtype::F16,
        layers: 4,
    };
    if test {
        let dims = [256, 32, 64, 64];
        return vec![Shape { sequences: 3, prefix: 512, context: 530, heads: 2, dims, layers: 2, ..card }];
    }
    if small {
        return vec![Shape { sequences: 8, prefix: 1024, context: 1100, heads: 2, layers: 1, ..card }];
    }
    let bf16 = Shape { dtype: Dtype::Bf16, ..card };
    // By the number of sequences: an expanded prefix pays from some number on.
    let of = |sequences| Shape { sequences, ..card };
    let wide = |sequences| Shape { sequences, heads: 128, layers: 2, ..card };
    [card, bf16].into_iter().chain([16, 32, 48, 128].map(of)).chain([32, 96].map(wide)).collect()
}

fn main() {
    support::on_cards!(run);
}

fn run<D: Timed>(gpu: &D, args: &Args) -> Result<()> {
    let mut shapes = shapes(args.test, gpu.is_small() && !args.full);
    shapes.retain(|shape| args.wants(&shape.name()));
    if args.list {
        shapes.iter().for_each(|shape| println!("{}", shape.name()));
        return Ok(());
    }
    let mut records = Records::new("cascade", gpu.facts());
    println!(
        "# A shared prefix on {}\n\nus: device time, many calls in a pass or graph, over several layers in turn.\n",
        gpu.name()
    );
    for shape in &shapes {
        if let Err(error) = time(gpu, shape, args, &mut records) {
            records.fail(&shape.name(), error.as_ref());
        }
    }
    records.save(args.json.as_deref())
}

fn time<D: Timed>(gpu: &D, shape: &Shape, args: &Args, records: &mut Records) -> Result<()> {
    let problem = Problem::new(gpu, shape, args.variant.as_deref(), args.items)?;
    let (checked, about) = (problem.check(gpu)?, problem.describe());
    println!("\n{}: {about}; {checked}\n\n| what | us | min | |\n|---|---|---|---|", shape.name());
    let mut medians = Vec::new();
    for (what, base) in cascade::problem::TIMED {
        let together = gpu.time(args.replays(), |recorder, call| problem.record(what, recorder, call))?;
        let us = together.median * 1e6;
        medians.push((what, us));
        let base = base.and_then(|base| medians.iter().find(|(what, _)| *what == base));
        let ratio = base
            .map_or(String::new(), |(what, base)| format!("{} x faster than {what:?}", figure(base / us)));
        println!("| {what:?} | {} | {} | {ratio} |", micros(us), micros(together.min * 1e6));
        let mut record = json!({ "workload": shape.name(), "what": format!("{what:?}"), "about": about });
        if let Some(fields) = record.as_object_mut() {
            fields.extend(timing_fields(&together));
        }
        records.add(record);
    }
    Ok(())
}
