//! The CUDA backend, [`Timed`]: a graph of many calls, replayed.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use wgpu_mla::cuda::Cuda;
use wgpu_mla::cuda::cudarc::driver::{CudaFunction, CudaGraph, LaunchConfig, PushKernelArg, result, sys};
use wgpu_mla::cuda::cudarc::nvrtc::Ptx;
use wgpu_mla::{Device, DeviceKind, Dtype};

use super::ceiling::Kind;
use super::clock::Timing;
use super::device::Timed;
use super::paint::{Canvas, Paint};
use super::{Result, median};

/// Warm-up: an idle card's clocks take time to rise.
const WARM_UP: Duration = Duration::from_millis(250);
/// Seconds that one replay aims at.
const AIM: f64 = 3e-3;

/// Threads of a block of ceiling.ptx, and bytes that a thread moves in an iteration.
const THREADS: u32 = 256;
const TURN_BYTES: u64 = 4 * 16;

impl Timed for Cuda {
    fn facts(&self) -> Value {
        let mut version = 0;
        // SAFETY: it writes one number.
        let known = unsafe { sys::cuDriverGetVersion(&mut version) } == sys::CUresult::CUDA_SUCCESS;
        json!({ "name": self.name(), "api": "CUDA", "cuda_version": known.then_some(version) })
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Discrete
    }

    fn ceiling(&self, kind: Kind, test: bool) -> Result<(f64, u64)> {
        let bytes: u64 = match (test, kind) {
            (true, _) => 4 << 20,
            (_, Kind::Read) => (1 << 30) + (128 << 20),
            (_, Kind::Copy) => 640 << 20,
        };
        let source = self.painted(&Paint::new(Dtype::F32), bytes / 4)?;
        let target = self.buffer(if kind == Kind::Copy { bytes } else { 16 })?;
        let module = self.stream().context().load_module(Ptx::from_src(include_str!("ceiling.ptx")))?;
        let (entry, moved) = match kind {
            Kind::Read => ("read_all", 1),
            Kind::Copy => ("copy_all", 2),
        };
        let function = module.load_function(entry)?;
        let mut best = (0.0, 0);
        for groups in [264, 528, 1056, 2112, 4224, 16_896] {
            let turn = u64::from(groups * THREADS) * TURN_BYTES;
            let walked = bytes / turn * turn;
            if walked == 0 {
                continue;
            }
            let replays = if test { 1 } else { 9 };
            let buffers = [source.ptr(), target.ptr()];
            let (timing, _) = graphs(self, replays, |_| walk(self, &function, groups, buffers, walked))?;
            let rate = (moved * walked) as f64 / timing.median / 1e9;
            if rate > best.0 {
                best = (rate, walked);
            }
        }
        Ok(best)
    }

    /// By `read_all` of ceiling.ptx. A thread of it loads 64 bytes at a time, so that 2 MB have at most 128 blocks: unlike that of wgpu,
    /// it may not be the fastest that there is.
    fn read_once(&self, buffer: &Self::Buffer, bytes: u64, parts: u64, replays: usize) -> Result<f64> {
        if parts * bytes > Self::size(buffer) {
            return Err("the buffer has fewer parts".into());
        }
        let module = self.stream().context().load_module(Ptx::from_src(include_str!("ceiling.ptx")))?;
        let (function, target) = (module.load_function("read_all")?, self.buffer(16)?);
        let mut best = f64::NAN;
        for groups in [32, 64, 128, 132, 256, 264, 512, 528, 1056] {
            if !bytes.is_multiple_of(u64::from(groups * THREADS) * TURN_BYTES) {
                continue;
            }
            let part = |call: usize| [buffer.ptr() + call as u64 % parts * bytes, target.ptr()];
            let (timing, _) = graphs(self, replays, |call| walk(self, &function, groups, part(call), bytes))?;
            best = timing.median.min(best);
        }
        Ok(best)
    }

    fn time(
        &self,
        replays: usize,
        record: impl Fn(&mut (), usize) -> wgpu_mla::Result<()>,
    ) -> Result<Timing> {
        Ok(graphs(self, replays, |call| Ok(record(&mut (), call)?))?.0)
    }

    /// Alone is a launch on the stream, without a graph.
    fn time_both(
        &self,
        replays: usize,
        record: impl Fn(&mut (), usize) -> wgpu_mla::Result<()>,
    ) -> Result<[Timing; 2]> {
        let record = |call| Ok(record(&mut (), call)?);
        let (together, calls) = graphs(self, replays, record)?;
        let all = || (0..calls).try_for_each(record);
        Ok([together, timing(self, replays, calls, together.host, &all)?])
    }
}

/// Times a graph of many calls, and says how many.
fn graphs(
    cuda: &Cuda,
    replays: usize,
    record: impl Fn(usize) -> Result<()> + Copy,
) -> Result<(Timing, usize)> {
    // A first launch outside of the capture, for its one-time initialisation.
    record(0)?;
    let few = capture(cuda, 4, record)?;
    let guess = stamped(cuda, &|| Ok(few.launch()?))? / 4.0;
    let calls = ((AIM / guess.max(1e-7)).ceil() as usize).clamp(4, 512);
    let begin = Instant::now();
    let graph = capture(cuda, calls, record)?;
    let host = begin.elapsed().as_secs_f64() / calls as f64;
    let replay = || Ok(graph.launch()?);
    let begin = Instant::now();
    while begin.elapsed() < WARM_UP {
        stamped(cuda, &replay)?;
    }
    Ok((timing(cuda, replays, calls, host, &replay)?, calls))
}

/// The median of launches of `calls` calls each.
fn timing(
    cuda: &Cuda,
    replays: usize,
    calls: usize,
    host: f64,
    launch: &dyn Fn() -> Result<()>,
) -> Result<Timing> {
    let times = (0..replays).map(|_| Ok(stamped(cuda, launch)? / calls as f64));
    let mut times = times.collect::<Result<Vec<f64>>>()?;
    let median = median(&mut times);
    Ok(Timing { median, min: times[0], host })
}

/// Launches an entry of ceiling.ptx over the front of both buffers.
fn walk(
    cuda: &Cuda,
    function: &CudaFunction,
    groups: u32,
    [source, target]: [u64; 2],
    bytes: u64,
) -> Result<()> {
    let units = (bytes / 16) as u32;
    let mut builder = cuda.stream().launch_builder(function);
    builder.arg(&source).arg(&target).arg(&units);
    let config = LaunchConfig { grid_dim: (groups, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the entries take these three, and touch `bytes` of both buffers, or 16 of the target.
    unsafe { builder.launch(config)? };
    Ok(())
}

/// A graph of many calls, one after the other.
fn capture(cuda: &Cuda, calls: usize, record: impl Fn(usize) -> Result<()>) -> Result<CudaGraph> {
    let stream = cuda.stream();
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let recorded = (0..calls).try_for_each(record);
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags)?.ok_or("an empty graph")?;
    recorded?;
    graph.upload()?;
    Ok(graph)
}

/// Seconds on the card.
pub fn stamped(cuda: &Cuda, launch: &dyn Fn() -> Result<()>) -> Result<f64> {
    let stamp = || cuda.stream().record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
    let begin = stamp()?;
    launch()?;
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
            let (from, to, stream) = (buffer.ptr(), buffer.ptr() + done, self.stream().cu_stream());
            // SAFETY: both ranges are inside of the buffer, and apart.
            unsafe { result::memcpy_dtod_async(to, from, more as usize, stream)? };
            done += more;
        }
        self.stream().synchronize()?;
        Ok(buffer)
    }
}
