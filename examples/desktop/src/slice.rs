//! A slice of a step: one layer's attention, recorded by a frame into egui's encoder, read back without a wait.
//!
//! candle needs a layer's attention before it can compute the next layer's rows, on the CPU. A frame has one submit, and what it
//! submits can be read only afterwards: so a frame carries one layer, and a token takes as many frames as the model has layers. What
//! makes a text faster than that is a batch, as all sequences go through a layer together.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use generate::attention::{Attention, Rows};
use generate::{Model, Paged, Result, Setup, Stored};
use wgpu_mla::gpu::Gpu;
use wgpu_mla::{Device, Error, SeqId, wgpu};

use crate::shared::{Shared, lock};

/// From a look at the device to the next, while it has not answered.
const LOOK_AGAIN: Duration = Duration::from_micros(300);
/// The same once it has not answered for long, as when the window is minimised.
const LOOK_SELDOM: Duration = Duration::from_millis(20);

/// The attention of all layers, on egui's device. Its thread prepares a step, and frames record it, one after the other.
pub struct Slices {
    gpu: Gpu,
    pub paged: Mutex<Paged<Gpu>>,
    stored: Mutex<Stored<Gpu>>,
    /// What a frame copies to the host: two timestamps, the layer's output, the step's rows of the cache.
    staging: wgpu::Buffer,
    /// `None` on a device without `TIMESTAMP_QUERY`.
    clock: Option<Clock>,
}

struct Clock {
    queries: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    ms_per_tick: f64,
}

const CLOCK_BYTES: u64 = 16;

/// What a frame records.
pub struct Slice {
    slices: Arc<Slices>,
    layer: usize,
    out_bytes: u64,
    /// Behind the last layer: what the cache got, of all layers.
    row_bytes: u64,
    /// Dropped without an answer where the frame was given up, as while a window is resized.
    answer: Sender<wgpu_mla::Result<()>>,
}

/// What came of a slice.
pub struct Attended {
    /// `[T, H, V]`.
    pub out: Vec<f32>,
    /// What the cache holds of the step's tokens, `[T, layers, L + R]`; only the last layer's slice has it.
    pub rows: Vec<f32>,
    /// On the device, by its own clock; without one, from the frame to its answer.
    pub ms: f64,
}

impl Slices {
    /// Compiles, so it is not for the thread that draws.
    ///
    /// # Errors
    /// The errors of the device.
    pub fn new(gpu: &Gpu, model: &Model, setup: &Setup) -> Result<Self> {
        use wgpu::BufferUsages as Usage;
        let paged = Paged::new(gpu, model, setup)?;
        let stored = Stored::new(gpu, &paged, setup.step_tokens)?;
        let config = &model.config;
        let per_token = config.shape.num_heads as usize * config.v_head_dim
            + config.num_layers * config.shape.row_elems() as usize;
        let bytes = CLOCK_BYTES + u64::from(setup.step_tokens) * per_token as u64 * 4;
        let device = gpu.device();
        let buffer = |label, size, usage| {
            let descriptor = wgpu::BufferDescriptor { label, size, usage, mapped_at_creation: false };
            device.create_buffer(&descriptor)
        };
        let timed = device.features().contains(wgpu::Features::TIMESTAMP_QUERY);
        let clock = timed.then(|| Clock {
            queries: device.create_query_set(&wgpu::QuerySetDescriptor {
                label: Some("desktop.clock"),
                ty: wgpu::QueryType::Timestamp,
                count: 2,
            }),
            resolved: buffer(Some("desktop.clock"), CLOCK_BYTES, Usage::QUERY_RESOLVE | Usage::COPY_SRC),
            ms_per_tick: f64::from(gpu.queue().get_timestamp_period()) / 1e6,
        });
        let staging = buffer(Some("desktop.staging"), bytes, Usage::COPY_DST | Usage::MAP_READ);
        gpu.check_lost()?;
        Ok(Self { gpu: gpu.clone(), paged: Mutex::new(paged), stored: Mutex::new(stored), staging, clock })
    }

    /// Begins a step: see [`Attention::begin`].
    ///
    /// # Errors
    /// [`wgpu_mla::Error::OutOfPages`], and those of the device.
    pub fn begin(&self, batch: &[(SeqId, u32)]) -> Result<()> {
        lock(&self.paged).begin(batch)
    }

    /// The position of each token of the step that was begun last.
    pub fn positions(&self) -> Vec<i32> {
        lock(&self.paged).pages().positions.clone()
    }

    /// Runs what gathers rows of the cache once, by a submit of its own, and waits for it.
    ///
    /// # Errors
    /// The errors of the device.
    pub fn warm_up(&self, paged: &Paged<Gpu>) -> Result<()> {
        let mut stored = lock(&self.stored);
        stored.prepare_new(paged)?;
        self.gpu.submit(|mut pass| stored.record_on(&mut pass))?;
        self.gpu.download(stored.rows(), 4)?;
        Ok(())
    }

