//! Times `head_project`: absorb and v_up of a decode, and k_up of a prefill, beside a kernel that reads their weights once and does nothing
//! else. Each is compared with the oracle first; a wrong one is not timed, and the run ends with status 1.
//!
//! ```text
//! cargo bench --bench project -- [--variant NAME] [--only TEXT].. [--replays N] [--json FILE] [--full | --test] [--list]
//! cargo bench --bench project --features cuda -- --backend cuda
//! ```
//! Weights in e4m3 and `Q8_0` are beside those in bf16, with the ratio of their times at the end.
//!
//! Weights rotate over enough layers to miss the L2; all layers share the buffers of `x` and `y`, as in a model.

#[allow(dead_code)]
mod support;

use std::collections::BTreeMap;

use mla_support::reference::{Projection as Oracle, head_project, q8_0_values};
use serde_json::json;
use support::Result;
use support::args::Args;
use support::device::{Layers, Timed};
use support::paint::Paint;
use support::record::{Records, figure, micros, timing_fields};
use wgpu_mla::{
    Dtype, HeadDims, HeadProject, HeadProjectArgs, OpOptions, View, WeightFormat, WeightScales, WeightView,
};

/// The dims of DeepSeek-V2-Lite with 16 heads, which is also one device's share of DeepSeek-V3 on 8 devices; with 128, those of
/// DeepSeek-V3.
const fn dims(num_heads: u32) -> HeadDims {
    HeadDims { num_heads, kv_lora_rank: 512, qk_nope_head_dim: 128, v_head_dim: 128 }
}

/// Heads of a few of the rows.
const MANY_HEADS: u32 = 128;
/// Least total bytes of the rotated weights: more than any card's L2, so that each call misses it.
const ROTATED_BYTES: u64 = 300_000_000;

/// One of a layer's projections, or both of a decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Op {
    Absorb,
    VUp,
    KUp,
    Both,
}

#[derive(Debug, Clone, Copy)]
struct Shape {
    op: Op,
    /// The dtype of x.
    dtype: Dtype,
    weight: WeightFormat,
    heads: u32,
    tokens: u32,
}

impl Shape {
    fn name(&self) -> String {
        let op = match self.op {
            Op::Absorb => "absorb",
            Op::VUp => "v_up",
            Op::KUp => "k_up",
            Op::Both => "absorb + v_up",
        };
        let heads = if self.heads == 16 { String::new() } else { format!(" {} heads", self.heads) };
        let weights = if self.is_plain() { String::new() } else { format!(" {} weights", self.weight) };
        format!("{op} batch {} {}{heads}{weights}", self.tokens, self.dtype)
    }

    /// Whether weights have the dtype of x.
    fn is_plain(&self) -> bool {
        self.weight == self.dtype.into()
    }

    fn ops(&self) -> &'static [Op] {
        match self.op {
            Op::Absorb => &[Op::Absorb],
            Op::VUp => &[Op::VUp],
            Op::KUp => &[Op::KUp],
            Op::Both => &[Op::Absorb, Op::VUp],
        }
    }

    /// Bytes of the weights.
    fn bytes(&self) -> u64 {
        self.weight.bytes_of(dims(self.heads).elements()) / 2 * self.ops().len() as u64
    }

    fn flops(&self) -> f64 {
        2.0 * f64::from(self.tokens) * (dims(self.heads).elements() / 2) as f64 * self.ops().len() as f64
    }
}

/// Painted weights of many layers.
struct Weights<'a, D: Timed> {
    buffer: &'a D::Buffer,
    paint: &'a Paint,
    bytes: u64,
    /// A scale of 1.
    scales: &'a D::Buffer,
}

impl<D: Timed> Clone for Weights<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Timed> Copy for Weights<'_, D> {}

/// A projection with the weights of several layers, which are rotated, and their common output.
struct Bound<D: Timed> {
    op: Op,
    project: Layers<HeadProject, D>,
    y: D::Buffer,
}

fn main() {
    support::on_cards!(run);
}

