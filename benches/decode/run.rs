//! The table: each workload checked, timed, and set beside the peers.

use std::time::Instant;

use serde_json::{Value, json};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::gpu::Gpu;
use wgpu_mla::{Backend, Batch, Dtype, PageTable, Plan, Policy};

use super::problem::{Pool, Problem};
use super::serving;
use super::workload::{Ratio, Workload, full, small, tiny};
use crate::support::args::Args;
use crate::support::ceiling::Kind;
use crate::support::clock::{Clock, Passes, Timing, is_small, is_software};
use crate::support::device::Device;
use crate::support::paint::Canvas;
use crate::support::record::{Records, figure, micros, timing_fields};
use crate::support::{Result, median, peers};

/// Bytes that the caches of all layers have together, at least: more than any card's L2.
pub const ROTATED_BYTES: f64 = 600e6;

pub fn run(args: &Args) -> Result<()> {
    let gpu = match args.backend.as_str() {
        "wgpu" => Some(Gpu::new()?),
        "cpu" => None,
        "cuda" if cfg!(feature = "cuda") => None,
        other => return Err(format!("--backend {other}: wgpu or cpu, or cuda with that feature").into()),
    };
    let table = match &gpu {
        _ if args.test => tiny(),
        None if args.backend == "cuda" => full(),
        Some(gpu) if args.full || !is_small(gpu) => full(),
        _ => small(),
    };
    let table: Vec<Workload> = table.into_iter().filter(|w| args.wants(&w.name())).collect();
    if args.list {
        table.iter().for_each(|workload| println!("{}", workload.name()));
        serving::shapes(gpu.as_ref(), args).iter().for_each(|shape| println!("{}", shape.name()));
        return Ok(());
    }
    match &gpu {
        Some(gpu) => run_gpu(gpu, &table, args),
        #[cfg(feature = "cuda")]
        None if args.backend == "cuda" => super::cuda::run(&table, args),
        None => run_cpu(&table, args),
    }
}

fn run_cpu(table: &[Workload], args: &Args) -> Result<()> {
    let cpu = args.threads.map_or_else(Cpu::new, Cpu::with_threads);
    let mut report = Report::new(&cpu.name(), json!({ "name": "CPU" }), f64::NAN);
    for workload in table.iter().filter(|workload| !workload.plain) {
        let pool = Pool::new(&cpu, workload.kv, workload.layer_elems())?;
        let problem = Problem::new(&cpu, &pool, workload, args.variant.as_deref(), args.items, 1)?;
        let row = args.variant.clone().unwrap_or_else(|| cpu.variants(&problem.spec)[0].into());
        let right = problem.check(&cpu)?;
        let mut times = Vec::new();
        for _ in 0..args.replays.unwrap_or(if args.test { 3 } else { 201 }) {
            let begin = Instant::now();
            cpu.run(&problem.decode, &problem.step, &problem.bindings[0])?;
            times.push(begin.elapsed().as_secs_f64());
        }
        let median = median(&mut times);
        let timing = Timing { median, min: times[0], host: f64::NAN };
        report.add(workload, &row, &timing, f64::NAN, problem.plan.items.len(), &right);
    }
    report.records.save(args.json.as_deref())
}

fn run_gpu(gpu: &Gpu, table: &[Workload], args: &Args) -> Result<()> {
    let (ceiling, bytes) = gpu.ceiling(Kind::Read, args.test)?;
    let mut report = Report::new(&gpu.name(), gpu.facts(), ceiling);
    report.records.note("read_ceiling_bytes", bytes);
    // One pool for neighbours in the table that share a dtype.
    for group in table.chunk_by(|a, b| a.kv == b.kv) {
        let elems = group.iter().map(|w| w.layer_elems() * u64::from(copies(gpu, w))).max().unwrap_or(0);
        let pool = Pool::new(gpu, group[0].kv, elems)?;
        for workload in group {
            if let Err(error) = time_gpu(gpu, &pool, workload, args, &mut report) {
                // A lost device fails everything after it.
                gpu.check_lost()?;
                report.records.fail(&workload.name(), error.as_ref());
            }
        }
    }
    serving::run(gpu, args, ceiling, &mut report.records)?;
    report.records.save(args.json.as_deref())
}

