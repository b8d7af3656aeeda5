//! Times what combines the ranks of context parallelism: `merge_states` of all of them, and `correct_attn_out` of one. Each shape is checked
//! against the oracle first; a wrong one is not timed, and the run ends with status 1.
//!
//! ```text
//! cargo bench --bench combine -- [--only TEXT].. [--replays N] [--json FILE] [--full | --test] [--list]
//! cargo bench --bench combine --features cuda -- --backend cuda
//! ```
//! BENCHMARKS.md says what the figures mean.

#[allow(dead_code)]
mod support;

use mla_support::close::{Tolerance, close};
use mla_support::reference::{correct_attn_out, merge_states};
use serde_json::json;
use support::Result;
use support::args::Args;
use support::ceiling::Kind;
use support::device::{Layers, Timed};
use support::paint::Paint;
use support::record::{Records, figure, micros, timing_fields};
use wgpu_mla::{CorrectAttnOut, CorrectAttnOutArgs, Dtype, LseBase, MergeStates, MergeStatesArgs, Op, View};

const HEAD_SIZE: u32 = 512;

/// Least total bytes of the rotated buffers: more than any card's L2, so that each call misses it.
const ROTATED_BYTES: u64 = 300_000_000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    /// All ranks into one.
    Merge,
    /// The first rank, weighted.
    Correct,
}

#[derive(Clone, Copy)]
struct Shape {
    what: What,
    world: u32,
    tokens: u32,
    heads: u32,
}

impl Shape {
    fn name(&self) -> String {
        let what = if self.what == What::Merge { "merge_states" } else { "correct_attn_out" };
        format!("{what} {} ranks x {} x {} x {HEAD_SIZE}", self.world, self.tokens, self.heads)
    }

    fn rows(&self) -> u64 {
        u64::from(self.tokens * self.heads)
    }

    /// Elements of a rank's output.
    fn elems(&self) -> u64 {
        self.rows() * u64::from(HEAD_SIZE)
    }

    /// Outputs that are read.
    fn states(&self) -> u64 {
        if self.what == What::Merge { self.world.into() } else { 1 }
    }

    /// Bytes read and written.
    fn bytes(&self) -> u64 {
        4 * ((self.states() + 1) * self.elems() + u64::from(self.world + 1) * self.rows())
    }
}

/// Arrays with room for all that are rotated.
struct Arrays<B> {
    paint: Paint,
    states: B,
    lses: B,
    output: B,
    output_lse: B,
}

fn main() {
    support::on_cards!(run);
}

fn run<D: Timed>(gpu: &D, args: &Args) -> Result<()> {
    let (worlds, tokens, heads): (&[u32], &[u32], u32) = match (args.test, gpu.is_small() && !args.full) {
        (true, _) => (&[3], &[5], 16),
        (_, true) => (&[2, 8], &[16], 16),
        _ => (&[2, 4, 8], &[8, 64], 128),
    };
    let of = |what| {
        worlds
            .iter()
            .flat_map(move |&world| tokens.iter().map(move |&tokens| Shape { what, world, tokens, heads }))
    };
    let shapes: Vec<Shape> =
        of(What::Merge).chain(of(What::Correct)).filter(|shape| args.wants(&shape.name())).collect();
    if args.list {
        shapes.iter().for_each(|shape| println!("{}", shape.name()));
        return Ok(());
    }
    let (ceiling, bytes) = gpu.ceiling(Kind::Copy, args.test)?;
    let mut records = Records::new("combine", gpu.facts());
    records.note("copy_ceiling_gb_s", ceiling);
    records.note("copy_ceiling_bytes", 2 * bytes);
    println!(
        "# Combining ranks on {}, f32\n\nus: device time, many calls in a pass or graph; alone: a pass or launch for each. \
         GB/s: read and written; of a copy: time over that of a copy of as many bytes at this run's ceiling, {} GB/s.\n",
        gpu.name(),
        figure(ceiling)
    );
    println!("| shape | us | min | alone | GB/s | of a copy | host | error (of allowed) |");
    println!("|{}", "---|".repeat(8));
    for shape in &shapes {
        match time(gpu, shape, ceiling, args) {
            Ok(record) => records.add(record),
            Err(error) => records.fail(&shape.name(), error.as_ref()),
        }
    }
    records.save(args.json.as_deref())
}

fn time<D: Timed>(gpu: &D, shape: &Shape, ceiling: f64, args: &Args) -> Result<serde_json::Value> {
    let arrays = Arrays::new(gpu, shape)?;
    let copies = 0..copies(gpu, shape);
    let dtype = Dtype::F32;
    let (right, [together, alone]) = match shape.what {
        What::Merge => {
            let op = gpu.compile(MergeStates { dtype, head_size: HEAD_SIZE })?;
            let input = (0..shape.tokens, shape.world);
            let layers = Layers::new(op, shape.tokens, input, copies.map(|copy| arrays.merge(shape, copy)))?;
            (
                arrays.run_and_check(gpu, shape, &layers)?,
                gpu.time_both(args.replays(), |r, call| layers.record(r, call))?,
            )
        }
        What::Correct => {
            let op = gpu.compile(CorrectAttnOut { dtype, head_size: HEAD_SIZE })?;
            let layers = Layers::new(
                op,
                shape.tokens,
                0..shape.tokens,
                copies.map(|copy| arrays.correct(shape, copy)),
            )?;
            (
                arrays.run_and_check(gpu, shape, &layers)?,
                gpu.time_both(args.replays(), |r, call| layers.record(r, call))?,
            )
        }
    };
    let rate = shape.bytes() as f64 / together.median / 1e9;
    let [us, min, alone_us] = [together.median, together.min, alone.median].map(|s| s * 1e6);
    print!("| {} | {} | {} | {} ", shape.name(), micros(us), micros(min), micros(alone_us));
    println!("| {} | {} | {} | {right} |", figure(rate), figure(ceiling / rate), figure(together.host * 1e6));
    let mut record = json!({
        "workload": shape.name(), "world": shape.world, "tokens": shape.tokens, "heads": shape.heads,
        "us_alone": alone_us, "gb_s": rate, "of_a_copy": ceiling / rate, "error": right,
    });
    if let Some(fields) = record.as_object_mut() {
        fields.extend(timing_fields(&together));
    }
    Ok(record)
}

