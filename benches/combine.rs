//! Times what joins the ranks of a sequence: `merge_states` of the gathered results, and `correct_attn_out` of one rank's. Some tokens are
//! compared with the oracle first; a wrong result is not timed, and the run ends with status 1.
//!
//! ```text
//! cargo bench --bench combine -- [--only TEXT].. [--replays N] [--json FILE] [--test] [--list]
//! cargo bench --bench combine --features cuda -- --backend cuda
//! ```
//! BENCHMARKS.md says what the figures mean.

#[allow(dead_code)]
mod support;

use mla_support::close::{Tolerance, close};
use mla_support::reference::{correct_attn_out, merge_states_in};
use serde_json::json;
use support::Result;
use support::args::Args;
use support::ceiling::Kind;
use support::clock::Timing;
use support::device::{Layers, Timed};
use support::paint::Paint;
use support::record::{Records, figure, micros, timing_fields};
use wgpu_mla::{CorrectAttnOut, CorrectAttnOutArgs, Dtype, LseBase, MergeStates, MergeStatesArgs, View};

const HEAD_SIZE: u32 = 512;
const RANK: u32 = 1;

/// Least total bytes of the rotated buffers: more than any card's L2, so that each call misses it.
const ROTATED_BYTES: u64 = 300_000_000;

#[derive(Clone, Copy)]
struct Shape {
    /// Whether one rank's result is weighted, instead of all being merged.
    corrects: bool,
    ranks: u32,
    tokens: u32,
    heads: u32,
}

impl Shape {
    fn name(&self) -> String {
        let op = if self.corrects { "correct_attn_out" } else { "merge_states" };
        format!("{op} {} ranks {} x {} x {HEAD_SIZE} f32", self.ranks, self.tokens, self.heads)
    }

    fn elems(&self) -> u64 {
        u64::from(self.tokens * self.heads * HEAD_SIZE)
    }

    fn rows(&self) -> u64 {
        u64::from(self.tokens * self.heads)
    }

    /// Arrays of outputs that are read.
    fn sets(&self) -> u64 {
        if self.corrects { 1 } else { self.ranks.into() }
    }

    /// Bytes read and written.
    fn bytes(&self) -> u64 {
        4 * ((self.sets() + 1) * self.elems() + (u64::from(self.ranks) + 1) * self.rows())
    }
}

fn main() {
    support::on_cards!(run);
}

fn run<D: Timed>(device: &D, args: &Args) -> Result<()> {
    let (tokens, heads) = if args.test || device.is_small() { (5, 16) } else { (64, 128) };
    let shape = |corrects, ranks| Shape { corrects, ranks, tokens, heads };
    let shapes = [shape(false, 8), shape(false, 2), shape(true, 8), shape(true, 2)];
    let shapes: Vec<Shape> = shapes.into_iter().filter(|shape| args.wants(&shape.name())).collect();
    if args.list {
        shapes.iter().for_each(|shape| println!("{}", shape.name()));
        return Ok(());
    }
    let (ceiling, bytes) = device.ceiling(Kind::Copy, args.test)?;
    let mut records = Records::new("combine", device.facts());
    records.note("copy_ceiling_gb_s", ceiling);
    records.note("copy_ceiling_bytes", 2 * bytes);
    println!(
        "# Combining ranks on {}\n\nus: device time, many calls in a pass or graph; alone: a pass or launch for each. GB/s: read and written. \
         Of a copy: the time over that of a copy of the same bytes at this run's copy ceiling, {} GB/s.\n",
        device.name(),
        figure(ceiling)
    );
    println!(
        "| shape | us | min | alone | GB/s | of a copy | host | error (of allowed) |\n|{}",
        "---|".repeat(8)
    );
    for shape in &shapes {
        match time(device, shape, ceiling, args) {
            Ok(record) => records.add(record),
            Err(error) => records.fail(&shape.name(), error.as_ref()),
        }
    }
    records.save(args.json.as_deref())
}

fn time<D: Timed>(device: &D, shape: &Shape, ceiling: f64, args: &Args) -> Result<serde_json::Value> {
    let arrays = Arrays::new(device, shape)?;
    let copies = 0..copies(device, shape);
    let ([together, alone], right) = if shape.corrects {
        let op = device.compile(CorrectAttnOut { dtype: Dtype::F32, head_size: HEAD_SIZE })?;
        let layers = copies.map(|copy| arrays.correction(shape, copy));
        let layers = Layers::new(op, 0, 0..shape.tokens, layers)?;
        layers.run_first()?;
        let right = arrays.check(device, shape)?;
        (device.time_both(args.replays(), |recorder, call| layers.record(recorder, call))?, right)
    } else {
        let op = device.compile(MergeStates { dtype: Dtype::F32, head_size: HEAD_SIZE })?;
        let layers = copies.map(|copy| arrays.merge(shape, copy));
        let layers = Layers::new(op, 0, (0..shape.tokens, shape.ranks), layers)?;
        layers.run_first()?;
        let right = arrays.check(device, shape)?;
        (device.time_both(args.replays(), |recorder, call| layers.record(recorder, call))?, right)
    };
    Ok(line(shape, &together, &alone, ceiling, &right))
}