fn run<D: Timed>(gpu: &D, args: &Args) -> Result<()> {
    let tokens: &[u32] = match (args.test, gpu.is_small() && !args.full) {
        (true, _) => &[3],
        (_, true) => &[1, 64],
        _ => &[1, 8, 64, 512],
    };
    let ops = [Op::Absorb, Op::VUp, Op::Both];
    let few = [Dtype::Bf16, Dtype::F16].into_iter().flat_map(|dtype| {
        tokens.iter().flat_map(move |&tokens| {
            ops.map(|op| Shape { op, dtype, weight: dtype.into(), heads: 16, tokens })
        })
    });
    let many = [(MANY_HEADS, 64, &ops[..]), (MANY_HEADS, 512, &ops), (16, 8192, &[Op::KUp])];
    let many = many.into_iter().flat_map(|(heads, tokens, ops)| {
        ops.iter().map(move |&op| Shape { op, dtype: Dtype::Bf16, weight: Dtype::Bf16.into(), heads, tokens })
    });
    let quantised = [(16, tokens[tokens.len() - 1].min(64)), (MANY_HEADS, 64)];
    let quantised = [Dtype::E4m3.into(), WeightFormat::Q8_0].into_iter().flat_map(move |weight| {
        quantised.into_iter().flat_map(move |(heads, tokens)| {
            ops.map(|op| Shape { op, dtype: Dtype::Bf16, weight, heads, tokens })
        })
    });
    let is_card = !args.test && (args.full || !gpu.is_small());
    let shapes = few.chain(many.filter(|_| is_card));
    let shapes = shapes.chain(quantised.filter(|shape| is_card || shape.heads == 16));
    let shapes: Vec<Shape> = shapes.filter(|shape| args.wants(&shape.name())).collect();
    if args.list {
        shapes.iter().for_each(|shape| println!("{}", shape.name()));
        return Ok(());
    }
    let rotated = if gpu.is_small() { dims(16).elements() } else { ROTATED_BYTES.div_ceil(2) };
    let most_heads = shapes.iter().map(|shape| shape.heads).max().unwrap_or(16);
    let rotated = rotated.next_multiple_of(dims(most_heads).elements());
    let paints = [Dtype::Bf16, Dtype::F16, Dtype::E4m3].map(Paint::new);
    // Blocks of Q8_0 are the same bytes as codes: the scales among them are small and finite.
    let [bf16, f16, codes] =
        [(0, rotated), (1, rotated), (2, 2 * rotated)].map(|(i, elements)| gpu.painted(&paints[i], elements));
    let weights = [bf16?, f16?, codes?];
    let scales = gpu.buffer(4)?;
    gpu.upload(&scales, 0, &1f32.to_le_bytes())?;
    let mut records = Records::new("project", gpu.facts());
    println!("# head_project on {}\n\nP = V = 128, L = 512, 16 heads unless said.", gpu.name());
    // Seconds of the kernel that only reads one op's weights and both ops', by the number of heads.
    let mut read = BTreeMap::new();
    for shape in &shapes {
        let bytes = dims(shape.heads).elements() * 2;
        if read.contains_key(&shape.heads) {
            continue;
        }
        let times = [bytes / 2, bytes]
            .map(|bytes| gpu.read_once(&weights[0], bytes, rotated * 2 / bytes, args.replays()));
        let [half, whole] = times;
        let times = [half?, whole?];
        let [half, whole] = times.map(|seconds| micros(seconds * 1e6));
        println!(
            "A kernel that only reads, {} heads: {half} us for one op's weights ({} MB), {whole} us for both ops' at once.",
            shape.heads,
            figure(bytes as f64 / 2e6),
        );
        if shape.heads == 16 {
            records.note("read_half_us", times[0] * 1e6);
            records.note("read_whole_us", times[1] * 1e6);
        }
        read.insert(shape.heads, times);
    }
    println!(
        "us: device time, many calls in a pass or graph; alone: a pass or launch for each. \
         read: times the kernels that read the same weights, one for each op; at once: times one kernel that reads both ops'.\n"
    );
    println!(
        "| shape | variant | us | min | alone | GB/s of weights | TFLOP/s | read | at once | host | worst |\n|---|---|---|---|---|---|---|---|---|---|---|"
    );
    // Seconds of those with bf16 weights.
    let mut plain = BTreeMap::new();
    let mut ratios = Vec::new();
    for shape in &shapes {
        let of_x = usize::from(shape.dtype == Dtype::F16);
        let of_weights = if shape.is_plain() { of_x } else { 2 };
        let weights = Weights {
            buffer: &weights[of_weights],
            paint: &paints[of_weights],
            bytes: rotated * 2,
            scales: &scales,
        };
        let result = time(gpu, shape, weights, &paints[of_x], read[&shape.heads], args);
        let same = Shape { weight: shape.dtype.into(), ..*shape }.name();
        match result {
            Ok((seconds, record)) => {
                records.add(record);
                if shape.is_plain() {
                    plain.insert(same, seconds);
                } else if let Some(of_plain) = plain.get(&same) {
                    ratios.push(format!("| {} | {:.3} |", shape.name(), seconds / of_plain));
                }
            }
            Err(error) => records.fail(&shape.name(), error.as_ref()),
        }
    }
    println!("\n| shape | times bf16 weights |\n|---|---|\n{}", ratios.join("\n"));
    records.save(args.json.as_deref())
}

