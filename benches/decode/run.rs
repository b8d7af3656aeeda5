//! The table: each workload is checked, timed, and compared with the peers.

use std::time::Instant;

use serde_json::{Value, json};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::gpu::Gpu;
use wgpu_mla::{Batch, Dtype, PageTable, Plan, SplitPolicy};

use super::problem::{Pool, Problem};
use super::workload::{Ratio, Workload, full, small, tiny};
use super::{serving, sparse};
use crate::support::args::Args;
use crate::support::ceiling::Kind;
use crate::support::clock::Timing;
use crate::support::device::Timed;
use crate::support::record::{Records, figure, micros, timing_fields};
use crate::support::{Result, median, peers};

/// Least total bytes of all layers' caches: more than any card's L2, so that each layer misses it.
const ROTATED_BYTES: f64 = 600e6;

pub fn run(args: &Args) -> Result<()> {
    match args.backend.as_str() {
        "wgpu" => table(&Gpu::new()?, args),
        "cpu" => table(&args.threads.map_or_else(Cpu::new, Cpu::with_threads), args),
        #[cfg(feature = "cuda")]
        "cuda" => table(&wgpu_mla::cuda::Cuda::new(0)?, args),
        other => Err(format!("--backend {other}: wgpu or cpu, or cuda with that feature").into()),
    }
}

fn table<D: Timed>(device: &D, args: &Args) -> Result<()> {
    let workloads = match () {
        () if args.test => tiny(),
        () if args.full || !device.is_small() => full(),
        () => small(),
    };
    let mut workloads: Vec<Workload> = workloads.into_iter().filter(|w| args.wants(&w.name())).collect();
    // Each of these two is in the tables of wgpu alone.
    let on_wgpu = args.backend == "wgpu";
    workloads.retain(|workload| on_wgpu || !workload.plain);
    let shapes = if on_wgpu { serving::shapes(device, args) } else { Vec::new() };
    let lists = sparse::workloads(device, args);
    if args.list {
        workloads.iter().for_each(|workload| println!("{}", workload.name()));
        shapes.iter().for_each(|shape| println!("{}", shape.name()));
        lists.iter().for_each(|workload| println!("{}", workload.name()));
        return Ok(());
    }
    let (ceiling, bytes) = device.ceiling(Kind::Read, args.test)?;
    let mut report = Report::new(&device.name(), device.facts(), ceiling);
    report.records.note("read_ceiling_bytes", bytes);
    // One pool for neighbours in the table that share a dtype.
    for group in workloads.chunk_by(|a, b| a.kv == b.kv) {
        let elems = group.iter().map(|w| w.layer_elems() * u64::from(copies(device, w))).max().unwrap_or(0);
        let pool = Pool::new(device, group[0].kv, elems)?;
        for workload in group {
            if let Err(error) = time(device, &pool, workload, args, &mut report) {
                // On a lost device everything that follows fails: this says so.
                device.buffer(4)?;
                report.records.fail(&workload.name(), error.as_ref());
            }
        }
    }
    serving::run(device, &shapes, args, ceiling, &mut report.records)?;
    sparse::run(device, &lists, args, ceiling, &mut report.records)?;
    report.records.save(args.json.as_deref())
}

/// Layers whose caches are rotated.
fn copies(device: &impl Timed, workload: &Workload) -> u32 {
    if device.is_software() {
        return 1;
    }
    let layer = workload.layer_elems() * workload.kv.bytes() as u64;
    let fit = (device.largest_buffer() / layer).max(1) as f64;
    (ROTATED_BYTES / layer as f64).ceil().clamp(2.0, 128.0).min(fit) as u32
}

fn time<D: Timed>(
    device: &D,
    pool: &Pool<D::Buffer>,
    workload: &Workload,
    args: &Args,
    report: &mut Report,
) -> Result<()> {
    let skip = |why: &str| {
        println!("| {} | skipped: {why} |", workload.name());
        Ok(())
    };
    if workload.layer_elems() * workload.kv.bytes() as u64 > device.largest_binding() {
        return skip("its cache does not fit one binding of this device");
    }
    let candidates = device.variants(&workload.spec());
    let variant = if workload.plain {
        let plain =
            candidates.iter().find(|candidate| !candidate.rounds_weights && candidate.lacks.is_none());
        Some(plain.ok_or("every variant rounds the softmax weights")?.name)
    } else {
        args.variant.as_deref()
    };
    let named = candidates.iter().find(|candidate| Some(candidate.name) == variant);
    if let Some(lack) = named.and_then(|candidate| candidate.lacks.as_deref()) {
        return skip(lack);
    }
    let problem = Problem::new(device, pool, workload, variant, args.items, copies(device, workload))?;
    let variant = problem.layers.op.variant();
    let right = problem.check(device).map_err(|error| format!("{}: {variant}: {error}", workload.name()))?;
    let timing = device.time(args.replays(), |recorder, call| problem.layers.record(recorder, call))?;
    let step = host_step(device, workload, &problem)?;
    report.add(workload, variant, &timing, step, problem.plan.items.len(), &right);
    Ok(())
}

/// Seconds of host time that a step costs before its layers: plan and prepare, with one token more each time.
fn host_step<D: Timed>(device: &D, workload: &Workload, problem: &Problem<'_, D>) -> Result<f64> {
    let decode = &problem.layers.op;
    let (mut plan, mut step) = (Plan::default(), decode.step(Default::default())?);
    let (table, max_pages) = workload.block_table();
    let (lens, tiling) = (workload.seq_lens(), decode.tiling());
    let starts: Vec<i32> = (0..=lens.len() as u32).map(|i| (i * workload.q_len) as i32).collect();
    let shared = workload.shared_prefixes();
    let mut times = Vec::new();
    for turn in 0..17 {
        let lens: Vec<i32> = lens.iter().map(|&len| (len - 16 + turn).max(1)).collect();
        let begin = Instant::now();
        let batch = Batch { shared_prefixes: &shared, ..Batch::new(&lens, &starts) };
        plan.update(&problem.spec, &tiling, &batch, SplitPolicy::Auto)?;
        let pages = PageTable::Dense { block_table: &table, max_pages: max_pages as u32 };
        decode.prepare(&mut step, (&plan, pages))?;
        times.push(begin.elapsed().as_secs_f64());
    }
    // Only the uploads are submitted.
    device.submit(|_| Ok(()))?;
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
            "| workload | variant | us | min | KV GB/s | ceiling | TFLOP/s | ratio | items | host | error (of allowed) |"
        );
        peers::NAMES.iter().for_each(|name| print!(" {name} |"));
        println!("\n|---|---|{}", "---|".repeat(9 + peers::NAMES.len()));
        Self { records, ceiling, done: Vec::new() }
    }

    pub fn add(
        &mut self,
        w: &Workload,
        variant: &str,
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
        print!("| {} | {variant} | {} | {} ", w.name(), micros(seconds * 1e6), micros(timing.min * 1e6));
        print!("| {} | {} % | {} ", figure(rate), figure(share * 100.0), figure(w.flop() / seconds / 1e12));
        let ratio_text = if ratio.is_finite() { format!("{ratio:.3}") } else { "-".into() };
        print!("| {ratio_text} | {items} ");
        print!("| {}; {} | {right} |", figure(timing.host * 1e6), figure(host_step * 1e6));
        peers.unwrap_or([f64::NAN; 4]).iter().for_each(|us| print!(" {} |", micros(*us)));
        println!();

        let mut record = json!({
            "workload": w.name(), "variant": variant, "heads": w.heads, "shape": w.shape_name(), "q_len": w.q_len,
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