    /// Hands a layer to the next frame, and waits for its answer. `None` once the window closes.
    ///
    /// # Errors
    /// The errors of the device.
    pub fn attend(
        self: &Arc<Self>,
        shared: &Shared,
        layer: usize,
        is_last: bool,
        rows: &Rows,
    ) -> Result<Option<Attended>> {
        let (out_bytes, row_bytes) = {
            let paged = lock(&self.paged);
            paged.upload(rows)?;
            let row_bytes = if is_last { lock(&self.stored).prepare_new(&paged)? } else { 0 };
            (paged.out().1, row_bytes)
        };
        // A frame that was given up is followed by another.
        loop {
            let (answer, answered) = channel();
            shared.hand(Slice { slices: self.clone(), layer, out_bytes, row_bytes, answer });
            let begin = Instant::now();
            loop {
                let wait = if begin.elapsed() < Duration::from_secs(1) { LOOK_AGAIN } else { LOOK_SELDOM };
                match answered.recv_timeout(wait) {
                    Ok(done) => {
                        done?;
                        return self.read(out_bytes, row_bytes, begin.elapsed()).map(Some);
                    }
                    Err(RecvTimeoutError::Disconnected) => break,
                    Err(RecvTimeoutError::Timeout) if shared.is_closing() => return Ok(None),
                    Err(RecvTimeoutError::Timeout) => self.look(shared)?,
                }
            }
            if shared.is_closing() {
                return Ok(None);
            }
        }
    }

    /// Lets the device call back, without a wait for it.
    fn look(&self, shared: &Shared) -> Result<()> {
        if let Some(why) = shared.lost() {
            return Err(Error::DeviceLost { detail: why.into() }.into());
        }
        if shared.is_drawing() {
            return Ok(());
        }
        // It fails on a lost device, which tells of that itself.
        let _ = self.gpu.device().poll(wgpu::PollType::Poll);
        Ok(())
    }

    fn read(&self, out_bytes: u64, row_bytes: u64, waited: Duration) -> Result<Attended> {
        let lost = |error: wgpu::MapRangeError| Error::DeviceLost { detail: error.to_string() };
        let (clock, out_end) = (CLOCK_BYTES as usize, (CLOCK_BYTES + out_bytes) as usize);
        let bytes = self.staging.get_mapped_range(..CLOCK_BYTES + out_bytes + row_bytes).map_err(lost)?;
        let [begin, end]: [u64; 2] = bytemuck::pod_read_unaligned(&bytes[..clock]);
        let out = bytemuck::pod_collect_to_vec(&bytes[clock..out_end]);
        let rows = bytemuck::pod_collect_to_vec(&bytes[out_end..]);
        drop(bytes);
        self.staging.unmap();
        let ms = match &self.clock {
            Some(clock) => end.saturating_sub(begin) as f64 * clock.ms_per_tick,
            None => waited.as_secs_f64() * 1000.0,
        };
        Ok(Attended { out, rows, ms })
    }
}

impl Slice {
    /// Records it. Whoever owns the encoder submits it, once, with the rest of the frame; the buffer maps itself then.
    pub fn record(self, encoder: &mut wgpu::CommandEncoder) {
        match self.commands(encoder) {
            Ok(end) => {
                let answer = self.answer;
                encoder.map_buffer_on_submit(&self.slices.staging, wgpu::MapMode::Read, ..end, move |done| {
                    let done = done.map_err(|error| Error::DeviceLost { detail: error.to_string() });
                    // Nobody waits any more where the window was closed.
                    let _ = answer.send(done);
                });
            }
            Err(error) => {
                let _ = self.answer.send(Err(error));
            }
        }
    }

    fn commands(&self, encoder: &mut wgpu::CommandEncoder) -> wgpu_mla::Result<u64> {
        let slices = &self.slices;
        let (paged, clock) = (lock(&slices.paged), slices.clock.as_ref());
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
            label: Some("desktop.slice"),
            timestamp_writes: clock.map(|clock| wgpu::ComputePassTimestampWrites {
                query_set: &clock.queries,
                beginning_of_pass_write_index: Some(0),
                end_of_pass_write_index: Some(1),
            }),
        });
        paged.record_on(&mut pass, self.layer)?;
        drop(pass);
        if let Some(clock) = clock {
            encoder.resolve_query_set(&clock.queries, 0..2, &clock.resolved, 0);
            encoder.copy_buffer_to_buffer(&clock.resolved, 0, &slices.staging, 0, CLOCK_BYTES);
        }
        let out_end = CLOCK_BYTES + self.out_bytes;
        encoder.copy_buffer_to_buffer(paged.out().0, 0, &slices.staging, CLOCK_BYTES, self.out_bytes);
        if self.row_bytes > 0 {
            let stored = lock(&slices.stored);
            stored.record_on(&mut encoder.begin_compute_pass(&Default::default()))?;
            encoder.copy_buffer_to_buffer(stored.rows(), 0, &slices.staging, out_end, self.row_bytes);
        }
        Ok(out_end + self.row_bytes)
    }
}
