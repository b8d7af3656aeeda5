//! Times `mla_prefill`. Some rows of each shape are compared with the oracle first; a wrong one is not timed, and the run ends with status
//! 1.
//!
//! ```text
//! cargo bench --bench prefill -- [--only TEXT].. [--variant NAME] [--replays N] [--json FILE] [--full | --test] [--list]
//! cargo bench --bench prefill --features cuda -- --backend cuda
//! ```
//! TFLOP/s counts `2 * (P + R + V)` for each head and each pair of a query token and a key that it attends to.

#[allow(dead_code)]
mod support;

use mla_support::close::{Tolerance, close};
use mla_support::reference::{Expanded, mla_prefill_row};
use serde_json::json;
use support::Result;
use support::args::Args;
use support::device::{Layers, Timed};
use support::paint::Paint;
use support::record::{Records, figure, micros, timing_fields};
use wgpu_mla::{
    Candidate, Dtype, Mask, MlaPrefill, MlaPrefillArgs, PrefillExtent, PrefillOptions, PrefillSequence, View,
};

const SCALE: f32 = 0.072_168_78;

/// What an H200's tensor cores reach in a GEMM of f16 through Vulkan, in TFLOP/s.
const H200_GEMM: f64 = 266.0;

#[derive(Clone)]
struct Shape {
    what: String,
    sequences: Vec<PrefillSequence>,
    spec: MlaPrefill,
}

impl Shape {
    fn new(what: &str, batch: &[(u32, u32, bool)], dims: [u32; 3], heads: u32, dtype: Dtype) -> Self {
        let (mut q_begin, mut kv_begin) = (0, 0);
        let mut sequences = Vec::new();
        for &(q_len, kv_len, causal) in batch {
            let mut sequence = PrefillSequence::causal(q_begin, q_len, kv_begin, kv_len);
            if !causal {
                sequence.mask = Mask::Full;
            }
            sequences.push(sequence);
            q_begin += q_len;
            kv_begin += kv_len;
        }
        let spec = MlaPrefill {
            num_heads: heads,
            qk_nope_head_dim: dims[0],
            qk_rope_head_dim: dims[1],
            v_head_dim: dims[2],
            dtype,
            out: dtype,
        };
        let [p, r, v] = dims;
        Self { what: format!("{what} {p}/{r}/{v}x{heads} {dtype}"), sequences, spec }
    }

    /// Keys that a query token of a sequence attends to.
    fn sees(sequence: &PrefillSequence, i: u32) -> u32 {
        match sequence.mask {
            Mask::Causal => (sequence.kv_len + i + 1).saturating_sub(sequence.q_len),
            _ => sequence.kv_len,
        }
    }

    fn flops(&self) -> f64 {
        let of = |s: &PrefillSequence| (0..s.q_len).map(|i| f64::from(Self::sees(s, i))).sum::<f64>();
        let pairs: f64 = self.sequences.iter().map(of).sum();
        let dims = self.spec.qk_nope_head_dim + self.spec.qk_rope_head_dim + self.spec.v_head_dim;
        2.0 * f64::from(dims) * f64::from(self.spec.num_heads) * pairs
    }
}

fn shapes(test: bool, small: bool) -> Vec<Shape> {
    const V3: [u32; 3] = [128, 64, 128];
    if test {
        return vec![
            Shape::new("70 causal", &[(70, 70, true)], [64, 32, 64], 2, Dtype::F16),
            Shape::new("9 to 130", &[(9, 130, false)], [64, 32, 64], 2, Dtype::F16),
        ];
    }
    if small {
        return vec![Shape::new("512 causal", &[(512, 512, true)], V3, 2, Dtype::F16)];
    }
    vec![
        Shape::new("8192 causal", &[(8192, 8192, true)], V3, 16, Dtype::F16),
        Shape::new("8192 full", &[(8192, 8192, false)], V3, 16, Dtype::F16),
        Shape::new("8192 full", &[(8192, 8192, false)], V3, 16, Dtype::Bf16),
        Shape::new("2048 causal", &[(2048, 2048, true)], V3, 16, Dtype::F16),
        Shape::new("2048 causal", &[(2048, 2048, true)], V3, 16, Dtype::Bf16),
        Shape::new("2048 x 4 causal", &[(2048, 2048, true); 4], V3, 16, Dtype::F16),
        Shape::new("1024 to 32768", &[(1024, 32768, false)], V3, 16, Dtype::F16),
        Shape::new("8192 causal", &[(8192, 8192, true)], V3, 16, Dtype::Bf16),
        Shape::new("8192 causal", &[(8192, 8192, true)], V3, 128, Dtype::F16),
        Shape::new("8192 causal", &[(8192, 8192, true)], [192, 64, 256], 16, Dtype::F16),
        Shape::new("8192 causal", &[(8192, 8192, true)], [192, 64, 256], 16, Dtype::Bf16),
        Shape::new("8192 causal", &[(8192, 8192, true)], [64, 64, 128], 16, Dtype::Bf16),
        Shape::new("8192 causal", &[(8192, 8192, true)], [64, 32, 64], 32, Dtype::F16),
        Shape::new("4096 causal", &[(4096, 4096, true)], V3, 16, Dtype::F32),
    ]
}

