//! Compiles every pipeline that this device could be asked for, and says how long each took.
//!
//! ```text
//! cargo run --release --example pipelines -- [--all] [--only TEXT,TEXT...]... [--list] [--markers]
//! ```
//! Without options each pair of query and cache dtypes is compiled with one output dtype; `--all` takes every one.
//! `--only` keeps the pipelines whose line contains one of the texts, and may be repeated; `--list` compiles none.
//! `--markers` writes a line to stderr before each compile, for drivers that print statistics there:
//! `scripts/vendors.sh` reads them.
//! Status 0: all compiled; 1: one did not, or there is no adapter; 2: bad arguments.

use std::process::ExitCode;
use std::time::Instant;

use wgpu_mla::gpu::ops::{
    BatchTables, CopySpec, HeadProject, KvAppend, KvCalibrate, KvCopyPages, KvGather, MergeAttnStates,
    MergeStateSets, MlaPrefill, Rotate, RotateAppend,
};
use wgpu_mla::gpu::{Gpu, MlaDecode, Options};
use wgpu_mla::{
    AppendSpec, Backend, CalibrateSpec, Dtype, GatherSpec, HeadDims, KvSpec, MergeStatesSpec, MlaShape,
    MlaSpec, PrefillSpec, ProjectSpec, RopeAppendSpec, RopeLayout, RopeSpec, SUPPORTED_DIMS,
};

const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

