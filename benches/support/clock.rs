//! GPU time and host time of recorded work.

use std::cell::Cell;
use std::time::Instant;

use wgpu_mla::gpu::Gpu;
use wgpu_mla::{Device, DeviceKind, wgpu};

use super::{Result, median};

/// Seconds that one call took.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// On the device: the median and the least over replays.
    pub median: f64,
    pub min: f64,
    /// On the host, to record it and its share of `finish`: the median.
    pub host: f64,
}

/// Warm-up replays. The check before leaves the card idle, and its clocks take time to rise: an H200 is 4 times slower for 150 ms, and
/// stays so while it is idle more than half of the time.
const WARM_UP_SECONDS: f64 = 0.4;
/// A slow device has fewer replays.
const MOST_SECONDS: f64 = 3.0;

/// Times by timestamp queries; where the device has none, by the host's clock from submit to done.
pub struct Clock<'a> {
    gpu: &'a Gpu,
    queries: Option<wgpu::QuerySet>,
    resolved: wgpu::Buffer,
    replays: usize,
    /// GPU seconds that one replay aims at.
    aim: f64,
    calls: Cell<usize>,
}

/// What a replay's calls are recorded in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passes {
    /// One pass for all calls, the counterpart of a replayed CUDA graph.
    One,
    /// A pass for each call.
    Each,
}

impl<'a> Clock<'a> {
    pub fn new(gpu: &'a Gpu, replays: usize) -> Self {
        let device = gpu.device();
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
        let aim = if gpu.caps().kind == DeviceKind::Software { 0.0 } else { 3e-3 };
        Self { gpu, queries, resolved, replays, aim, calls: Cell::new(0) }
    }

    /// Times `record`, which is given the number of the call, so that a bench can rotate its buffers. A replay has enough calls for its
    /// time to be measurable.
    pub fn time(
        &self,
        passes: Passes,
        record: impl Fn(&mut wgpu::ComputePass<'_>, usize) -> wgpu_mla::Result<()>,
    ) -> Result<Timing> {
        // The first replay also initialises shaders and memory.
        self.replay(passes, 2, &record)?;
        let least = if self.aim > 0.0 { 4 } else { 1 };
        let fitting = |each: f64| ((self.aim / each.max(1e-7)).ceil() as usize).clamp(least, 512);
        let mut calls = fitting(self.replay(passes, 4, &record)?.0);
        let begin = Instant::now();
        while self.aim > 0.0 && begin.elapsed().as_secs_f64() < WARM_UP_SECONDS {
            calls = fitting(self.replay(passes, calls, &record)?.0);
        }
        let (mut device, mut host) = (Vec::new(), Vec::new());
        let begin = Instant::now();
        for turn in 0..self.replays {
            if turn >= 3 && begin.elapsed().as_secs_f64() > MOST_SECONDS {
                break;
            }
            let (a, b) = self.replay(passes, calls, &record)?;
            device.push(a);
            host.push(b);
        }
        let middle = median(&mut device);
        Ok(Timing { median: middle, min: device[0], host: median(&mut host) })
    }

    /// Seconds of one pass on the device, and of the host to record and submit it.
    pub fn pass(
        &self,
        record: impl Fn(&mut wgpu::ComputePass<'_>) -> wgpu_mla::Result<()>,
    ) -> Result<(f64, f64)> {
        let (device, [recording, submitting]) = self.submit((1, 1), |pass, _| record(pass))?;
        Ok((device, recording + submitting))
    }

    /// Seconds a call, on the device and on the host.
    fn replay(
        &self,
        passes: Passes,
        calls: usize,
        record: &impl Fn(&mut wgpu::ComputePass<'_>, usize) -> wgpu_mla::Result<()>,
    ) -> Result<(f64, f64)> {
        let first = self.calls.get();
        self.calls.set(first + calls);
        let passes = match passes {
            Passes::One => (1, calls),
            Passes::Each => (calls, 1),
        };
        let (device, [host, _]) = self.submit(passes, |pass, call| record(pass, first + call))?;
        Ok((device / calls as f64, host / calls as f64))
    }

    /// So many passes of so many calls each: seconds on the device, and of the host to record and to submit.
    fn submit(
        &self,
        (count, each): (usize, usize),
        record: impl Fn(&mut wgpu::ComputePass<'_>, usize) -> wgpu_mla::Result<()>,
    ) -> Result<(f64, [f64; 2])> {
        let device = self.gpu.device();
        let begin = Instant::now();
        let mut encoder = device.create_command_encoder(&Default::default());
        for number in 0..count {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                label: None,
                timestamp_writes: self.stamps(number == 0, number + 1 == count),
            });
            (0..each).try_for_each(|call| record(&mut pass, number + call))?;
        }
        let commands = encoder.finish();
        let recording = begin.elapsed().as_secs_f64();
        let begin = Instant::now();
        self.gpu.queue().submit([commands]);
        let submitting = begin.elapsed().as_secs_f64();
        device.poll(wgpu::PollType::wait_indefinitely())?;
        let wall = begin.elapsed().as_secs_f64();
        Ok((self.stamped()?.unwrap_or(wall), [recording, submitting]))
    }

    fn stamps(&self, first: bool, last: bool) -> Option<wgpu::ComputePassTimestampWrites<'_>> {
        let query_set = self.queries.as_ref().filter(|_| first || last)?;
        Some(wgpu::ComputePassTimestampWrites {
            query_set,
            beginning_of_pass_write_index: first.then_some(0),
            end_of_pass_write_index: last.then_some(1),
        })
    }

    /// Seconds between both stamps of the last submit.
    fn stamped(&self) -> Result<Option<f64>> {
        let Some(queries) = &self.queries else { return Ok(None) };
        let mut encoder = self.gpu.device().create_command_encoder(&Default::default());
        encoder.resolve_query_set(queries, 0..2, &self.resolved, 0);
        self.gpu.queue().submit([encoder.finish()]);
        let bytes = self.gpu.download(&self.resolved, 16)?;
        let stamp = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
        let ticks = stamp(8).saturating_sub(stamp(0)) as f64;
        Ok(Some(ticks * f64::from(self.gpu.queue().get_timestamp_period()) * 1e-9))
    }
}
