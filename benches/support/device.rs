//! [`Timed`]: a device on which recorded calls are replayed and timed.

use std::time::Instant;

use serde_json::{Value, json};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::gpu::Gpu;
use wgpu_mla::{Binding, Compiled, DeviceKind, Kernel, Op, Step, wgpu};

use super::ceiling::{self, Kind};
use super::clock::{Clock, Passes, Timing};
use super::paint::Canvas;
use super::{Result, median, read_once};

pub trait Timed: Canvas {
    /// The device of a run's JSON.
    fn facts(&self) -> Value;

    fn kind(&self) -> DeviceKind;

    /// Bytes of the largest buffer.
    fn largest_buffer(&self) -> u64 {
        u64::MAX
    }

    /// GB/s of a kernel that only reads or only copies, and the bytes it was measured over.
    fn ceiling(&self, kind: Kind, test: bool) -> Result<(f64, u64)>;

    /// Seconds of a kernel that only reads `bytes`, another of the `parts` of the buffer each time: the best of some grids. NaN where
    /// there is no such kernel, or no grid of it reads just these bytes.
    fn read_once(&self, buffer: &Self::Buffer, bytes: u64, parts: u64, replays: usize) -> Result<f64>;

    /// Times what is recorded, which is given the number of the call: many calls in one replay.
    fn time(
        &self,
        replays: usize,
        record: impl Fn(&mut Self::Recorder<'_>, usize) -> wgpu_mla::Result<()>,
    ) -> Result<Timing>;

    /// Like [`Timed::time`], then each call alone.
    fn time_both(
        &self,
        replays: usize,
        record: impl Fn(&mut Self::Recorder<'_>, usize) -> wgpu_mla::Result<()>,
    ) -> Result<[Timing; 2]>;

    fn is_software(&self) -> bool {
        self.kind() == DeviceKind::Software
    }

    /// Whether the device is too slow for the table for cards.
    fn is_small(&self) -> bool {
        matches!(self.kind(), DeviceKind::Software | DeviceKind::Integrated)
    }
}

impl Timed for Gpu {
    fn facts(&self) -> Value {
        let info = self.device().adapter_info();
        json!({
            "name": info.name,
            "driver": info.driver,
            "driver_info": info.driver_info,
            "api": format!("{:?}", info.backend),
            "kind": format!("{:?}", info.device_type),
        })
    }

    fn kind(&self) -> DeviceKind {
        self.caps().kind
    }

    fn largest_buffer(&self) -> u64 {
        self.caps().max_buffer_bytes
    }

    fn ceiling(&self, kind: Kind, test: bool) -> Result<(f64, u64)> {
        ceiling::measure(self, kind, test)
    }

    fn read_once(&self, buffer: &wgpu::Buffer, bytes: u64, parts: u64, replays: usize) -> Result<f64> {
        read_once::seconds(self, buffer, bytes, parts, replays)
    }

    fn time(
        &self,
        replays: usize,
        record: impl Fn(&mut wgpu::ComputePass<'_>, usize) -> wgpu_mla::Result<()>,
    ) -> Result<Timing> {
        Clock::new(self, replays).time(Passes::One, record)
    }

    fn time_both(
        &self,
        replays: usize,
        record: impl Fn(&mut wgpu::ComputePass<'_>, usize) -> wgpu_mla::Result<()>,
    ) -> Result<[Timing; 2]> {
        let clock = Clock::new(self, replays);
        Ok([clock.time(Passes::One, &record)?, clock.time(Passes::Each, &record)?])
    }
}

/// By the host's clock, a call at a time: recording runs it.
impl Timed for Cpu {
    fn facts(&self) -> Value {
        json!({ "name": "CPU" })
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Software
    }

    /// Not measured on the CPU.
    fn ceiling(&self, _: Kind, _: bool) -> Result<(f64, u64)> {
        Ok((f64::NAN, 0))
    }

    fn read_once(&self, _: &Self::Buffer, _: u64, _: u64, _: usize) -> Result<f64> {
        Ok(f64::NAN)
    }

    fn time(
        &self,
        replays: usize,
        record: impl Fn(&mut (), usize) -> wgpu_mla::Result<()>,
    ) -> Result<Timing> {
        let mut times = Vec::new();
        for call in 0..replays {
            let begin = Instant::now();
            record(&mut (), call)?;
            times.push(begin.elapsed().as_secs_f64());
        }
        let median = median(&mut times);
        Ok(Timing { median, min: times[0], host: f64::NAN })
    }

    fn time_both(
        &self,
        replays: usize,
        record: impl Fn(&mut (), usize) -> wgpu_mla::Result<()>,
    ) -> Result<[Timing; 2]> {
        Ok([self.time(replays, record)?; 2])
    }
}

/// A compiled op, a step, and the layers that are rotated.
pub struct Layers<O: Op, D: Kernel<O>> {
    pub op: Compiled<O, D>,
    pub step: Step<O, D>,
    pub bindings: Vec<Binding<O, D>>,
}

impl<O: Op, D: Kernel<O>> Layers<O, D> {
    /// Prepares a step and binds the layers, with room for this step.
    pub fn new<'a>(
        op: Compiled<O, D>,
        capacity: O::Capacity,
        input: O::Input<'_>,
        layers: impl IntoIterator<Item = O::Args<&'a D::Buffer>>,
    ) -> wgpu_mla::Result<Self>
    where
        D::Buffer: 'a,
    {
        let mut step = op.step(capacity)?;
        op.prepare(&mut step, input)?;
        let bindings = layers.into_iter().map(|args| op.bind(&args, step.used()));
        let bindings = bindings.collect::<wgpu_mla::Result<_>>()?;
        Ok(Self { op, step, bindings })
    }

    /// Records the next layer of the rotation.
    pub fn record(&self, recorder: &mut D::Recorder<'_>, call: usize) -> wgpu_mla::Result<()> {
        self.op.record_on(recorder, &self.step, &self.bindings[call % self.bindings.len()])
    }

    /// Runs the first layer.
    pub fn run_first(&self) -> wgpu_mla::Result<()> {
        self.op.run(&self.step, &self.bindings[0])
    }
}