fn line(shape: &Shape, together: &Timing, alone: &Timing, ceiling: f64, right: &str) -> serde_json::Value {
    let rate = shape.bytes() as f64 / together.median / 1e9;
    let us = |seconds: f64| micros(seconds * 1e6);
    print!("| {} | {} | {} ", shape.name(), us(together.median), us(together.min));
    print!("| {} | {} | {:.3} ", us(alone.median), figure(rate), ceiling / rate);
    println!("| {} | {right} |", figure(together.host * 1e6));
    let mut record = json!({
        "workload": shape.name(), "us_alone": alone.median * 1e6, "gb_s": rate, "of_a_copy": ceiling / rate, "error": right,
    });
    if let Some(fields) = record.as_object_mut() {
        fields.extend(timing_fields(together));
    }
    record
}

fn copies(device: &impl Timed, shape: &Shape) -> u64 {
    if device.is_small() { 1 } else { ROTATED_BYTES.div_ceil(shape.bytes()).clamp(2, 128) }
}

/// Arrays with room for all copies that are rotated.
struct Arrays<B> {
    paint: Paint,
    /// `[copies, ranks, tokens, heads, head_size]`, of a correction `[copies, tokens, heads, head_size]`.
    outs: B,
    /// `[copies, ranks, tokens, heads]`.
    lses: B,
    output: B,
    output_lse: B,
}

impl<B> Arrays<B> {
    fn new<D: Timed<Buffer = B>>(device: &D, shape: &Shape) -> Result<Self> {
        let (paint, copies) = (Paint::new(Dtype::F32), copies(device, shape));
        Ok(Self {
            outs: device.painted(&paint, copies * shape.sets() * shape.elems())?,
            lses: device.painted(&paint, copies * u64::from(shape.ranks) * shape.rows())?,
            output: device.buffer(copies * shape.elems() * 4)?,
            output_lse: device.buffer(copies * shape.rows() * 4)?,
            paint,
        })
    }

    fn merge(&self, shape: &Shape, copy: u64) -> MergeStatesArgs<&B> {
        let sets = copy * u64::from(shape.ranks);
        MergeStatesArgs {
            states: View { offset: sets * shape.elems(), ..View::dense(&self.outs, shape.heads, HEAD_SIZE) },
            set_stride: shape.elems(),
            lse: View { offset: sets * shape.rows(), ..View::dense(&self.lses, shape.heads, 1) },
            lse_set_stride: shape.rows(),
            lse_base: LseBase::E,
            output: View {
                offset: copy * shape.elems(),
                ..View::dense(&self.output, shape.heads, HEAD_SIZE)
            },
            output_lse: Some(View {
                offset: copy * shape.rows(),
                ..View::dense(&self.output_lse, shape.heads, 1)
            }),
            num_heads: shape.heads,
            output_scale: 1.0,
        }
    }

    fn correction(&self, shape: &Shape, copy: u64) -> CorrectAttnOutArgs<&B> {
        let MergeStatesArgs { lse, lse_set_stride, lse_base, output, output_lse, num_heads, .. } =
            self.merge(shape, copy);
        CorrectAttnOutArgs {
            out: View { offset: copy * shape.elems(), ..View::dense(&self.outs, shape.heads, HEAD_SIZE) },
            lses: lse,
            lse_rank_stride: lse_set_stride,
            output,
            output_lse,
            lse_base,
            world: shape.ranks,
            rank: RANK,
            num_heads,
        }
    }

    /// Compares the first and the last tokens of the first copy with the oracle.
    fn check<D: Timed<Buffer = B>>(&self, device: &D, shape: &Shape) -> Result<String> {
        let (width, head) = (shape.elems(), u64::from(HEAD_SIZE));
        let got = Dtype::F32.decode_all(&device.download(&self.output, width * 4)?);
        let got_lse = Dtype::F32.decode_all(&device.download(&self.output_lse, shape.rows() * 4)?);
        let heads = u64::from(shape.heads);
        let some: Vec<u64> = (0..heads.min(8)).chain(shape.rows() - 8..shape.rows()).collect();
        let (mut pick, mut pick_lse, mut want, mut want_lse) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for row in some {
            let out = |set: u64| -> Vec<f64> {
                (0..head).map(|i| self.paint.at(set * width + row * head + i).into()).collect()
            };
            let lses: Vec<f64> = (0..u64::from(shape.ranks))
                .map(|rank| self.paint.at(rank * shape.rows() + row).into())
                .collect();
            let (out, lse) = if shape.corrects {
                correct_attn_out(LseBase::E, &out(0), &lses, RANK as usize)
            } else {
                let outs: Vec<Vec<f64>> = (0..u64::from(shape.ranks)).map(out).collect();
                let sets: Vec<(&[f64], f64)> = outs.iter().map(Vec::as_slice).zip(lses).collect();
                merge_states_in(LseBase::E, &sets)
            };
            want.extend(out);
            want_lse.push(lse);
            let at = (row * head) as usize;
            pick.extend(&got[at..at + HEAD_SIZE as usize]);
            pick_lse.push(got_lse[row as usize]);
        }
        let report = close("out", &pick, &want, &Tolerance::merge(Dtype::F32)).into_result()?;
        close("lse", &pick_lse, &want_lse, &Tolerance::merge_lse()).into_result()?;
        Ok(format!("{:.1e} ({:.1} %)", report.worst_abs, 100.0 * report.worst_ratio))
    }
}
