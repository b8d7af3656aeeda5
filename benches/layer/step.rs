//! A step of a model, again and again: the host prepares it with other lengths, tables and slots, and runs what was recorded.

use std::time::{Duration, Instant};

use wgpu_mla::cpu::Cpu;
use wgpu_mla::gpu::Gpu;

use crate::support::clock::Clock;
use crate::support::device::Timed;
use crate::support::{Result, median};

/// A card that was idle is slow at first.
const WARM_UP: Duration = Duration::from_millis(400);
const MOST: Duration = Duration::from_secs(4);

/// Medians over steps, in seconds; NaN where a device has nothing of the kind.
pub struct StepTiming {
    /// On the device, all layers.
    pub device: f64,
    /// Host: to check and plan a batch and to upload its tables.
    pub prepare: f64,
    /// Host: to launch the graph of all layers; on wgpu to record all layers in a pass, and to submit them.
    pub launch: f64,
    /// Host: to capture that graph, once for each of the step's generations.
    pub capture: f64,
}

/// A device that runs steps. `prepare` is given the number of the step.
pub trait Steps: Timed {
    fn steps(
        &self,
        replays: usize,
        prepare: impl FnMut(usize) -> wgpu_mla::Result<()>,
        record: impl Fn(&mut Self::Recorder<'_>) -> wgpu_mla::Result<()>,
    ) -> Result<StepTiming>;
}

impl Steps for Gpu {
    fn steps(
        &self,
        replays: usize,
        mut prepare: impl FnMut(usize) -> wgpu_mla::Result<()>,
        record: impl Fn(&mut Self::Recorder<'_>) -> wgpu_mla::Result<()>,
    ) -> Result<StepTiming> {
        let clock = Clock::new(self, replays);
        medians(replays, self.is_software(), |turn| {
            let prepare = seconds(|| prepare(turn))?;
            let (device, launch) = clock.pass(&record)?;
            Ok([device, prepare, launch])
        })
    }
}

/// By the host's clock: recording runs it.
impl Steps for Cpu {
    fn steps(
        &self,
        replays: usize,
        mut prepare: impl FnMut(usize) -> wgpu_mla::Result<()>,
        record: impl Fn(&mut ()) -> wgpu_mla::Result<()>,
    ) -> Result<StepTiming> {
        medians(replays, true, |turn| {
            let prepare = seconds(|| prepare(turn))?;
            Ok([seconds(|| record(&mut ()))?, prepare, f64::NAN])
        })
    }
}

#[cfg(feature = "cuda")]
impl Steps for wgpu_mla::cuda::Cuda {
    fn steps(
        &self,
        replays: usize,
        mut prepare: impl FnMut(usize) -> wgpu_mla::Result<()>,
        record: impl Fn(&mut ()) -> wgpu_mla::Result<()>,
    ) -> Result<StepTiming> {
        let begin = Instant::now();
        let graph = self.capture(|| record(&mut ()))?;
        let capture = begin.elapsed().as_secs_f64();
        let timing = medians(replays, false, |turn| {
            let prepare = seconds(|| prepare(turn))?;
            let launch = seconds(|| graph.launch())?;
            // Once more behind the first, so that the card does not wait for the launch.
            Ok([crate::support::cuda::stamped(self, &|| Ok(graph.launch()?))?, prepare, launch])
        })?;
        Ok(StepTiming { capture, ..timing })
    }
}

/// Medians of what steps take on the device and of the host to prepare and to launch, after a warm-up.
fn medians(
    replays: usize,
    is_warm: bool,
    mut step: impl FnMut(usize) -> Result<[f64; 3]>,
) -> Result<StepTiming> {
    let mut turn = 0;
    let mut next = || {
        turn += 1;
        step(turn)
    };
    let begin = Instant::now();
    next()?;
    while !is_warm && begin.elapsed() < WARM_UP {
        next()?;
    }
    let mut times = [const { Vec::new() }; 3];
    let begin = Instant::now();
    for turn in 0..replays {
        if turn >= 3 && begin.elapsed() > MOST {
            break;
        }
        times.iter_mut().zip(next()?).for_each(|(times, took)| times.push(took));
    }
    let [device, prepare, launch] = times.each_mut().map(|times| median(times));
    Ok(StepTiming { device, prepare, launch, capture: f64::NAN })
}

fn seconds(run: impl FnOnce() -> wgpu_mla::Result<()>) -> Result<f64> {
    let begin = Instant::now();
    run()?;
    Ok(begin.elapsed().as_secs_f64())
}