/// Bytes of a layer's blocks before those of an op.
fn blocks_before(op: Op, dims: &HeadDims) -> u64 {
    if op == Op::VUp { WeightFormat::Q8_0.bytes_of(dims.elements() / 2) } else { 0 }
}

fn bound<D: Timed>(
    gpu: &D,
    op: Op,
    shape: &Shape,
    weights: Weights<'_, D>,
    paint: &Paint,
    args: &Args,
) -> Result<Bound<D>> {
    let (dtype, weight, tokens, dims) = (paint.dtype, shape.weight, shape.tokens, dims(shape.heads));
    let (spec, view) = match op {
        Op::VUp => (HeadProject::v_up(&dims, dtype, weight, dtype), WeightView::w_uv(&dims, weights.buffer)),
        Op::KUp => (HeadProject::k_up(&dims, dtype, weight, dtype), WeightView::w_uk(&dims, weights.buffer)),
        _ => (HeadProject::absorb(&dims, dtype, weight, dtype), WeightView::w_uk(&dims, weights.buffer)),
    };
    let (spec, view) = match (weight, op) {
        (WeightFormat::Q8_0, Op::VUp) => (spec, WeightView::attn_v_b(&dims, weight, weights.buffer)),
        (WeightFormat::Q8_0, _) => (spec.transposed(), WeightView::attn_k_b(&dims, weight, weights.buffer)),
        _ => (spec, view),
    };
    // A layer's matrices in the view's unit. Blocks of both ops lie one behind the other.
    let (skip, layer_len) = match weight {
        WeightFormat::Q8_0 => (blocks_before(op, &dims), weight.bytes_of(dims.elements())),
        WeightFormat::Elements(_) => (0, dims.elements()),
    };
    let copies = weights.bytes / weight.bytes_of(dims.elements());
    let x_heads = if op == Op::KUp { 1 } else { dims.num_heads };
    let x = gpu.painted(paint, u64::from(tokens) * u64::from(x_heads * spec.k))?;
    let y = gpu.buffer(u64::from(tokens) * u64::from(dims.num_heads * spec.n) * dtype.bytes() as u64)?;
    let layer = |layer: u64| {
        let scales = weight.has_scales().then_some(WeightScales::per_tensor(weights.scales));
        let weight = WeightView { offset: view.offset + skip + layer * layer_len, scales, ..view };
        let mut x = View::dense(&x, x_heads, spec.k);
        if op == Op::KUp {
            x.head_stride = 0;
        }
        HeadProjectArgs {
            x,
            weight,
            y: View::dense(&y, dims.num_heads, spec.n),
            scale: 1.0,
            out_scale: 1.0,
            saturates: false,
            guard: None,
        }
    };
    let project = gpu.compile_with(spec, &OpOptions { variant: args.variant.clone() })?;
    let project = Layers::new(project, tokens, 0..tokens, (0..copies).map(layer))?;
    Ok(Bound { op, project, y })
}

