//! Copies to the card, staged in pinned memory of our own.
//!
//! When the driver reads the host's memory depends on its kind (pageable, pinned, managed, or coherent with the card's): before the call
//! returns, or only when the stream reaches the copy. But a step's tables are rewritten in place, and a caller may change its memory after
//! the call. So bytes are copied to this ring first, whatever memory they are in. An upload waits for the stream only when it is ahead of
//! it by the size of the ring.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaEvent, CudaStream, DriverError, result, sys};

use super::library::failed;
use crate::base::error::{Error, Result};

/// Parts of the ring. Each has an event, which is recorded after its copies.
const PARTS: usize = 4;
const PART_BYTES: usize = 1 << 20;
/// Alignment of a copy's first byte in the ring.
const ALIGNMENT: usize = 64;

/// A ring of staging memory, made by the first upload.
#[derive(Clone, Default)]
pub(super) struct Uploads(Arc<Mutex<Option<Ring>>>);

struct Ring {
    stream: Arc<CudaStream>,
    /// Pinned memory of `PARTS * PART_BYTES` bytes.
    memory: *mut u8,
    copied: [CudaEvent; PARTS],
    /// The part that is written, and how much of it.
    part: usize,
    used: usize,
}

// SAFETY: the ring alone points to its memory, and only who holds the ring uses it.
unsafe impl Send for Ring {}

impl Uploads {
    /// Copies to an address on the card in the stream's order, which is the same for all calls. `bytes` may be changed when it returns.
    ///
    /// # Safety
    /// `to` is the address of at least `bytes.len()` bytes in the stream's context.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`] in a capture: a graph would copy what the ring holds when it is launched. [`Error::Cuda`].
    pub(super) unsafe fn copy(&self, stream: &Arc<CudaStream>, to: u64, bytes: &[u8]) -> Result<()> {
        let status = stream.capture_status().map_err(failed("an upload"))?;
        if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            let detail = "an upload or a prepare within a capture of the stream: make it before or after";
            return Err(Error::LayoutMismatch { detail });
        }
        let mut ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ring = match &mut *ring {
            Some(ring) => ring,
            none => none.insert(Ring::new(stream).map_err(failed("memory to stage uploads"))?),
        };
        // SAFETY: as the caller promises.
        unsafe { ring.copy(to, bytes) }.map_err(failed("an upload"))
    }
}

impl Ring {
    fn new(stream: &Arc<CudaStream>) -> std::result::Result<Self, DriverError> {
        let context = stream.context();
        let event = || context.new_event(None);
        let copied = [event()?, event()?, event()?, event()?];
        context.bind_to_thread()?;
        // SAFETY: what is not written is not read.
        let memory = unsafe { result::malloc_host(PARTS * PART_BYTES, 0) }?.cast();
        Ok(Self { stream: stream.clone(), memory, copied, part: 0, used: 0 })
    }

    /// # Safety
    /// The same holds as for [`Uploads::copy`].
    unsafe fn copy(&mut self, mut to: u64, mut bytes: &[u8]) -> std::result::Result<(), DriverError> {
        self.stream.context().bind_to_thread()?;
        while !bytes.is_empty() {
            if self.used == PART_BYTES {
                self.next_part()?;
            }
            let (now, rest) = bytes.split_at(bytes.len().min(PART_BYTES - self.used));
            // SAFETY: inside of the part, of which the stream copies nothing from here on; it is not written again before its event.
            let staged = unsafe {
                let at = self.memory.add(self.part * PART_BYTES + self.used);
                std::ptr::copy_nonoverlapping(now.as_ptr(), at, now.len());
                std::slice::from_raw_parts(at, now.len())
            };
            self.used += now.len().next_multiple_of(ALIGNMENT);
            // SAFETY: the caller promises what lies there; the staged bytes outlive the copy.
            unsafe { result::memcpy_htod_async(to, staged, self.stream.cu_stream()) }?;
            (to, bytes) = (to + now.len() as u64, rest);
        }
        Ok(())
    }

    /// Goes on to the next part, once the copies from it were made.
    fn next_part(&mut self) -> std::result::Result<(), DriverError> {
        self.copied[self.part].record(&self.stream)?;
        let next = (self.part + 1) % PARTS;
        self.copied[next].synchronize()?;
        (self.part, self.used) = (next, 0);
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // Memory that the stream may still read is not freed.
        if self.stream.synchronize().is_ok() {
            // SAFETY: it is `malloc_host`'s, and nothing uses it any more.
            let _ = unsafe { result::free_host(self.memory.cast()) };
        }
    }
}
