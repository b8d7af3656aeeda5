//! How much work a slice may be, so that the decode takes a few milliseconds of a frame and no more: measured with
//! timestamps around slices, read back without a wait. One measurement is on its way at a time.

use std::sync::mpsc::{Receiver, Sender, channel};

use wgpu_mla::gpu::SliceBudget;
use wgpu_mla::wgpu;

use crate::model;

/// A quarter of a 60 Hz frame.
const SLICE_MS: f64 = 4.0;

pub struct Pace {
    /// `None` on a device without `TIMESTAMP_QUERY`: the rate then stays a guess.
    clock: Option<Clock>,
    /// Recent work and the milliseconds it took. Older measurements fade.
    work: f64,
    milliseconds: f64,
}

struct Clock {
    queries: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    read: wgpu::Buffer,
    ms_per_tick: f64,
    sender: Sender<u64>,
    receiver: Receiver<u64>,
    /// The work of the slice that is being measured.
    pending: Option<f64>,
}

impl Pace {
    pub fn new(device: &wgpu::Device, queue: &wgpu::Queue) -> Self {
        let timestamps = device.features().contains(wgpu::Features::TIMESTAMP_QUERY);
        // A guess for a slow device: too many slices at first are better than a window that freezes.
        Self { clock: timestamps.then(|| Clock::new(device, queue)), work: 2e3, milliseconds: 1.0 }
    }

    /// The budget of a slice.
    pub fn budget(&self) -> SliceBudget {
        SliceBudget { milliseconds: SLICE_MS, work_per_millisecond: self.work / self.milliseconds }
    }

    /// For the pass of a slice: `None` while an earlier measurement is on its way.
    pub fn timestamps(&mut self) -> Option<wgpu::ComputePassTimestampWrites<'_>> {
        let clock = self.clock.as_mut()?;
        if let Ok(ticks) = clock.receiver.try_recv()
            && let Some(work) = clock.pending.take()
        {
            const FADE: f64 = 0.7;
            self.work = FADE * self.work + work;
            self.milliseconds = FADE * self.milliseconds + (ticks as f64 * clock.ms_per_tick).max(1e-3);
        }
        clock.pending.is_none().then_some(wgpu::ComputePassTimestampWrites {
            query_set: &clock.queries,
            beginning_of_pass_write_index: Some(0),
            end_of_pass_write_index: Some(1),
        })
    }

    /// After that pass: reads the timestamps if it wrote any.
    pub fn measure(&mut self, encoder: &mut wgpu::CommandEncoder, work: f64) {
        let Some(clock) = self.clock.as_mut().filter(|clock| clock.pending.is_none()) else { return };
        clock.pending = Some(work);
        encoder.resolve_query_set(&clock.queries, 0..2, &clock.resolved, 0);
        encoder.copy_buffer_to_buffer(&clock.resolved, 0, &clock.read, 0, 16);
        let (read, sender) = (clock.read.clone(), clock.sender.clone());
        encoder.map_buffer_on_submit(&clock.read, wgpu::MapMode::Read, .., move |done| {
            let ticks = done.ok().and_then(|()| {
                let bytes = read.get_mapped_range(..).ok()?;
                let [begin, end]: [u64; 2] = bytemuck::pod_read_unaligned(&bytes);
                Some(end.saturating_sub(begin))
            });
            read.unmap();
            // Without an answer the last measurement stays pending, and the rate what it was.
            let _ = ticks.map(|ticks| sender.send(ticks));
        });
    }

    /// For a person.
    pub fn describe(&self) -> String {
        let guess = if self.clock.is_none() { " (a guess)" } else { "" };
        format!("{SLICE_MS} ms each at {:.0} rows x tokens a ms{guess}", self.work / self.milliseconds)
    }
}

impl Clock {
    fn new(device: &wgpu::Device, queue: &wgpu::Queue) -> Self {
        use wgpu::BufferUsages as Usage;
        let (sender, receiver) = channel();
        Self {
            queries: device.create_query_set(&wgpu::QuerySetDescriptor {
                label: Some("host.clock"),
                ty: wgpu::QueryType::Timestamp,
                count: 2,
            }),
            resolved: model::buffer(device, "host.clock", 16, Usage::QUERY_RESOLVE | Usage::COPY_SRC),
            read: model::buffer(device, "host.clock", 16, Usage::COPY_DST | Usage::MAP_READ),
            ms_per_tick: f64::from(queue.get_timestamp_period()) / 1e6,
            sender,
            receiver,
            pending: None,
        }
    }
}