fn time<D: Timed>(
    gpu: &D,
    shape: &Shape,
    weights: Weights<'_, D>,
    paint: &Paint,
    [half, whole]: [f64; 2],
    args: &Args,
) -> Result<(f64, serde_json::Value)> {
    let ops = shape.ops().iter().map(|&op| bound(gpu, op, shape, weights, paint, args));
    let ops = ops.collect::<Result<Vec<_>>>()?;
    let mut worst = 0f64;
    for op in &ops {
        worst = worst.max(check(gpu, op, shape.tokens, paint, weights.paint)?);
    }
    let record = |recorder: &mut D::Recorder<'_>, call| {
        ops.iter().try_for_each(|op| op.project.record(recorder, call))
    };
    let [together, alone] = gpu.time_both(args.replays(), record)?;
    let us = |seconds: f64| seconds * 1e6;
    let rate = shape.bytes() as f64 / together.median / 1e9;
    let tflops = shape.flops() / together.median / 1e12;
    let read = together.median / (half * ops.len() as f64);
    let at_once = (shape.op == Op::Both).then_some(together.median / whole);
    print!("| {} | {} | {} ", shape.name(), ops[0].project.op.variant(), micros(us(together.median)));
    print!("| {} | {} | {} ", micros(us(together.min)), micros(us(alone.median)), figure(rate));
    print!("| {} | {} | {} ", figure(tflops), figure(read), figure(at_once.unwrap_or(f64::NAN)));
    println!("| {} | {worst:.2} |", figure(us(together.host)));
    let mut record = json!({
        "workload": shape.name(), "variant": ops[0].project.op.variant(), "heads": shape.heads,
        "tokens": shape.tokens,
        "us_alone": us(alone.median), "gb_s": rate, "tflop_s": tflops, "times_read": read, "times_read_at_once": at_once,
    });
    if let Some(fields) = record.as_object_mut() {
        fields.extend(timing_fields(&together));
    }
    Ok((together.median, record))
}

/// Compares the first and the last tokens of the first layer with the oracle: the largest error as a share of what is allowed.
fn check<D: Timed>(gpu: &D, op: &Bound<D>, tokens: u32, paint: &Paint, of_weights: &Paint) -> Result<f64> {
    op.project.run_first()?;
    let spec = *op.project.op.op();
    let HeadProject { k, n, order, .. } = spec;
    let dims = dims(spec.num_heads);
    let (heads, k, n) = (spec.num_heads as usize, k as usize, n as usize);
    let dtype = paint.dtype;
    let got = dtype.decode_all(&gpu.download(&op.y, (tokens as usize * heads * n * dtype.bytes()) as u64)?);
    let (latent, rows) = (dims.kv_lora_rank as usize, dims.qk_nope_head_dim as usize);
    let skip = if op.op == Op::VUp { rows } else { 0 };
    let x_heads = if op.op == Op::KUp { 1 } else { heads };
    let element = |head: usize, at: usize| (head * (rows + dims.v_head_dim as usize) + skip) * latent + at;
    let weight: Vec<f32> = match spec.weight {
        WeightFormat::Q8_0 => {
            let begin = blocks_before(op.op, &dims);
            q8_0_values(&of_weights.codes(begin..begin + spec.weight.bytes_of((heads * k * n) as u64)))
        }
        WeightFormat::Elements(_) => {
            (0..heads * k * n).map(|at| of_weights.at(element(at / (k * n), at % (k * n)) as u64)).collect()
        }
    };
    let tokens = tokens as usize;
    let mut worst = 0f64;
    for token in (0..tokens.min(4)).chain(tokens.saturating_sub(4).max(4)..tokens) {
        let x: Vec<f32> =
            (0..heads * k).map(|at| paint.at((token * x_heads * k + at % (x_heads * k)) as u64)).collect();
        let want =
            head_project(&Oracle { num_heads: heads, k, n, order, x: &x, weight: &weight, scales: &[] });
        for (head, want) in want.chunks(n).enumerate() {
            let largest = want.iter().fold(0f64, |max, y| max.max(y.abs()));
            for (column, want) in want.iter().enumerate() {
                let got = f64::from(got[(token * heads + head) * n + column]);
                let last_place = if dtype == Dtype::F16 { 1.0 / 2048.0 } else { 1.0 / 256.0 };
                let allowed = (want.abs() * last_place).max(2e-5 * largest);
                let ratio = (got - want).abs() / allowed;
                if ratio.is_nan() || ratio > 1.01 {
                    return Err(
                        format!("token {token}, head {head}, column {column} is {got}, not {want}").into()
                    );
                }
                worst = worst.max(ratio);
            }
        }
    }
    Ok(worst)
}
