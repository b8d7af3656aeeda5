//! The table on the CUDA backend: a graph of many layers, replayed.

use std::time::{Duration, Instant};

use wgpu_mla::Backend;
use wgpu_mla::cuda::Cuda;
use wgpu_mla::cuda::cudarc::driver::{CudaGraph, sys};

use super::problem::{Pool, Problem};
use super::run::{ROTATED_BYTES, Report};
use super::workload::Workload;
use crate::support::args::Args;
use crate::support::clock::Timing;
use crate::support::paint::{Canvas, Paint};
use crate::support::{Result, median};

/// Before the replays that count: a card's clocks come back from idle.
const WARM_UP: Duration = Duration::from_millis(250);

pub fn run(table: &[Workload], args: &Args) -> Result<()> {
    let cuda = Cuda::new(0)?;
    let mut report = Report::new(&cuda.name(), None, f64::NAN);
    for group in table.chunk_by(|a, b| a.kv == b.kv) {
        let elems = group.iter().map(|w| w.layer_elems() * u64::from(copies(w))).max().unwrap_or(0);
        let pool = Pool::new(&cuda, group[0].kv, elems)?;
        for workload in group.iter().filter(|workload| !workload.plain) {
            if let Err(error) = time(&cuda, &pool, workload, args, &mut report) {
                report.fail(&workload.name(), error.as_ref());
            }
        }
    }
    report.save(args)
}

fn copies(workload: &Workload) -> u32 {
    let layer = (workload.layer_elems() * workload.kv.bytes() as u64) as f64;
    (ROTATED_BYTES / layer).ceil().clamp(2.0, 128.0) as u32
}

fn time(cuda: &Cuda, pool: &Pool<Cuda>, workload: &Workload, args: &Args, report: &mut Report) -> Result<()> {
    let problem = Problem::new(cuda, pool, workload, args.variant.as_deref(), args.items, copies(workload))?;
    let row = problem.decode.variant();
    let right = problem.check(cuda).map_err(|error| format!("{}: {row}: {error}", workload.name()))?;
    let guess = replay(cuda, &capture(cuda, &problem, 4)?)? / 4.0;
    let calls = ((3e-3 / guess.max(1e-7)).ceil() as usize).clamp(4, 512);
    let begin = Instant::now();
    let graph = capture(cuda, &problem, calls)?;
    let host = begin.elapsed().as_secs_f64() / calls as f64;
    let begin = Instant::now();
    while begin.elapsed() < WARM_UP {
        replay(cuda, &graph)?;
    }
    let mut times = Vec::new();
    for _ in 0..args.replays() {
        times.push(replay(cuda, &graph)? / calls as f64);
    }
    let median = median(&mut times);
    let timing = Timing { median, min: times[0], host };
    report.add(workload, row, &timing, f64::NAN, problem.plan.items.len(), &right);
    Ok(())
}

/// A graph of many layers, one after the other.
fn capture(cuda: &Cuda, problem: &Problem<'_, Cuda>, calls: usize) -> Result<CudaGraph> {
    let stream = cuda.stream();
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let mut recorded = Ok(());
    for call in 0..calls {
        let binding = &problem.bindings[call % problem.bindings.len()];
        recorded = recorded.and_then(|()| problem.decode.record(&problem.step, binding));
    }
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags)?.ok_or("an empty graph")?;
    recorded?;
    graph.upload()?;
    Ok(graph)
}

/// Seconds on the card.
fn replay(cuda: &Cuda, graph: &CudaGraph) -> Result<f64> {
    let stream = cuda.stream();
    let stamp = || stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
    let begin = stamp()?;
    graph.launch()?;
    let end = stamp()?;
    Ok(f64::from(begin.elapsed_ms(&end)?) * 1e-3)
}

impl Canvas for Cuda {
    /// The host uploads some cycles; the card copies them as often as they are needed.
    fn painted(&self, paint: &Paint, elements: u64) -> Result<Self::Buffer> {
        let bytes = paint.bytes(elements);
        let buffer = self.buffer(bytes)?;
        let mut done = bytes.min(paint.codes.len() as u64);
        self.upload(&buffer, 0, &paint.codes[..done as usize])?;
        while done < bytes {
            let more = done.min(bytes - done);
            // SAFETY: both ranges are inside of the buffer, and apart.
            unsafe {
                wgpu_mla::cuda::cudarc::driver::result::memcpy_dtod_async(
                    buffer.ptr() + done,
                    buffer.ptr(),
                    more as usize,
                    self.stream().cu_stream(),
                )?;
            }
            done += more;
        }
        self.stream().synchronize()?;
        Ok(buffer)
    }
}