/// One call that compiles: a decode's pipelines, or those of a small op.
#[derive(Clone)]
enum Job {
    Decode { spec: MlaSpec, variant: &'static str, chosen: bool, device_page_list: bool },
    MergeStates(MergeStatesSpec),
    MergeSets(MergeStatesSpec),
    Append(AppendSpec),
    Copy(CopySpec),
    Rope(RopeSpec),
    RopeAppend(RopeAppendSpec),
    Prefill { spec: PrefillSpec, row: &'static str, chosen: bool },
    Gather(GatherSpec),
    Calibrate(CalibrateSpec),
    Tables(KvSpec),
    Project { spec: ProjectSpec, variant: &'static str, chosen: bool },
}

impl Job {
    fn compile(&self, gpu: &Gpu) -> wgpu_mla::Result<()> {
        let pipelines = &gpu.pipelines;
        match self {
            Self::Decode { spec, variant, device_page_list, .. } => {
                let (variant, device_page_list) = (Some((*variant).into()), *device_page_list);
                let options = Options { variant, device_page_list, ..Options::default() };
                MlaDecode::new(pipelines, spec, &options).map(drop)
            }
            Self::MergeStates(spec) => MergeAttnStates::new(pipelines, *spec).map(drop),
            Self::MergeSets(spec) => MergeStateSets::new(pipelines, *spec).map(drop),
            Self::Append(spec) => KvAppend::new(pipelines, *spec).map(drop),
            Self::Copy(spec) => KvCopyPages::new(pipelines, *spec).map(drop),
            Self::Rope(spec) => Rotate::new(pipelines, *spec).map(drop),
            Self::RopeAppend(spec) => RotateAppend::new(pipelines, *spec).map(drop),
            Self::Prefill { spec, row, .. } => {
                MlaPrefill::with_variant(pipelines, *spec, Some(row)).map(drop)
            }
            Self::Gather(spec) => KvGather::new(pipelines, *spec).map(drop),
            Self::Calibrate(spec) => KvCalibrate::new(pipelines, *spec).map(drop),
            Self::Tables(kv) => BatchTables::new(pipelines, *kv).map(drop),
            Self::Project { spec, variant, .. } => {
                HeadProject::with_variant(pipelines, *spec, Some(variant)).map(drop)
            }
        }
    }

    /// `chosen` or `offered`, the shape, the row or the op, the dtypes.
    fn name(&self) -> String {
        match self {
            Self::Decode { spec, variant, chosen, device_page_list } => {
                let MlaShape { num_heads, kv_lora_rank, qk_rope_head_dim } = spec.shape;
                let chosen = if *chosen { "chosen" } else { "offered" };
                let clamp = if *device_page_list { " device_page_list" } else { "" };
                format!(
                    "{chosen} {kv_lora_rank}/{qk_rope_head_dim}x{num_heads} {variant} q_{}.kv_{}.out_{}{clamp}",
                    spec.query, spec.kv.dtype, spec.out
                )
            }
            Self::MergeSets(spec) => {
                format!("chosen any merge_states {} head_size {}", spec.dtype, spec.head_size)
            }
            Self::MergeStates(spec) => {
                format!("chosen any merge_attn_states {} head_size {}", spec.dtype, spec.head_size)
            }
            Self::Append(spec) => format!("chosen any kv_append {} into {}", spec.input, spec.kv.dtype),
            Self::Copy(spec) => {
                format!("chosen any kv_copy_pages {} rows of {}", spec.kv.dtype, spec.row_elems)
            }
            Self::Rope(spec) => format!("chosen any rope {}", spec.dtype),
            Self::RopeAppend(RopeAppendSpec { append, .. }) => {
                format!("chosen any rope_append {} into {}", append.input, append.kv.dtype)
            }
            Self::Prefill { spec, row, chosen } => {
                let [p, r, v] = [spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim];
                let chosen = if *chosen { "chosen" } else { "offered" };
                format!("{chosen} {p}/{r}/{v} {row} mla_prefill {}", spec.dtype)
            }
            Self::Gather(spec) => format!("chosen any kv_gather {} to {}", spec.kv.dtype, spec.output),
            Self::Calibrate(spec) => format!("chosen any kv_calibrate {}", spec.input),
            Self::Tables(kv) => format!("chosen any batch_tables page_size {}", kv.page_size),
            Self::Project {
                spec: ProjectSpec { input, weight, output, k, n, order, .. },
                variant,
                chosen,
            } => {
                let chosen = if *chosen { "chosen" } else { "offered" };
                format!(
                    "{chosen} any head_project {variant} {k}x{n} {order:?} x_{input}.w_{weight}.y_{output}"
                )
            }
        }
    }
}

/// Every shape with the head counts of one and of more than one tile, every row that runs, every pair of dtypes.
fn decodes(gpu: &Gpu, all: bool) -> Vec<Job> {
    let mut jobs = Vec::new();
    for (dims, heads) in SUPPORTED_DIMS.into_iter().flat_map(|dims| [(dims, 16), (dims, 20)]) {
        // The other dims have the same rows in the same tiles.
        if heads == 20 && (dims.0, dims.1) != (512, 64) {
            continue;
        }
        for query in Dtype::ALL {
            for cache in Dtype::ALL {
                let usual = if query == Dtype::E4m3 { Dtype::Bf16 } else { query };
                for out in FLOATS.into_iter().filter(|&out| all || out == usual) {
                    let spec = MlaSpec {
                        shape: MlaShape { num_heads: heads, kv_lora_rank: dims.0, qk_rope_head_dim: dims.1 },
                        kv: kv(cache),
                        query,
                        out,
                    };
                    let device_page_list = query == cache && out == usual;
                    jobs.extend(rows(gpu, spec, false));
                    if device_page_list {
                        jobs.extend(rows(gpu, spec, true));
                    }
                }
            }
        }
    }
    jobs
}

fn rows(gpu: &Gpu, spec: MlaSpec, device_page_list: bool) -> impl Iterator<Item = Job> {
    // The first that runs is the one that a decode gets.
    let job = move |(at, variant)| Job::Decode { spec, variant, chosen: at == 0, device_page_list };
    gpu.variants(&spec).into_iter().enumerate().map(job)
}

/// Each row that runs, for the dims of DeepSeek V3; with `--all` for the largest, whose `shared` row spills on an Apple M1.
fn prefills(gpu: &Gpu, all: bool) -> Vec<Job> {
    let mut jobs = Vec::new();
    for [p, r, v] in [[128, 64, 128], [192, 64, 256]].into_iter().take(if all { 2 } else { 1 }) {
        for dtype in FLOATS {
            let spec = PrefillSpec {
                num_heads: 16,
                qk_nope_head_dim: p,
                qk_rope_head_dim: r,
                v_head_dim: v,
                dtype,
                out: dtype,
            };
            let rows = gpu.prefill_variants(&spec).into_iter().enumerate();
            jobs.extend(rows.map(|(at, row)| Job::Prefill { spec, row: row.name, chosen: at == 0 }));
        }
    }
    jobs
}

fn small_ops() -> Vec<Job> {
    let mut jobs = Vec::new();
    for dtype in FLOATS {
        // Rows of whole words only, and rows that end in half a word.
        jobs.extend([128, 33].map(|head_size| Job::MergeStates(MergeStatesSpec { dtype, head_size })));
        jobs.push(Job::MergeSets(MergeStatesSpec { dtype, head_size: 128 }));
        let shape = MlaShape { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64 };
        let append = |cache| Job::Append(AppendSpec { shape, kv: kv(cache), input: dtype });
        jobs.extend(Dtype::ALL.map(append));
        // In place and not.
        let layout = RopeLayout::Interleaved;
        jobs.push(Job::Rope(RopeSpec { dtype, num_heads: 16, rope_dim: 64, layout }));
        let rope = |cache| {
            let append = AppendSpec { shape, kv: kv(cache), input: dtype };
            Job::RopeAppend(RopeAppendSpec { append, query: dtype, num_heads: 16, layout })
        };
        jobs.extend([dtype, Dtype::E4m3].map(rope));
        let gather = |cache| Job::Gather(GatherSpec { shape, kv: kv(cache), output: dtype });
        jobs.extend(Dtype::ALL.map(gather));
        jobs.push(Job::Calibrate(CalibrateSpec { shape, input: dtype }));
        if dtype == Dtype::F32 {
            let codes = kv(Dtype::E4m3);
            jobs.push(Job::Gather(GatherSpec { shape, kv: codes, output: Dtype::E4m3 }));
            jobs.push(Job::Tables(codes));
        }
    }
    jobs.extend(Dtype::ALL.map(|cache| Job::Copy(CopySpec { kv: kv(cache), row_elems: 576 })));
    jobs
}

/// absorb and v_up of DeepSeek-V3's dims on 8 devices, on every row that runs.
fn projections(gpu: &Gpu) -> Vec<Job> {
    let dims = HeadDims { num_heads: 16, kv_lora_rank: 512, qk_nope_head_dim: 128, v_head_dim: 128 };
    let mut jobs = Vec::new();
    for input in FLOATS {
        for weight in FLOATS {
            for spec in [ProjectSpec::absorb, ProjectSpec::v_up].map(|of| of(&dims, input, weight, input)) {
                let rows = HeadProject::rows(&gpu.pipelines, &spec);
                jobs.extend(rows.into_iter().map(|(variant, chosen)| Job::Project { spec, variant, chosen }));
            }
        }
    }
    jobs
}

fn kv(dtype: Dtype) -> KvSpec {
    KvSpec { dtype, page_size: 64, num_pages: 64 }
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
        self.only.iter().all(|texts| texts.split(',').any(|text| name.contains(text)))
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Args, String> {
    let mut args = Args::default();
    while let Some(word) = words.next() {
        match word.as_str() {
            "--all" => args.all = true,
            "--only" => args.only.push(words.next().ok_or("--only needs a text")?),
            "--list" => args.list = true,
            "--markers" => args.markers = true,
            _ => {
                return Err(format!(
                    "{word}: no such option; there are --all, --only TEXT, --list, --markers"
                ));
            }
        }
    }
    Ok(args)
}

fn main() -> ExitCode {
    let args = match parse(std::env::args().skip(1)) {
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
    println!("caps:    {:?}", gpu.pipelines.caps());
    for cache in Dtype::ALL {
        println!("why:     {cache} cache: {}", why(&gpu, cache));
    }

    let mut jobs = decodes(&gpu, args.all);
    jobs.extend(small_ops());
    jobs.extend(prefills(&gpu, args.all));
    jobs.extend(projections(&gpu));
    jobs.retain(|job| args.keeps(&job.name()));
    let (start, mut failed) = (Instant::now(), 0);
    for job in &jobs {
        let name = job.name();
        if args.list {
            println!("{name}");
            continue;
        }
        if args.markers {
            eprintln!("@@ pipeline {name}");
        }
        let before = Instant::now();
        let done = job.compile(&gpu);
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

/// Which row a decode of 16 heads with an f16 query and that cache gets, and what better ones lack.
fn why(gpu: &Gpu, cache: Dtype) -> String {
    let shape = MlaShape { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64 };
    let spec = MlaSpec { shape, kv: kv(cache), query: Dtype::F16, out: Dtype::F16 };
    let ladder = gpu.ladder(&spec).into_iter();
    let rows =
        ladder.map(|(row, lacks)| lacks.map_or_else(|| row.to_owned(), |why| format!("not {row}: {why}")));
    rows.collect::<Vec<_>>().join("; ")
}