fn main() {
    support::on_cards!(run);
}

fn run<D: Timed>(gpu: &D, args: &Args) -> Result<()> {
    let mut shapes = shapes(args.test, gpu.is_small() && !args.full);
    shapes.retain(|shape| args.wants(&shape.what));
    if args.list {
        shapes.iter().for_each(|shape| println!("{}", shape.what));
        return Ok(());
    }
    let mut records = Records::new("prefill", gpu.facts());
    println!(
        "# mla_prefill on {}\n\nus: device time, many calls in a pass or graph. TFLOP/s: 2 * (P + R + V) * heads * pairs of a query and a key that \
         it sees; share: of {H200_GEMM} TFLOP/s, an H200's GEMM.\n",
        gpu.name(),
    );
    println!(
        "| shape | variant | us | min | TFLOP/s | share | host | check |\n|---|---|---|---|---|---|---|---|"
    );
    for shape in &shapes {
        let variants = gpu.variants(&shape.spec).into_iter().filter(|variant| variant.lacks.is_none());
        for variant in variants.filter(|one| args.variant.as_deref().is_none_or(|name| name == one.name)) {
            match time(gpu, shape, &variant, args) {
                Ok(record) => records.add(record),
                Err(error) => records.fail(&format!("{} {}", shape.what, variant.name), error.as_ref()),
            }
        }
    }
    records.save(args.json.as_deref())
}

fn time<D: Timed>(gpu: &D, shape: &Shape, variant: &Candidate, args: &Args) -> Result<serde_json::Value> {
    let spec = shape.spec;
    let options = PrefillOptions { variant: Some(variant.name.into()), ..Default::default() };
    let prefill = gpu.compile_with(spec, &options)?;
    let PrefillExtent { tokens, keys, .. } = PrefillExtent::of(&shape.sequences)?;
    let (heads, dtype) = (u64::from(spec.num_heads), spec.dtype);
    let (query, paint) = (Paint::query(dtype), Paint::new(dtype));
    let elems = |rows: u32, dim: u32| u64::from(rows) * heads * u64::from(dim);
    let q_nope = gpu.painted(&query, elems(tokens, spec.qk_nope_head_dim))?;
    let q_pe = gpu.painted(&query, elems(tokens, spec.qk_rope_head_dim))?;
    let k_nope = gpu.painted(&paint, elems(keys, spec.qk_nope_head_dim))?;
    let k_pe = gpu.painted(&paint, u64::from(keys) * u64::from(spec.qk_rope_head_dim))?;
    let v = gpu.painted(&paint, elems(keys, spec.v_head_dim))?;
    let out = gpu.buffer(elems(tokens, spec.v_head_dim) * spec.out.bytes() as u64)?;
    let lse = gpu.buffer(elems(tokens, 1) * 4)?;
    let layer = MlaPrefillArgs {
        q_nope: View::dense(&q_nope, spec.num_heads, spec.qk_nope_head_dim),
        q_pe: View::dense(&q_pe, spec.num_heads, spec.qk_rope_head_dim),
        k_nope: View::dense(&k_nope, spec.num_heads, spec.qk_nope_head_dim),
        k_pe: View { head_stride: 0, ..View::dense(&k_pe, 1, spec.qk_rope_head_dim) },
        v: View::dense(&v, spec.num_heads, spec.v_head_dim),
        out: View::dense(&out, spec.num_heads, spec.v_head_dim),
        lse: View::dense(&lse, spec.num_heads, 1),
        softmax_scale: SCALE,
        v_scale: 1.0,
    };
    let tiles = shape.sequences.iter().map(|sequence| sequence.q_len.div_ceil(prefill.facts().rows)).sum();
    let prefill = Layers::new(prefill, tiles, &shape.sequences, [layer])?;
    prefill.run_first()?;
    let right = check(gpu, shape, variant, &out, &lse)?;

    let together = gpu.time(args.replays(), |recorder, call| prefill.record(recorder, call))?;
    let rate = shape.flops() / together.median / 1e12;
    let us = |seconds: f64| seconds * 1e6;
    print!(
        "| {} | {} | {} | {} ",
        shape.what,
        variant.name,
        micros(us(together.median)),
        micros(us(together.min))
    );
    let share = 100.0 * rate / H200_GEMM;
    println!("| {} | {} % | {} | {right} |", figure(rate), figure(share), figure(us(together.host)));
    let mut record = json!({ "workload": shape.what, "variant": variant.name, "tflops": rate });
    if let Some(fields) = record.as_object_mut() {
        fields.extend(timing_fields(&together));
    }
    Ok(record)
}

