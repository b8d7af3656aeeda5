//! Times `merge_state`. Each shape is checked against the oracle first; a wrong one is not timed, and the run ends with status 1.
//!
//! ```text
//! cargo bench --bench merge -- [--only TEXT].. [--replays N] [--json FILE] [--full | --test] [--list]
//! cargo bench --bench merge --features cuda -- --backend cuda
//! ```
//! BENCHMARKS.md says what the figures mean.

#[allow(dead_code)]
mod support;

use mla_support::close::{Tolerance, close};
use mla_support::reference::{State, merge_state};
use serde_json::json;
use support::args::Args;
use support::ceiling::Kind;
use support::device::{Layers, Timed};
use support::paint::Paint;
use support::record::{Records, figure, micros, timing_fields};
use support::{Result, peers};
use wgpu_mla::{Dtype, MergeState, MergeStateArgs, View};

const HEAD_SIZE: u32 = 128;

/// Least total bytes of the rotated buffers: more than any card's L2, so that each call misses it.
const ROTATED_BYTES: u64 = 300_000_000;

#[derive(Clone, Copy)]
struct Shape {
    dtype: Dtype,
    tokens: u32,
    heads: u32,
}

impl Shape {
    fn name(&self) -> String {
        format!("{} {} x {} x {HEAD_SIZE}", self.dtype, self.tokens, self.heads)
    }

    fn elems(&self) -> u64 {
        u64::from(self.tokens * self.heads * HEAD_SIZE)
    }

    fn rows(&self) -> u64 {
        u64::from(self.tokens * self.heads)
    }

    /// Bytes read and written by one merge.
    fn bytes(&self) -> u64 {
        3 * (self.elems() * self.dtype.bytes() as u64 + self.rows() * 4)
    }
}

/// The arrays of a dtype's merges, each with room for all that are rotated.
struct Arrays<B> {
    paint: Paint,
    lse_paint: Paint,
    prefix: B,
    suffix: B,
    output: B,
    prefix_lse: B,
    suffix_lse: B,
    output_lse: B,
    /// Elements of the suffix that are left out at its front, so that both inputs differ.
    skew: u64,
}

fn main() {
    support::on_cards!(run);
}

fn run<D: Timed>(gpu: &D, args: &Args) -> Result<()> {
    let (tokens, heads): (&[u32], &[u32]) = match (args.test, gpu.is_small() && !args.full) {
        (true, _) => (&[37], &[16]),
        (_, true) => (&[256, 613], &[16]),
        _ => (&[256, 512, 613, 1024, 1536, 4096], &[16, 32, 48]),
    };
    let dtypes = [Dtype::F16, Dtype::Bf16, Dtype::F32];
    let shapes = dtypes.iter().flat_map(|&dtype| {
        tokens.iter().flat_map(move |&tokens| heads.iter().map(move |&heads| Shape { dtype, tokens, heads }))
    });
    let shapes: Vec<Shape> = shapes.filter(|shape| args.wants(&shape.name())).collect();
    if args.list {
        shapes.iter().for_each(|shape| println!("{}", shape.name()));
        return Ok(());
    }
    let (ceiling, bytes) = gpu.ceiling(Kind::Copy, args.test)?;
    let mut records = Records::new("merge", gpu.facts());
    records.note("copy_ceiling_gb_s", ceiling);
    records.note("copy_ceiling_bytes", 2 * bytes);
    records.note("peers_device", peers::DEVICE);
    println!(
        "# merge_state on {}\n\nus: device time, many merges in a pass or graph; alone: a pass or launch for each. \
         GB/s: read and written; ceiling: share of this run's copy ceiling, {} GB/s. \
         Peers: us on one {}, not on this device.\n",
        gpu.name(),
        figure(ceiling),
        peers::DEVICE
    );
    let own = own_cost(gpu, args)?;
    records.note("dispatch_us", own);
    println!("A dispatch's own cost, that of one row: {} us; \"less that\": us without it.\n", micros(own));
    println!(
        "| shape | us | less that | min | alone | GB/s | ceiling | host | error (of allowed) | vLLM Triton | vLLM CUDA | of Triton | of CUDA |"
    );
    println!("|{}", "---|".repeat(13));
    for shapes in shapes.chunk_by(|a, b| a.dtype == b.dtype) {
        let arrays = Arrays::new(gpu, shapes)?;
        for shape in shapes {
            match time(gpu, &arrays, shape, (ceiling, own), args) {
                Ok(record) => records.add(record),
                Err(error) => records.fail(&shape.name(), error.as_ref()),
            }
        }
    }
    records.save(args.json.as_deref())
}

/// Microseconds of a merge of one row, many in a pass or graph.
fn own_cost<D: Timed>(gpu: &D, args: &Args) -> Result<f64> {
    let shape = Shape { dtype: Dtype::Bf16, tokens: 1, heads: 1 };
    let arrays = Arrays::new(gpu, &[shape])?;
    let merge = gpu.compile(MergeState { dtype: shape.dtype, head_size: HEAD_SIZE })?;
    let merge = Layers::new(merge, (), (), [arrays.layer(&shape, 0)])?;
    let timing = gpu.time(args.replays(), |recorder, call| merge.record(recorder, call))?;
    Ok(timing.median * 1e6)
}

