//! Times decodes over a pool that is larger than a binding: sequences of 2^20 tokens in slabs, beside as many of them as fit one binding.
//! The result is compared with that of CUDA over one buffer, where the program was built with that feature and a card is there; in a test
//! with the CPU's.
//!
//! ```text
//! cargo bench --bench slabs -- [--backend NAME] [--only TEXT].. [--variant NAME] [--replays N] [--json FILE] [--test] [--list]
//! ```
//! BENCHMARKS.md says what the figures mean.

#[allow(dead_code)]
mod support;

use mla_support::close::{Tolerance, close};
use serde_json::json;
use support::Result;
use support::args::Args;
use support::ceiling::Kind;
use support::clock::Timing;
use support::device::{Layers, Timed};
use support::paint::{CYCLE, Canvas, Paint};
use support::record::{Records, figure, micros, timing_fields};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::gpu::Gpu;
use wgpu_mla::{
    Batch, BlockTable, Capacity, DecodeOptions, Device, Dtype, KvSpec, KvView, MlaDecode, MlaDecodeArgs,
    MlaShape, PagePool, Plan, SplitPolicy,
};

const PAGE_SIZE: u32 = 64;
const SOFTMAX_SCALE: f32 = 0.114_721;
/// What the sequences of a pool fill.
const POOL_BYTES: u64 = 24 << 30;
/// A slab is no larger, whatever the device allows.
const SLAB_BYTES: u64 = 2 << 30;

#[derive(Clone, Copy)]
struct Shape {
    heads: u32,
    kv: Dtype,
    sequences: u32,
    tokens: u32,
}

impl Shape {
    fn name(&self) -> String {
        format!("H{} kv {} b{}x{}", self.heads, self.kv, self.sequences, self.tokens)
    }

    fn spec(&self) -> MlaDecode {
        MlaDecode {
            shape: MlaShape { num_heads: self.heads, kv_lora_rank: 512, qk_rope_head_dim: 64 },
            kv: KvSpec {
                layout: self.kv.into(),
                page_size: PAGE_SIZE,
                num_pages: self.sequences * self.tokens.div_ceil(PAGE_SIZE),
            },
            query: Dtype::Bf16,
            out: Dtype::Bf16,
        }
    }

    fn kv_bytes(&self) -> f64 {
        f64::from(self.sequences)
            * f64::from(self.tokens)
            * (self.spec().slab_bytes(1) / u64::from(PAGE_SIZE)) as f64
    }
}

fn shapes(args: &Args) -> Vec<Shape> {
    let tokens = if args.test { 512 } else { 1 << 20 };
    let of = |kv: Dtype| {
        let sequence = u64::from(tokens) * 576 * kv.bytes() as u64;
        let sequences = if args.test { 3 } else { (POOL_BYTES / sequence) as u32 };
        Shape { heads: 16, kv, sequences, tokens }
    };
    [of(Dtype::Bf16), of(Dtype::E4m3)].into_iter().filter(|shape| args.wants(&shape.name())).collect()
}

fn main() -> Result<()> {
    let args = Args::parse();
    match args.backend.as_str() {
        "wgpu" => table(&Gpu::new()?, &args),
        "cpu" => table(&args.threads.map_or_else(Cpu::new, Cpu::with_threads), &args),
        #[cfg(feature = "cuda")]
        "cuda" => table(&wgpu_mla::cuda::Cuda::new(0)?, &args),
        other => Err(format!("--backend {other}: wgpu or cpu, or cuda with that feature").into()),
    }
}

fn table<D: Timed>(device: &D, args: &Args) -> Result<()> {
    let shapes = shapes(args);
    if args.list {
        shapes.iter().for_each(|shape| println!("{}", shape.name()));
        return Ok(());
    }
    let (ceiling, bytes) = device.ceiling(Kind::Read, args.test)?;
    let mut records = Records::new("slabs", device.facts());
    records.note("read_ceiling_gb_s", ceiling);
    records.note("read_ceiling_bytes", bytes);
    println!(
        "# Pools in slabs on {}\n\nus: device time of decode + merge. Ceiling: share of this run's read ceiling, {} GB/s. One binding: as many of \
         the sequences as fit one. Per token: time a token in slabs over that in one binding.\n",
        device.name(),
        figure(ceiling)
    );
    println!(
        "| workload | variant | slabs | us | min | KV GB/s | ceiling | one binding: us | per token | checked |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for shape in &shapes {
        if let Err(error) = time(device, shape, args, ceiling, &mut records) {
            records.fail(&shape.name(), error.as_ref());
        }
    }
    records.save(args.json.as_deref())
}