/// Compares some rows of some heads with the oracle: the first and last of each sequence, and one in between.
fn check<D: Timed>(
    gpu: &D,
    shape: &Shape,
    variant: &Candidate,
    out: &D::Buffer,
    lse: &D::Buffer,
) -> Result<String> {
    let (spec, query, paint) = (shape.spec, Paint::query(shape.spec.dtype), Paint::new(shape.spec.dtype));
    let [nope, rope, dim] =
        [spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim].map(|dim| dim as usize);
    let heads = spec.num_heads as usize;
    let tokens = shape.sequences.iter().map(|s| s.q_begin + s.q_len).max().unwrap_or(0) as usize;
    let outs = gpu.download(out, (tokens * heads * dim * spec.out.bytes()) as u64)?;
    let lses = gpu.download(lse, (tokens * heads * 4) as u64)?;
    let some = |paint: &Paint, at: usize, dim: usize| -> Vec<f32> {
        (0..dim).map(|i| paint.at((at * dim + i) as u64)).collect()
    };
    let (mut got, mut want, mut got_lse, mut want_lse) = (vec![], vec![], vec![], vec![]);
    for sequence in [&shape.sequences[0], &shape.sequences[shape.sequences.len() - 1]] {
        for head in [0, heads - 1] {
            let keys = sequence.kv_begin as usize..(sequence.kv_begin + sequence.kv_len) as usize;
            let of_head = |dim: usize| -> Vec<f32> {
                keys.clone().flat_map(|key| some(&paint, key * heads + head, dim)).collect()
            };
            let (k_nope, v) = (of_head(nope), of_head(dim));
            let k_pe: Vec<f32> = keys.clone().flat_map(|key| some(&paint, key, rope)).collect();
            for i in [0, 1, sequence.q_len / 2 + 7, sequence.q_len - 1] {
                let i = i.min(sequence.q_len - 1);
                let at = (sequence.q_begin + i) as usize * heads + head;
                let args = Expanded {
                    num_heads: 1,
                    qk_nope_head_dim: nope,
                    qk_rope_head_dim: rope,
                    v_head_dim: dim,
                    q_nope: &some(&query, at, nope),
                    q_pe: &some(&query, at, rope),
                    k_nope: &k_nope,
                    k_pe: &k_pe,
                    v: &v,
                    softmax_scale: SCALE.into(),
                };
                let (row, row_lse) = mla_prefill_row(&args, 0, 0, 0..Shape::sees(sequence, i) as usize);
                want.extend(row);
                want_lse.push(row_lse);
                got.extend((0..dim).map(|c| spec.out.decode_at(&outs, at * dim + c)));
                got_lse.push(Dtype::F32.decode_at(&lses, at));
            }
        }
    }
    let tolerance = Tolerance::decode(spec.dtype, spec.dtype, spec.out, variant.rounds_weights, 0.35, dim);
    close("lse", &got_lse, &want_lse, &Tolerance::lse()).into_result()?;
    let report = close("out", &got, &want, &tolerance).into_result()?;
    let rows = got_lse.len();
    Ok(format!("{rows} rows: {:.0e}, {:.2} of allowed", report.worst_abs, report.worst_ratio))
}
