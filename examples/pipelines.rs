//! Compiles every pipeline that this device could be asked for, and says how long each took.
//!
//! ```text
//! cargo run --release --example pipelines -- [--all] [--only PART,PART...]... [--list] [--markers]
//! ```
//! Without options each pair of query and cache dtypes is compiled with one output dtype, and at most 16 samples of an op; `--all` takes
//! every one. `--only` keeps the pipelines whose line contains one of the parts, and may be repeated; `--list` compiles none.
//! `--markers` writes a line to stderr before each compile, for drivers that print statistics there:
//! `scripts/vendors.sh` reads them.
//! Status 0: all compiled; 1: one did not, or there is no adapter; 2: bad arguments.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Instant;

use wgpu_mla::gpu::{Gpu, ops::BatchTables};
use wgpu_mla::{
    Candidate, DecodeOptions, Device, Dtype, HeadDims, HeadProject, Kernel, KvLayout, KvSpec, MlaDecode,
    MlaPrefill, MlaShape, Op, OpOptions, PrefillOptions, SUPPORTED_DIMS, for_each_op,
};

const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

type Compile = dyn Fn(&Gpu) -> wgpu_mla::Result<()>;

/// One call that compiles an op.
struct Job {
    /// `chosen` or `offered`, the shape, the variant or the op, the dtypes.
    name: String,
    compile: Box<Compile>,
}

impl Job {
    fn new<O: Op + 'static>(name: String, op: O, options: O::Options) -> Self
    where
        Gpu: Kernel<O>,
        O::Options: 'static,
    {
        Self { name, compile: Box::new(move |gpu| gpu.compile_with(op, &options).map(drop)) }
    }

    /// An op of one kernel, or in the variant that it gets.
    fn of<O: Op + 'static>(about: String, op: O) -> Self
    where
        Gpu: Kernel<O>,
        O::Options: 'static,
    {
        Self::new(format!("chosen any {} {about}", O::NAME), op, O::Options::default())
    }
}

/// The variants of an op that run, and whether each is `chosen` or merely `offered`.
fn variants<O: Op>(gpu: &Gpu, op: O) -> impl Iterator<Item = (&'static str, &'static str)>
where
    Gpu: Kernel<O>,
{
    let running = gpu.variants(&op).into_iter().filter(|one| one.lacks.is_none());
    running.map(|one| (one.name, if one.chosen { "chosen" } else { "offered" }))
}

/// Every shape with the head counts of one and of more than one tile, every variant that runs, every pair of dtypes.
fn decodes(gpu: &Gpu, all: bool) -> Vec<Job> {
    let mut jobs = Vec::new();
    for (dims, heads) in SUPPORTED_DIMS.into_iter().flat_map(|dims| [(dims, 16), (dims, 20)]) {
        // The other dims have the same variants in the same tiles.
        if heads == 20 && (dims.0, dims.1) != (512, 64) {
            continue;
        }
        for query in Dtype::ALL {
            for cache in Dtype::ALL {
                let usual = if query == Dtype::E4m3 { Dtype::Bf16 } else { query };
                for out in FLOATS.into_iter().filter(|&out| all || out == usual) {
                    let spec = MlaDecode {
                        shape: MlaShape { num_heads: heads, kv_lora_rank: dims.0, qk_rope_head_dim: dims.1 },
                        kv: kv(cache),
                        query,
                        out,
                    };
                    jobs.extend(decode(gpu, spec, DecodeOptions::default()));
                    if query == cache && out == usual {
                        let options = DecodeOptions { device_page_list: true, ..DecodeOptions::default() };
                        jobs.extend(decode(gpu, spec, options));
                    }
                }
            }
        }
    }
    // Records in a tile of 16 rows and in one of 32.
    for (num_heads, topk) in [(16, 0), (16, 64), (20, 64)] {
        let shape = MlaShape { num_heads, kv_lora_rank: 512, qk_rope_head_dim: 64 };
        let kv = KvSpec { layout: KvLayout::Ds656, ..kv(Dtype::E4m3) };
        let spec = MlaDecode { shape, kv, query: Dtype::Bf16, out: Dtype::Bf16 };
        jobs.extend(decode(gpu, spec, DecodeOptions { topk, ..DecodeOptions::default() }));
    }
    jobs
}