/// Layers whose caches are rotated.
fn copies(gpu: &Gpu, workload: &Workload) -> u32 {
    if is_software(gpu) {
        return 1;
    }
    let layer = workload.layer_elems() * workload.kv.bytes() as u64;
    let fit = (gpu.pipelines.caps().max_buffer_bytes / layer).max(1) as f64;
    (ROTATED_BYTES / layer as f64).ceil().clamp(2.0, 128.0).min(fit) as u32
}

/// The first row that rounds no softmax weights.
fn plain_row(gpu: &Gpu, workload: &Workload) -> Result<&'static str> {
    for row in gpu.variants(&workload.spec()) {
        if !gpu.decode(&workload.spec(), Some(row))?.rounds_weights() {
            return Ok(row);
        }
    }
    Err("every row rounds the softmax weights".into())
}

fn time_gpu(
    gpu: &Gpu,
    pool: &Pool<Gpu>,
    workload: &Workload,
    args: &Args,
    report: &mut Report,
) -> Result<()> {
    let skip = |why: &str| {
        println!("| {} | skipped: {why} |", workload.name());
        Ok(())
    };
    if workload.layer_elems() * workload.kv.bytes() as u64 > gpu.pipelines.caps().max_binding_bytes {
        return skip("its cache does not fit one binding of this device");
    }
    let ladder = gpu.ladder(&workload.spec());
    let variant = if workload.plain { Some(plain_row(gpu, workload)?) } else { args.variant.as_deref() };
    if let Some((_, Some(lack))) = ladder.iter().find(|(row, _)| Some(*row) == variant) {
        return skip(lack);
    }
    let problem = Problem::new(gpu, pool, workload, variant, args.items, copies(gpu, workload))?;
    let row = problem.decode.variant();
    let right = problem.check(gpu).map_err(|error| format!("{}: {row}: {error}", workload.name()))?;
    let clock = Clock::new(gpu, args.replays());
    let timing = clock.time(Passes::One, |pass, call| {
        let binding = &problem.bindings[call % problem.bindings.len()];
        problem.decode.record_in(pass, &problem.step, binding);
    })?;
    let step = host_step(gpu, workload, &problem)?;
    gpu.queue.submit([]);
    report.add(workload, row, &timing, step, problem.plan.items.len(), &right);
    Ok(())
}

/// Seconds of host time that a step costs before its layers: plan and prepare, with one token more each time.
pub fn host_step<B: Canvas>(backend: &B, workload: &Workload, problem: &Problem<'_, B>) -> Result<f64> {
    let mut step = backend.step(&problem.decode, Default::default())?;
    let mut plan = Plan::default();
    let (table, max_pages) = workload.block_table();
    let (lens, tiling) = (workload.seq_lens(), backend.tiling(&problem.decode));
    let starts: Vec<i32> = (0..=lens.len() as u32).map(|i| (i * workload.q_len) as i32).collect();
    let shared = workload.shared_prefixes();
    let mut times = Vec::new();
    for turn in 0..17 {
        let lens: Vec<i32> = lens.iter().map(|&len| (len - 16 + turn).max(1)).collect();
        let begin = Instant::now();
        let batch = Batch { shared_prefixes: &shared, ..Batch::new(&lens, &starts) };
        plan.update(&problem.spec, &tiling, &batch, Policy::Auto)?;
        let pages = PageTable::Dense { block_table: &table, max_pages };
        backend.prepare(&problem.decode, &mut step, &plan, pages)?;
        times.push(begin.elapsed().as_secs_f64());
    }
    Ok(median(&mut times))
}

