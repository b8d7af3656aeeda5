//! `top_k`: the tokens that a query token attends, of the logits of all.

use mla_support::reference::top_k;
use serde_json::{Value, json};
use wgpu_mla::{Dtype, OpOptions, TopK, TopKArgs, TopKBatch, TopKCapacity, View};

use crate::support::Result;
use crate::support::args::Args;
use crate::support::device::{Layers, Timed};
use crate::support::paint::Paint;
use crate::support::record::{Records, figure, micros, timing_fields};

/// Least total bytes of the rotated logits: more than any card's L2, so that each call misses it.
const ROTATED_BYTES: u64 = 300_000_000;
/// Rows that are compared with the oracle, which sorts each.
const CHECKED_ROWS: usize = 3;

/// Rows of logits, all of which count.
#[derive(Debug, Clone, Copy)]
struct Shape {
    k: u32,
    rows: u32,
    columns: u32,
}

impl Shape {
    fn name(&self) -> String {
        format!("top_k {} of {} x {}", self.k, self.rows, self.columns)
    }

    /// The sizes in the table for cards, or small ones for a slow device or a test.
    fn all(args: &Args, is_small: bool) -> Vec<Self> {
        let shapes: &[[u32; 3]] = match (args.test, is_small && !args.full) {
            (true, _) => &[[20, 2, 300], [64, 1, 3000]],
            (_, true) => &[[2048, 1, 32_768], [2048, 4, 16_384]],
            _ => &[
                [2048, 1, 131_072],
                [2048, 64, 65_536],
                [2048, 16, 131_072],
                [2048, 1, 1 << 20],
                [2048, 512, 8192],
            ],
        };
        let all = shapes.iter().map(|&[k, rows, columns]| Self { k, rows, columns });
        all.filter(|shape| args.wants(&shape.name())).collect()
    }

    /// Bytes that a call reads and writes.
    fn bytes(&self) -> u64 {
        4 * u64::from(self.rows) * (u64::from(self.columns) + u64::from(self.k))
    }
}

pub fn run<D: Timed>(device: &D, args: &Args, records: &mut Records) -> Result<()> {
    let shapes = Shape::all(args, device.is_small());
    if args.list {
        shapes.iter().for_each(|shape| println!("{}", shape.name()));
        return Ok(());
    }
    if shapes.is_empty() {
        return Ok(());
    }
    println!(
        "# top_k on {}\n\nus: device time, many calls in a pass or graph; alone: a pass or launch for each. Logits are read from memory.\n",
        device.name()
    );
    println!("| shape | variant | us | min | alone | GB/s | host |\n|---|---|---|---|---|---|---|");
    for shape in shapes {
        match time(device, &shape, args) {
            Ok(several) => several.into_iter().for_each(|record| records.add(record)),
            Err(error) => records.fail(&shape.name(), error.as_ref()),
        }
    }
    Ok(())
}

/// Checks and times a shape on every variant that runs here.
fn time<D: Timed>(device: &D, shape: &Shape, args: &Args) -> Result<Vec<Value>> {
    let Shape { k, rows, columns } = *shape;
    let spec = TopK { k, slots: None };
    let elements = u64::from(rows) * u64::from(columns);
    let num_layers = if device.is_small() { 1 } else { (ROTATED_BYTES / (4 * elements)).clamp(2, 64) };
    let paint = Paint::query(Dtype::F32);
    let logits = device.painted(&paint, num_layers * elements)?;
    let outputs = (0..num_layers).map(|_| device.buffer(u64::from(rows * k) * 4));
    let outputs = outputs.collect::<wgpu_mla::Result<Vec<_>>>()?;
    let lengths = vec![columns as i32; rows as usize];

    let mut found = Vec::new();
    for candidate in device.variants(&spec) {
        let wanted = args.variant.as_deref().is_none_or(|wanted| wanted == candidate.name);
        if candidate.lacks.is_some() || !wanted {
            continue;
        }
        let op = device.compile_with(spec, &OpOptions { variant: Some(candidate.name.to_owned()) })?;
        let layers = outputs.iter().zip(0..).map(|(output, layer)| TopKArgs {
            logits: View { offset: layer * elements, ..View::dense(&logits, 1, columns) },
            columns,
            lengths: &logits, // unread: the step has them
            indices: View::dense(output, 1, k),
            values: None,
        });
        let layers = Layers::new(op, TopKCapacity::default(), TopKBatch::of(&lengths), layers)?;
        layers.run_first()?;
        let bytes = device.download(&outputs[0], u64::from(rows * k) * 4)?;
        let got: Vec<i32> = bytes
            .chunks_exact(4)
            .map(|word| i32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect();
        for row in 0..CHECKED_ROWS.min(rows as usize) {
            let values: Vec<f32> = (0..u64::from(columns))
                .map(|column| paint.at(row as u64 * u64::from(columns) + column))
                .collect();
            if got[row * k as usize..][..k as usize] != top_k(&values, k as usize) {
                return Err(format!("{}: row {row} is wrong", candidate.name).into());
            }
        }
        let [together, alone] =
            device.time_both(args.replays(), |recorder, call| layers.record(recorder, call))?;
        let us = |seconds: f64| seconds * 1e6;
        let rate = shape.bytes() as f64 / together.median / 1e9;
        print!("| {} | {} ", shape.name(), candidate.name);
        print!("| {} | {} ", micros(us(together.median)), micros(us(together.min)));
        println!("| {} | {} | {} |", micros(us(alone.median)), figure(rate), figure(us(together.host)));
        let mut record = json!({
            "workload": shape.name(),
            "variant": candidate.name,
            "chosen": candidate.chosen,
            "us_alone": us(alone.median),
            "gb_s": rate,
        });
        if let Some(record) = record.as_object_mut() {
            record.extend(timing_fields(&together));
        }
        found.push(record);
    }
    Ok(found)
}