fn time<D: Timed>(
    gpu: &D,
    arrays: &Arrays<D::Buffer>,
    shape: &Shape,
    (ceiling, own): (f64, f64),
    args: &Args,
) -> Result<serde_json::Value> {
    let merge = gpu.compile(MergeState { dtype: shape.dtype, head_size: HEAD_SIZE })?;
    let layers = (0..copies(gpu, shape)).map(|copy| arrays.layer(shape, copy));
    let merge = Layers::new(merge, (), (), layers)?;
    merge.run_first()?;
    let right = arrays.check(gpu, shape)?;
    let [together, alone] = gpu.time_both(args.replays(), |recorder, call| merge.record(recorder, call))?;
    let peers = peers::merge_of(shape.dtype, shape.tokens, shape.heads);
    let (triton, cuda) = peers.unwrap_or((f64::NAN, f64::NAN));
    let us = together.median * 1e6;
    let rate = shape.bytes() as f64 / together.median / 1e9;
    print!("| {} | {} | {} | {} ", shape.name(), micros(us), micros(us - own), micros(together.min * 1e6));
    print!("| {} | {} | {} % ", micros(alone.median * 1e6), figure(rate), figure(100.0 * rate / ceiling));
    print!("| {} | {right} ", figure(together.host * 1e6));
    println!("| {} | {} | {} | {} |", micros(triton), micros(cuda), figure(us / triton), figure(us / cuda));
    let mut record = json!({
        "workload": shape.name(), "dtype": shape.dtype.name(), "tokens": shape.tokens, "heads": shape.heads,
        "us_alone": alone.median * 1e6, "gb_s": rate, "share": rate / ceiling, "error": right,
        "peers_us": [["vLLM Triton", triton], ["vLLM CUDA", cuda]],
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
    fn new<D: Timed<Buffer = B>>(gpu: &D, shapes: &[Shape]) -> Result<Self> {
        let skew = 8 * 10_007;
        let most =
            |size: fn(&Shape) -> u64| shapes.iter().map(|s| size(s) * copies(gpu, s)).max().unwrap_or(0);
        let (elems, rows) = (most(Shape::elems) + skew, most(Shape::rows) + skew);
        let (paint, lse_paint) = (Paint::new(shapes[0].dtype), Paint::new(Dtype::F32));
        Ok(Self {
            prefix: gpu.painted(&paint, elems)?,
            suffix: gpu.painted(&paint, elems)?,
            output: gpu.buffer(paint.bytes(elems))?,
            prefix_lse: gpu.painted(&lse_paint, rows)?,
            suffix_lse: gpu.painted(&lse_paint, rows)?,
            output_lse: gpu.buffer(lse_paint.bytes(rows))?,
            paint,
            lse_paint,
            skew,
        })
    }

    fn layer(&self, shape: &Shape, copy: u64) -> MergeStateArgs<&B> {
        let state = |buffer, skew: u64| {
            let offset = copy * shape.elems() + skew;
            View { offset, ..View::dense(buffer, shape.heads, HEAD_SIZE) }
        };
        // [heads, tokens], as vLLM has them.
        let lse = |buffer, skew: u64| {
            let offset = copy * shape.rows() + skew;
            View { buffer, offset, token_stride: 1, head_stride: shape.tokens.into() }
        };
        MergeStateArgs {
            prefix_output: state(&self.prefix, 0),
            prefix_lse: lse(&self.prefix_lse, 0),
            suffix_output: state(&self.suffix, self.skew),
            suffix_lse: lse(&self.suffix_lse, self.skew),
            output: state(&self.output, 0),
            output_lse: Some(lse(&self.output_lse, 0)),
            num_tokens: shape.tokens,
            num_heads: shape.heads,
            output_scale: 1.0,
        }
    }

    /// Compares the first and the last tokens of the first merge with the oracle.
    fn check<D: Timed<Buffer = B>>(&self, gpu: &D, shape: &Shape) -> Result<String> {
        let (tokens, heads) = (shape.tokens as usize, shape.heads as usize);
        let some: Vec<usize> = (0..8.min(tokens)).chain(tokens.saturating_sub(8).max(8)..tokens).collect();
        let width = heads * HEAD_SIZE as usize;
        let elements = || some.iter().flat_map(|token| token * width..(token + 1) * width);
        let logs = || (0..heads).flat_map(|head| some.iter().map(move |token| head * tokens + token));
        let side = |skew: u64| -> (Vec<f32>, Vec<f32>) {
            let output = elements().map(|i| self.paint.at(i as u64 + skew)).collect();
            (output, logs().map(|i| self.lse_paint.at(i as u64 + skew)).collect())
        };
        let (prefix, suffix) = (side(0), side(self.skew));
        let state = |side| -> State<'_> {
            let (output, lse): &(Vec<f32>, Vec<f32>) = side;
            State { output, lse }
        };
        let (want, want_lse) = merge_state(state(&prefix), state(&suffix), heads, HEAD_SIZE as usize);
        let got = gpu.download(&self.output, self.paint.bytes(shape.elems()))?;
        let got: Vec<f32> = elements().map(|i| shape.dtype.decode_at(&got, i)).collect();
        let got_lse = gpu.download(&self.output_lse, shape.rows() * 4)?;
        let got_lse: Vec<f32> = logs().map(|i| Dtype::F32.decode_at(&got_lse, i)).collect();
        let report = close("output", &got, &want, &Tolerance::merge(shape.dtype)).into_result()?;
        close("output_lse", &got_lse, &want_lse, &Tolerance::merge_lse()).into_result()?;
        Ok(format!("{:.1e} ({:.1} %)", report.worst_abs, 100.0 * report.worst_ratio))
    }
}