/// The table as it grows, and the times that later lines are compared with.
pub struct Report {
    pub records: Records,
    ceiling: f64,
    done: Vec<(Workload, f64)>,
}

impl Report {
    pub fn new(name: &str, device: Value, ceiling: f64) -> Self {
        let mut records = Records::new("decode", device);
        records.note("read_ceiling_gb_s", ceiling);
        records.note("peers_device", peers::DEVICE);
        records.note("peers_read_ceiling_gb_s", peers::READ_CEILING);
        println!(
            "# Decode on {name}\n\nus: device time of decode + merge. Ceiling: share of this run's read ceiling, {} GB/s. \
             Ratio: to 16 heads, 64 x 8192 (ragged: per KV byte).\nHost: us to record a layer; to plan and prepare a step. \
             Peers: us on one {}, not on this device.\n",
            figure(ceiling),
            peers::DEVICE
        );
        print!(
            "| workload | row | us | min | KV GB/s | ceiling | TFLOP/s | ratio | items | host | error (of allowed) |"
        );
        peers::NAMES.iter().for_each(|name| print!(" {name} |"));
        println!("\n|---|---|{}", "---|".repeat(9 + peers::NAMES.len()));
        Self { records, ceiling, done: Vec::new() }
    }

    pub fn add(
        &mut self,
        w: &Workload,
        row: &str,
        timing: &Timing,
        host_step: f64,
        items: usize,
        right: &str,
    ) {
        let seconds = timing.median;
        let rate = w.kv_bytes() / seconds / 1e9;
        let share = rate / self.ceiling;
        let ratio = self.ratio(w, seconds);
        let known = w.dims == (512, 64) && w.query != Dtype::F32;
        let peers = known.then(|| peers::decode_of(w.heads, w.q_len, w.kv, &w.shape_name())).flatten();
        print!("| {} | {row} | {} | {} ", w.name(), micros(seconds * 1e6), micros(timing.min * 1e6));
        print!("| {} | {} % | {} ", figure(rate), figure(share * 100.0), figure(w.flop() / seconds / 1e12));
        let ratio_text = if ratio.is_finite() { format!("{ratio:.3}") } else { "-".into() };
        print!("| {ratio_text} | {items} ");
        print!("| {}; {} | {right} |", figure(timing.host * 1e6), figure(host_step * 1e6));
        peers.unwrap_or([f64::NAN; 4]).iter().for_each(|us| print!(" {} |", micros(*us)));
        println!();

        let mut record = json!({
            "workload": w.name(), "row": row, "heads": w.heads, "shape": w.shape_name(), "q_len": w.q_len,
            "kv": w.kv.name(), "query": w.query.name(), "dims": [w.dims.0, w.dims.1], "tokens": w.tokens(),
            "gb_s": rate, "share": share, "tflop_s": w.flop() / seconds / 1e12, "ratio": ratio,
            "items": items, "host_step_us": host_step * 1e6, "error": right,
            "peers_us": peers.map(|us| peers::NAMES.iter().zip(us).map(|(n, us)| json!([n, us])).collect::<Vec<_>>()),
        });
        if let Some(fields) = record.as_object_mut() {
            fields.extend(timing_fields(timing));
        }
        self.records.add(record);
        self.done.push((w.clone(), seconds));
    }

    /// NaN where there is nothing to compare with in this run.
    fn ratio(&self, w: &Workload, seconds: f64) -> f64 {
        let Some((base, kind)) = w.ratio() else { return f64::NAN };
        let is_base = |(done, _): &&(Workload, f64)| *done == base || *done == base.tiny();
        let Some((base, base_seconds)) = self.done.iter().find(is_base) else {
            return f64::NAN;
        };
        match kind {
            Ratio::Time => seconds / base_seconds,
            Ratio::TimePerByte => (seconds / w.kv_bytes()) / (base_seconds / base.kv_bytes()),
        }
    }
}