fn decode(gpu: &Gpu, spec: MlaDecode, options: DecodeOptions) -> impl Iterator<Item = Job> {
    variants(gpu, spec).map(move |(variant, chosen)| {
        let MlaShape { num_heads, kv_lora_rank, qk_rope_head_dim } = spec.shape;
        let clamp = if options.device_page_list { " device_page_list" } else { "" };
        let lists = if options.topk > 0 { " lists" } else { "" };
        let name = format!(
            "{chosen} {kv_lora_rank}/{qk_rope_head_dim}x{num_heads} {variant} q_{}.kv_{}.out_{}{clamp}{lists}",
            spec.query, spec.kv.layout, spec.out
        );
        Job::new(name, spec, DecodeOptions { variant: Some(variant.into()), ..options.clone() })
    })
}

/// Each variant that runs, for the dims of DeepSeek V3; with `--all` for the largest, whose `shared` variant spills on an Apple M1.
fn prefills(gpu: &Gpu, all: bool) -> Vec<Job> {
    let mut jobs = Vec::new();
    for [p, r, v] in [[128, 64, 128], [192, 64, 256]].into_iter().take(if all { 2 } else { 1 }) {
        for dtype in FLOATS {
            let spec = MlaPrefill {
                num_heads: 16,
                qk_nope_head_dim: p,
                qk_rope_head_dim: r,
                v_head_dim: v,
                dtype,
                out: dtype,
            };
            jobs.extend(variants(gpu, spec).map(|(variant, chosen)| {
                let name = format!("{chosen} {p}/{r}/{v} {variant} mla_prefill {dtype}");
                let variant = Some(variant.into());
                Job::new(name, spec, PrefillOptions { variant, ..PrefillOptions::default() })
            }));
        }
    }
    jobs
}

/// The samples of every op of one kernel, and the tables of a batch.
fn small_ops(all: bool) -> Vec<Job> {
    let mut jobs = Vec::new();
    macro_rules! add {
        ($($op:ty),*) => { $(jobs.extend(samples::<$op>(all));)* };
    }
    for_each_op!(add);
    let cache = kv(Dtype::E4m3);
    jobs.push(Job {
        name: format!("chosen any batch_tables page_size {}", cache.page_size),
        compile: Box::new(move |gpu| BatchTables::new(gpu, cache).map(drop)),
    });
    jobs
}

/// Ops whose variants have jobs of their own.
const IN_VARIANTS: [&str; 3] = [MlaDecode::NAME, MlaPrefill::NAME, HeadProject::NAME];
/// The most samples of an op without `--all`.
const MOST_SAMPLES: usize = 16;

/// Each is named by what tells it from the others.
fn samples<O: Op>(all: bool) -> Vec<Job>
where
    Gpu: Kernel<O>,
    O::Options: 'static,
{
    if IN_VARIANTS.contains(&O::NAME) {
        return Vec::new();
    }
    let samples = O::samples();
    let step = if all { 1 } else { samples.len().div_ceil(MOST_SAMPLES) };
    let fields: Vec<_> = samples.iter().map(fields).collect();
    let about = |of: &[(String, String)]| {
        // A spec with an optional part has more fields than one without.
        let own = of.iter().filter(|field| fields.iter().any(|other| !other.contains(field)));
        let text = own.map(|(name, value)| match value.parse::<u64>() {
            Ok(_) => format!("{name} {value}"),
            Err(_) => value.to_lowercase(),
        });
        text.collect::<Vec<_>>().join(" ")
    };
    samples.iter().zip(&fields).step_by(step).map(|(&op, of)| Job::of(about(of), op)).collect()
}

/// Names and values of a spec, as `Debug` prints them.
fn fields(spec: &impl std::fmt::Debug) -> Vec<(String, String)> {
    let mut fields: Vec<(String, String)> = Vec::new();
    for word in format!("{spec:?}").split([' ', ',', '{', '}', '(', ')']).filter(|word| !word.is_empty()) {
        match (word.strip_suffix(':'), fields.last_mut()) {
            (Some(name), _) => fields.push((name.into(), String::new())),
            (None, Some((_, value))) => *value = word.into(),
            // The op.
            (None, None) => {}
        }
    }
    fields
}

