//! Reading a buffer back, waiting for nothing but the device: the same in a browser and outside.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

use super::scope::{hosts, scoped};
use crate::base::error::{Error, Result};

/// Copies the first `bytes` bytes of a buffer to the host, after all that was submitted to the queue. `buffer` has the
/// usage `COPY_SRC`, `bytes` is a multiple of 4.
///
/// In a browser the future is ready once its event loop has run; elsewhere the first poll waits for the device.
///
/// # Errors
/// [`Error::BufferTooSmall`], [`Error::Alignment`], [`Error::BufferUsage`] without `COPY_SRC`, [`Error::ForeignResource`] for a buffer
/// that is mapped, destroyed or of another device, [`Error::OutOfMemory`] and [`Error::DeviceLost`].
pub async fn read(
    device: &wgpu::Device,
    queue: &wgpu::Queue,
    buffer: &wgpu::Buffer,
    bytes: u64,
) -> Result<Vec<u8>> {
    check_range(0, bytes, buffer)?;
    check_usage("the buffer to read", buffer, wgpu::BufferUsages::COPY_SRC, "COPY_SRC")?;
    if bytes == 0 {
        return Ok(Vec::new());
    }
    let staging = scoped(device, "a download", || {
        device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("mla.download"),
            size: bytes,
            usage: wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::MAP_READ,
            mapped_at_creation: false,
        })
    })?;
    hosts(device, "a read of the buffer", || {
        let mut encoder = device.create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(buffer, 0, &staging, 0, bytes);
        queue.submit([encoder.finish()]);
    })?;
    let lost = |detail: String| Error::DeviceLost { detail };
    let mapped = Answer::default();
    let answer = mapped.clone();
    staging.map_async(wgpu::MapMode::Read, .., move |result| answer.give(result));
    // In a browser this does nothing: its event loop maps.
    device.poll(wgpu::PollType::wait_indefinitely()).map_err(|error| lost(error.to_string()))?;
    mapped.wait().await.map_err(|error| lost(error.to_string()))?;
    let view = staging.get_mapped_range(..).map_err(|error| lost(error.to_string()))?;
    Ok(view.to_vec())
}

/// Where a callback leaves its result, and who waits for it.
#[derive(Clone, Default)]
struct Answer(Arc<Mutex<(Option<Mapped>, Option<Waker>)>>);

type Mapped = std::result::Result<(), wgpu::BufferAsyncError>;

impl Answer {
    fn give(&self, result: Mapped) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 = Some(result);
        if let Some(waker) = state.1.take() {
            waker.wake();
        }
    }

    async fn wait(&self) -> Mapped {
        poll_fn(|context| {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            match state.0.take() {
                Some(result) => Poll::Ready(result),
                None => {
                    state.1 = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

/// # Errors
/// [`Error::BufferUsage`].
pub(super) fn check_usage(
    what: &'static str,
    buffer: &wgpu::Buffer,
    needed: wgpu::BufferUsages,
    usage: &'static str,
) -> Result<()> {
    if buffer.usage().contains(needed) { Ok(()) } else { Err(Error::BufferUsage { what, usage }) }
}

/// # Errors
/// [`Error::Alignment`] and [`Error::BufferTooSmall`].
pub(super) fn check_range(offset: u64, bytes: u64, buffer: &wgpu::Buffer) -> Result<()> {
    for (what, got) in [("offset", offset), ("length", bytes)] {
        if got % 4 != 0 {
            return Err(Error::Alignment { what, got, of: 4, unit: "bytes" });
        }
    }
    let end = offset.saturating_add(bytes);
    if end > buffer.size() {
        return Err(Error::BufferTooSmall { what: "copied range", end, size: buffer.size() });
    }
    Ok(())
}
