//! The table of workloads, and how one is timed.

use std::time::Instant;

use wgpu_mla::gpu::{Gpu, Step};
use wgpu_mla::{Backend, Dtype, wgpu};

use super::problem::{Problem, Workload};
use super::{Args, Result, median};

const BF16: Workload =
    Workload { heads: 16, batch: 64, context: 8192, q_len: 1, kv: Dtype::Bf16, query: Dtype::Bf16 };

/// Of `peers-h200.md`'s sizes, those that this storey is judged by.
fn discrete() -> Vec<Workload> {
    vec![
        BF16,
        Workload { batch: 32, context: 4096, ..BF16 },
        Workload { batch: 1, context: 4096, ..BF16 },
        Workload { batch: 1, context: 32_768, ..BF16 },
        Workload { batch: 1, context: 131_072, ..BF16 },
        Workload { kv: Dtype::F16, query: Dtype::F16, ..BF16 },
        Workload { kv: Dtype::E4m3, ..BF16 },
        Workload { q_len: 2, ..BF16 },
        Workload { heads: 20, ..BF16 },
        Workload { heads: 128, ..BF16 },
    ]
}

fn small() -> Vec<Workload> {
    let f16 = Workload { batch: 1, context: 4096, kv: Dtype::F16, query: Dtype::F16, ..BF16 };
    vec![
        f16,
        Workload { query: Dtype::F32, ..f16 },
        Workload { kv: Dtype::Bf16, ..f16 },
        Workload { kv: Dtype::E4m3, ..f16 },
    ]
}

fn tiny() -> Vec<Workload> {
    vec![
        Workload { batch: 2, context: 300, ..BF16 },
        Workload { batch: 1, context: 128, kv: Dtype::E4m3, ..BF16 },
    ]
}

pub fn run(args: &Args) -> Result<()> {
    let (workloads, gpu) = match args.backend.as_str() {
        "cpu" => (small(), None),
        "wgpu" => {
            let gpu = Gpu::new()?;
            let software = gpu.adapter.get_info().device_type == wgpu::DeviceType::Cpu;
            (if software { small() } else { discrete() }, Some(gpu))
        }
        other => return Err(format!("--backend {other}: wgpu or cpu").into()),
    };
    let workloads = if args.test { tiny() } else { workloads };
    match &gpu {
        Some(gpu) => println!("# {}", gpu.name()),
        None => println!("# {}", cpu(args).name()),
    }
    println!(
        "| workload | row | us | KV GB/s | TFLOP/s | items | worst error |\n|---|---|---|---|---|---|---|"
    );
    for workload in workloads {
        if args.only.as_ref().is_some_and(|only| !workload.name().contains(only)) {
            continue;
        }
        match &gpu {
            Some(gpu) => time_gpu(gpu, &workload, args)?,
            None => time_cpu(&cpu(args), &workload, args)?,
        }
    }
    Ok(())
}

fn cpu(args: &Args) -> wgpu_mla::cpu::Cpu {
    args.threads.map_or_else(wgpu_mla::cpu::Cpu::new, wgpu_mla::cpu::Cpu::with_threads)
}

fn time_cpu(cpu: &wgpu_mla::cpu::Cpu, workload: &Workload, args: &Args) -> Result<()> {
    let problem = Problem::new(cpu, workload, args.variant.as_deref(), args.items, 1)?;
    let right = problem.check(cpu)?;
    let runs = if args.test { 3 } else { 201 };
    let mut times = Vec::new();
    for _ in 0..runs {
        let begin = Instant::now();
        cpu.run(&problem.decode, &problem.step, &problem.bindings[0])?;
        times.push(begin.elapsed().as_secs_f64());
    }
    let row = args.variant.clone().unwrap_or_else(|| cpu.variants(&problem.spec)[0].into());
    print_row(workload, &row, median(&mut times), problem.plan.items.len(), &right);
    Ok(())
}

fn time_gpu(gpu: &Gpu, workload: &Workload, args: &Args) -> Result<()> {
    let software = gpu.adapter.get_info().device_type == wgpu::DeviceType::Cpu;
    // Rotating caches, larger together than any card's L2.
    let copies = if software { 1 } else { (400e6 / workload.kv_bytes()).ceil().clamp(1.0, 64.0) as u32 };
    let problem = Problem::new(gpu, workload, args.variant.as_deref(), args.items, copies)?;
    let right = problem.check(gpu)?;
    let (layers, submits) = match (args.test, software) {
        (true, _) => (2, 2),
        (_, true) => (1, 31),
        _ => (if workload.kv_bytes() < 100e6 { 4 * copies.max(16) } else { 16 }, 15),
    };
    let mut times = Vec::new();
    for _ in 0..submits {
        times.push(time_submit(gpu, &problem, layers)? / f64::from(layers));
    }
    let row = problem.decode.variant();
    print_row(workload, row, median(&mut times), problem.plan.items.len(), &right);
    Ok(())
}

/// Seconds for `layers` layers in one submit.
fn time_submit(gpu: &Gpu, problem: &Problem<Gpu>, layers: u32) -> Result<f64> {
    let device = &gpu.device;
    let timestamps = device.features().contains(wgpu::Features::TIMESTAMP_QUERY);
    let queries = timestamps.then(|| {
        device.create_query_set(&wgpu::QuerySetDescriptor {
            label: None,
            ty: wgpu::QueryType::Timestamp,
            count: 2,
        })
    });
    let resolved = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 256,
        usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
        mapped_at_creation: false,
    });
    let mut encoder = device.create_command_encoder(&Default::default());
    let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
        label: None,
        timestamp_writes: queries.as_ref().map(|query_set| wgpu::ComputePassTimestampWrites {
            query_set,
            beginning_of_pass_write_index: Some(0),
            end_of_pass_write_index: Some(1),
        }),
    });
    let step: &Step = &problem.step;
    for layer in 0..layers as usize {
        problem.decode.record_in(&mut pass, step, &problem.bindings[layer % problem.bindings.len()]);
    }
    drop(pass);
    if let Some(queries) = &queries {
        encoder.resolve_query_set(queries, 0..2, &resolved, 0);
    }
    let begin = Instant::now();
    gpu.queue.submit([encoder.finish()]);
    device.poll(wgpu::PollType::wait_indefinitely())?;
    let host = begin.elapsed().as_secs_f64();
    if queries.is_none() {
        return Ok(host);
    }
    let bytes = gpu.download(&resolved, 16)?;
    let stamp = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
    Ok((stamp(8).saturating_sub(stamp(0))) as f64 * f64::from(gpu.queue.get_timestamp_period()) * 1e-9)
}

fn print_row(workload: &Workload, row: &str, seconds: f64, items: usize, right: &str) {
    println!(
        "| {} | {row} | {:.1} | {:.0} | {:.2} | {items} | {right} |",
        workload.name(),
        seconds * 1e6,
        workload.kv_bytes() / seconds / 1e9,
        workload.flop() / seconds / 1e12,
    );
}