fn time<D: Timed>(device: &D, shape: &Shape, args: &Args, ceiling: f64, records: &mut Records) -> Result<()> {
    let limit = device.largest_binding().min(SLAB_BYTES);
    let slab_pages = if args.test { 7 } else { shape.spec().slab_pages(limit) };
    let problem = Problem::new(device, shape, slab_pages, args)?;
    problem.layers.run_first()?;
    let checked = problem.check(device, args)?;
    let timing = device.time(args.replays(), |recorder, call| problem.layers.record(recorder, call))?;
    let slabs = shape.spec().kv.num_slabs(slab_pages)?;
    let variant = problem.layers.op.variant();
    drop(problem);

    let sequence_pages = shape.tokens.div_ceil(PAGE_SIZE);
    let one = Shape { sequences: (slab_pages / sequence_pages).clamp(1, shape.sequences), ..*shape };
    let whole = one.spec().kv.num_pages;
    let one_problem = Problem::new(device, &one, whole, args)?;
    let one_timing =
        device.time(args.replays(), |recorder, call| one_problem.layers.record(recorder, call))?;
    let per_token = |timing: &Timing, shape: &Shape| timing.median / shape.kv_bytes();
    let ratio = per_token(&timing, shape) / per_token(&one_timing, &one);

    let rate = shape.kv_bytes() / timing.median / 1e9;
    let us = |seconds: f64| micros(seconds * 1e6);
    print!("| {} | {variant} | {slabs} | {} | {} ", shape.name(), us(timing.median), us(timing.min));
    print!(
        "| {} | {} % | {} x: {} ",
        figure(rate),
        figure(rate / ceiling * 100.0),
        one.sequences,
        us(one_timing.median)
    );
    println!("| {ratio:.3} | {checked} |");
    let mut record = json!({
        "workload": shape.name(), "variant": variant, "slabs": slabs, "slab_pages": slab_pages, "gb_s": rate, "share": rate / ceiling,
        "one_binding_sequences": one.sequences, "one_binding_us": one_timing.median * 1e6, "per_token_ratio": ratio, "checked": checked,
    });
    if let Some(fields) = record.as_object_mut() {
        fields.extend(timing_fields(&timing));
    }
    records.add(record);
    Ok(())
}

/// One layer whose pool is in slabs, each of which holds the same paint from its front.
struct Problem<D: Timed> {
    shape: Shape,
    slab_pages: u32,
    layers: Layers<MlaDecode, D>,
    table: BlockTable,
    paint: Paint,
    out: D::Buffer,
    lse: D::Buffer,
}

impl<D: Timed> Problem<D> {
    fn new(device: &D, shape: &Shape, slab_pages: u32, args: &Args) -> Result<Self> {
        let spec = shape.spec();
        let paint = Paint::new(shape.kv);
        let page = u64::from(PAGE_SIZE * spec.shape.row_elems());
        let pages_of = |slab: u32| slab_pages.min(spec.kv.num_pages - slab * slab_pages);
        let slabs = (0..spec.kv.num_slabs(slab_pages)?)
            .map(|slab| device.painted(&paint, u64::from(pages_of(slab)) * page));
        let slabs = slabs.collect::<Result<Vec<_>>>()?;
        let q = query(device, shape)?;
        let [out, lse] = [spec.out_bytes(shape.sequences), spec.lse_bytes(shape.sequences)]
            .map(|bytes| device.buffer(bytes));
        let (out, lse) = (out?, lse?);

        let mut pool = PagePool::in_slabs(spec.kv, slab_pages)?;
        let seqs: Vec<_> = (0..shape.sequences).map(|_| pool.add()).collect();
        for &seq in &seqs {
            pool.append(seq, shape.tokens)?;
        }
        let table = pool.block_table(&seqs, -1)?;
        let (lens, starts) = lengths(shape);
        let options = DecodeOptions { variant: args.variant.clone(), ..Default::default() };
        let decode = device.compile_with(spec, &options)?;
        let batch = Batch { slabs: Some(table.slab_table()), ..Batch::new(&lens, &starts) };
        let plan = Plan::new(&spec, &decode.tiling(), &batch, SplitPolicy::Auto)?;
        let kv = KvView::in_slabs(&slabs.iter().collect::<Vec<_>>(), &spec, slab_pages, 0)?;
        let args =
            MlaDecodeArgs { kv, ..MlaDecodeArgs::dense(&spec, &q, &slabs[0], &out, &lse, SOFTMAX_SCALE) };
        let layers = Layers::new(decode, Capacity::of(&plan), (&plan, table.page_table()), [args])?;
        Ok(Self { shape: *shape, slab_pages, layers, table, paint, out, lse })
    }

