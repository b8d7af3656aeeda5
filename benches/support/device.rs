//! A device that work is recorded for once and replayed many times: what a table of figures is made on.

use serde_json::{Value, json};
use wgpu_mla::gpu::Gpu;
use wgpu_mla::wgpu;

use super::Result;
use super::ceiling::{self, Kind};
use super::clock::{Clock, Passes, Timing, is_small};
use super::paint::Canvas;

pub trait Device: Canvas {
    /// What calls are recorded into.
    type Pass<'a>;

    /// The device of a run's JSON.
    fn facts(&self) -> Value;

    /// Whether the table for cards is too much for it.
    fn is_small(&self) -> bool;

    /// GB/s of a kernel that only reads or only copies, and the bytes it was measured over.
    fn ceiling(&self, kind: Kind, test: bool) -> Result<(f64, u64)>;

    /// Runs what is recorded, once.
    fn once(&self, record: impl Fn(&mut Self::Pass<'_>)) -> Result<()>;

    /// Times what is recorded, which is given the number of the call: many calls in one replay, and each alone.
    fn time(&self, replays: usize, record: impl Fn(&mut Self::Pass<'_>, usize)) -> Result<[Timing; 2]>;
}

impl Device for Gpu {
    type Pass<'a> = wgpu::ComputePass<'a>;

    fn facts(&self) -> Value {
        let info = self.adapter.get_info();
        json!({
            "name": info.name,
            "driver": info.driver,
            "driver_info": info.driver_info,
            "api": format!("{:?}", info.backend),
            "kind": format!("{:?}", info.device_type),
        })
    }

    fn is_small(&self) -> bool {
        is_small(self)
    }

    fn ceiling(&self, kind: Kind, test: bool) -> Result<(f64, u64)> {
        ceiling::measure(self, kind, test)
    }

    fn once(&self, record: impl Fn(&mut Self::Pass<'_>)) -> Result<()> {
        let mut encoder = self.device.create_command_encoder(&Default::default());
        record(&mut encoder.begin_compute_pass(&Default::default()));
        self.queue.submit([encoder.finish()]);
        Ok(())
    }

    fn time(&self, replays: usize, record: impl Fn(&mut Self::Pass<'_>, usize)) -> Result<[Timing; 2]> {
        let clock = Clock::new(self, replays);
        Ok([clock.time(Passes::One, &record)?, clock.time(Passes::Each, &record)?])
    }
}