/// absorb and v_up of DeepSeek-V3's dims on 8 devices, on every variant that runs.
fn projections(gpu: &Gpu) -> Vec<Job> {
    let dims = HeadDims { num_heads: 16, kv_lora_rank: 512, qk_nope_head_dim: 128, v_head_dim: 128 };
    let mut jobs = Vec::new();
    for input in FLOATS {
        for weight in FLOATS.into_iter().chain([Dtype::E4m3]) {
            for spec in [HeadProject::absorb, HeadProject::v_up].map(|of| of(&dims, input, weight, input)) {
                let HeadProject { k, n, order, .. } = spec;
                jobs.extend(variants(gpu, spec).map(|(variant, chosen)| {
                    let dtypes = format!("x_{input}.w_{weight}.y_{input}");
                    let name = format!("{chosen} any head_project {variant} {k}x{n} {order:?} {dtypes}");
                    Job::new(name, spec, OpOptions { variant: Some(variant.into()) })
                }));
            }
        }
    }
    jobs
}

fn kv(dtype: Dtype) -> KvSpec {
    KvSpec { layout: dtype.into(), page_size: 64, num_pages: 64 }
}

/// Passes on what the crate logs about each shader that it compiles.
struct Markers;

impl log::Log for Markers {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.target().starts_with("wgpu_mla::gpu::pipelines")
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            eprintln!("@@ {}", record.args());
        }
    }

    fn flush(&self) {}
}

#[derive(Default)]
struct Args {
    all: bool,
    only: Vec<String>,
    list: bool,
    markers: bool,
}

impl Args {
    fn keeps(&self, name: &str) -> bool {
        self.only.iter().all(|parts| parts.split(',').any(|part| name.contains(part)))
    }
}

fn parse(words: impl Iterator<Item = OsString>) -> Result<Args, String> {
    let text = |word: OsString| word.into_string().map_err(|word| format!("{word:?}: must be UTF-8"));
    let mut words = words.map(text).collect::<Result<Vec<_>, _>>()?.into_iter();
    let mut args = Args::default();
    while let Some(word) = words.next() {
        match word.as_str() {
            "--all" => args.all = true,
            "--only" => args.only.push(words.next().ok_or("--only needs a part of a line")?),
            "--list" => args.list = true,
            "--markers" => args.markers = true,
            _ => {
                return Err(format!(
                    "{word}: no such option; there are --all, --only PART, --list, --markers"
                ));
            }
        }
    }
    Ok(args)
}

fn main() -> ExitCode {
    let args = match parse(std::env::args_os().skip(1)) {
        Ok(args) => args,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    let gpu = match Gpu::new() {
        Ok(gpu) => gpu,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    if args.markers && log::set_logger(&Markers).is_ok() {
        log::set_max_level(log::LevelFilter::Debug);
    }
    println!("adapter: {}", gpu.describe());
    println!("caps:    {:?}", gpu.caps());
    for cache in Dtype::ALL {
        println!("why:     {cache} cache: {}", why(&gpu, cache));
    }

    let mut jobs = decodes(&gpu, args.all);
    jobs.extend(small_ops(args.all));
    jobs.extend(prefills(&gpu, args.all));
    jobs.extend(projections(&gpu));
    jobs.retain(|job| args.keeps(&job.name));
    let (start, mut failed) = (Instant::now(), 0);
    for job in &jobs {
        let name = &job.name;
        if args.list {
            println!("{name}");
            continue;
        }
        if args.markers {
            eprintln!("@@ pipeline {name}");
        }
        let before = Instant::now();
        let done = (job.compile)(&gpu);
        let ms = before.elapsed().as_secs_f64() * 1e3;
        match done {
            Ok(()) => println!("{ms:8.1} ms  {name}"),
            Err(error) => {
                failed += 1;
                println!("    FAILED  {name}: {error}");
            }
        }
    }
    println!("{} of {} compiled in {:.1} s", jobs.len() - failed, jobs.len(), start.elapsed().as_secs_f64());
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Which variant a decode of 16 heads with an f16 query and that cache gets, and what better ones lack.
fn why(gpu: &Gpu, cache: Dtype) -> String {
    let shape = MlaShape { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64 };
    let spec = MlaDecode { shape, kv: kv(cache), query: Dtype::F16, out: Dtype::F16 };
    let told = |Candidate { name, lacks, .. }| lacks.map_or(name.into(), |why| format!("not {name}: {why}"));
    gpu.variants(&spec).into_iter().map(told).collect::<Vec<String>>().join("; ")
}