    /// Compares with another device, over one buffer.
    fn check(&self, device: &D, args: &Args) -> Result<String> {
        #[cfg(feature = "cuda")]
        if !args.test
            && let Ok(cuda) = wgpu_mla::cuda::Cuda::new(0)
        {
            return self.check_with(device, &cuda, "CUDA");
        }
        if args.test {
            return self.check_with(device, &Cpu::new(), "CPU");
        }
        Ok("not checked: no CUDA here".into())
    }

    fn check_with<E: Canvas>(&self, device: &D, other: &E, name: &str) -> Result<String> {
        let (shape, spec) = (&self.shape, self.shape.spec());
        let kv = other.buffer(spec.cache_bytes())?;
        for slab in (0..spec.cache_bytes()).step_by(spec.slab_bytes(self.slab_pages) as usize) {
            let end = (slab + spec.slab_bytes(self.slab_pages)).min(spec.cache_bytes());
            for begin in (slab..end).step_by(self.paint.codes.len()) {
                let length = (end - begin).min(self.paint.codes.len() as u64) as usize;
                other.upload(&kv, begin, &self.paint.codes[..length])?;
            }
        }
        let q = query(other, shape)?;
        let [out_bytes, lse_bytes] = [spec.out_bytes(shape.sequences), spec.lse_bytes(shape.sequences)];
        let (out, lse) = (other.buffer(out_bytes)?, other.buffer(lse_bytes)?);
        let decode = other.compile(spec)?;
        let (lens, starts) = lengths(shape);
        let plan = Plan::new(&spec, &decode.tiling(), &Batch::new(&lens, &starts), SplitPolicy::Auto)?;
        let mut step = decode.step(Capacity::of(&plan))?;
        decode.prepare(&mut step, (&plan, self.table.page_table()))?;
        let bound =
            decode.bind(&MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, SOFTMAX_SCALE), shape.sequences)?;
        decode.run(&step, &bound)?;
        let wide = |bytes: &[u8], dtype: Dtype| -> Vec<f64> {
            dtype.decode_all(bytes).into_iter().map(f64::from).collect()
        };
        let want = wide(&other.download(&out, out_bytes)?, spec.out);
        let want_lse = wide(&other.download(&lse, lse_bytes)?, Dtype::F32);
        let got = spec.out.decode_all(&device.download(&self.out, out_bytes)?);
        let got_lse = Dtype::F32.decode_all(&device.download(&self.lse, lse_bytes)?);
        let tolerance = Tolerance::decode(shape.kv, spec.query, spec.out, true, 1.0, 512);
        let report = close("out", &got, &want, &tolerance).into_result()?;
        close("lse", &got_lse, &want_lse, &Tolerance::lse()).into_result()?;
        Ok(format!("with {name}: {:.1e} ({:.1} % of allowed)", report.worst_abs, 100.0 * report.worst_ratio))
    }
}

fn lengths(shape: &Shape) -> (Vec<i32>, Vec<i32>) {
    (vec![shape.tokens as i32; shape.sequences as usize], (0..=shape.sequences as i32).collect())
}

/// Values that no row of the cache resembles: else a single key took all the weight.
fn query<D: Device>(device: &D, shape: &Shape) -> Result<D::Buffer> {
    let paint = Paint::query(Dtype::Bf16);
    let count = u64::from(shape.sequences * shape.heads * shape.spec().shape.row_elems());
    let at = |i: u64| ((i * 5 + 77) % CYCLE as u64) as usize * 2;
    let codes: Vec<u8> = (0..count).flat_map(|i| &paint.codes[at(i)..][..2]).copied().collect();
    let buffer = device.buffer(codes.len() as u64)?;
    device.upload(&buffer, 0, &codes)?;
    Ok(buffer)
}