fn copies(gpu: &impl Timed, shape: &Shape) -> u64 {
    if gpu.is_small() { 1 } else { ROTATED_BYTES.div_ceil(shape.bytes()).clamp(2, 128) }
}

impl<B> Arrays<B> {
    fn new<D: Timed<Buffer = B>>(gpu: &D, shape: &Shape) -> Result<Self> {
        let (paint, copies) = (Paint::new(Dtype::F32), copies(gpu, shape));
        Ok(Self {
            states: gpu.painted(&paint, shape.states() * shape.elems() * copies)?,
            lses: gpu.painted(&paint, u64::from(shape.world) * shape.rows() * copies)?,
            output: gpu.buffer(paint.bytes(shape.elems() * copies))?,
            output_lse: gpu.buffer(paint.bytes(shape.rows() * copies))?,
            paint,
        })
    }

    fn merge(&self, shape: &Shape, copy: u64) -> MergeStatesArgs<&B> {
        let world = u64::from(shape.world);
        MergeStatesArgs {
            states: rows(&self.states, shape, copy * world),
            set_stride: shape.elems(),
            lse: logs(&self.lses, shape, copy * world),
            lse_set_stride: shape.rows(),
            output: rows(&self.output, shape, copy),
            output_lse: Some(logs(&self.output_lse, shape, copy)),
            lse_base: LseBase::E,
            num_heads: shape.heads,
        }
    }

    fn correct(&self, shape: &Shape, copy: u64) -> CorrectAttnOutArgs<&B> {
        CorrectAttnOutArgs {
            out: rows(&self.states, shape, copy),
            lses: logs(&self.lses, shape, copy * u64::from(shape.world)),
            lse_rank_stride: shape.rows(),
            output: rows(&self.output, shape, copy),
            output_lse: Some(logs(&self.output_lse, shape, copy)),
            lse_base: LseBase::E,
            world: shape.world,
            rank: 0,
            num_heads: shape.heads,
        }
    }

    /// Runs the first layer, and compares its first and last rows with the oracle.
    fn run_and_check<O: Op, D: Timed<Buffer = B> + wgpu_mla::Kernel<O>>(
        &self,
        gpu: &D,
        shape: &Shape,
        layers: &Layers<O, D>,
    ) -> Result<String> {
        layers.run_first()?;
        let (count, size) = (shape.rows() as usize, HEAD_SIZE as usize);
        let out = Dtype::F32.decode_all(&gpu.download(&self.output, self.paint.bytes(shape.elems()))?);
        let lse = Dtype::F32.decode_all(&gpu.download(&self.output_lse, self.paint.bytes(shape.rows()))?);
        let (mut got, mut got_lse, mut want, mut want_lse) = (vec![], vec![], vec![], vec![]);
        for row in (0..32.min(count)).chain(count.saturating_sub(32).max(32)..count) {
            let painted = |first: usize, n: usize| -> Vec<f64> {
                (first..first + n).map(|i| f64::from(self.paint.at(i as u64))).collect()
            };
            let state = |rank: usize| painted((rank * count + row) * size, size);
            let lses: Vec<f64> =
                (0..shape.world as usize).flat_map(|rank| painted(rank * count + row, 1)).collect();
            let (row_out, row_lse) = match shape.what {
                What::Merge => {
                    let states: Vec<_> = (0..lses.len()).map(state).collect();
                    let partials: Vec<_> =
                        states.iter().map(Vec::as_slice).zip(lses.iter().copied()).collect();
                    merge_states(&partials)
                }
                What::Correct => correct_attn_out(LseBase::E, &state(0), &lses, 0),
            };
            want.extend(row_out);
            want_lse.push(row_lse);
            got.extend_from_slice(&out[row * size..][..size]);
            got_lse.push(lse[row]);
        }
        let report = close("output", &got, &want, &Tolerance::merge(Dtype::F32)).into_result()?;
        close("output_lse", &got_lse, &want_lse, &Tolerance::merge_lse()).into_result()?;
        Ok(format!("{:.1e} ({:.1} %)", report.worst_abs, 100.0 * report.worst_ratio))
    }
}

/// The `index`th output of a buffer.
fn rows<'a, B>(buffer: &'a B, shape: &Shape, index: u64) -> View<&'a B> {
    View { offset: index * shape.elems(), ..View::dense(buffer, shape.heads, HEAD_SIZE) }
}

/// The `index`th LSEs of a buffer.
fn logs<'a, B>(buffer: &'a B, shape: &Shape, index: u64) -> View<&'a B> {
    View { offset: index * shape.rows(), ..View::dense(buffer, shape.heads, 1) }
}
