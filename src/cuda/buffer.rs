//! Memory on the card.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, result};

use super::library::failed;
use super::uploads::Uploads;
use crate::base::error::{Error, Result};

/// Memory that the CUDA backend's kernels read and write. Clones share it.
#[derive(Clone)]
pub struct Buffer {
    address: u64,
    bytes: u64,
    /// None where the memory is the host's own.
    owner: Option<Arc<CudaSlice<u8>>>,
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Buffer {
    pub(super) fn zeroed(stream: &Arc<CudaStream>, bytes: u64) -> Result<Self> {
        let bytes = bytes.checked_next_multiple_of(16).ok_or(Error::OutOfMemory { what: "a buffer" })?;
        let buffer = Self::uninitialized(stream, bytes.max(16))?;
        // SAFETY: the memory was just made, with this many bytes, on this stream.
        let set =
            unsafe { result::memset_d8_async(buffer.address, 0, buffer.bytes as usize, stream.cu_stream()) };
        set.map_err(failed("to clear a buffer")).map(|()| buffer)
    }

    pub(super) fn uninitialized(stream: &Arc<CudaStream>, bytes: u64) -> Result<Self> {
        stream.context().bind_to_thread().map_err(failed("a buffer"))?;
        let out_of_memory = Error::OutOfMemory { what: "a buffer" };
        let len = usize::try_from(bytes).map_err(|_| out_of_memory)?;
        // SAFETY: every byte is a value of u8; what is not written is not read.
        let slice = unsafe { stream.alloc::<u8>(len) }.map_err(failed("a buffer"))?;
        let address = slice.device_ptr(stream).0;
        Ok(Self { address, bytes, owner: Some(Arc::new(slice)) })
    }

    /// Memory that the host allocated itself.
    ///
    /// # Safety
    /// `address` is of `bytes` bytes of memory that the stream's context can use, aligned to 16 bytes, for as long as a clone of this
    /// buffer, or a binding or graph made of it, is used.
    #[must_use]
    pub unsafe fn from_raw(address: u64, bytes: u64) -> Self {
        Self { address, bytes, owner: None }
    }

    /// Where it begins on the card.
    #[must_use]
    pub fn ptr(&self) -> u64 {
        self.address
    }

    /// Bytes that it holds.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A part that lies inside, which shares the memory.
    pub(super) fn part(&self, offset: u64, bytes: u64) -> Self {
        Self { address: self.address + offset, bytes, owner: self.owner.clone() }
    }

    /// Whether both keep the same memory alive; host's memory is kept by none.
    pub(super) fn shares_owner(&self, other: &Self) -> bool {
        match (&self.owner, &other.owner) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            (None, None) => self.address == other.address,
            _ => false,
        }
    }

    pub(super) fn same_as(&self, other: &Self) -> bool {
        self.address < other.address + other.bytes && other.address < self.address + self.bytes
    }

    /// In the stream's order; `bytes` may be changed when it returns.
    pub(super) fn upload(
        &self,
        uploads: &Uploads,
        stream: &Arc<CudaStream>,
        offset: u64,
        bytes: &[u8],
    ) -> Result<()> {
        self.check("upload", offset, bytes.len() as u64)?;
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: inside of the buffer, as was just checked, whose memory is of the device's context.
        unsafe { uploads.copy(stream, self.address + offset, bytes) }
    }

    pub(super) fn download(&self, stream: &Arc<CudaStream>, bytes: u64) -> Result<Vec<u8>> {
        self.check("download", 0, bytes)?;
        let mut out = Vec::new();
        let out_of_memory = |_| Error::OutOfMemory { what: "a download" };
        out.try_reserve_exact(bytes as usize).map_err(out_of_memory)?;
        out.resize(bytes as usize, 0u8);
        stream.context().bind_to_thread().map_err(failed("a download"))?;
        if bytes > 0 {
            // SAFETY: inside of the buffer, as was just checked; `out` is kept until the stream has written it.
            unsafe { result::memcpy_dtoh_async(&mut out, self.address, stream.cu_stream()) }
                .map_err(failed("a download"))?;
        }
        stream.synchronize().map_err(failed("to wait for the card"))?;
        Ok(out)
    }

    fn check(&self, what: &'static str, offset: u64, bytes: u64) -> Result<()> {
        for got in [offset, bytes] {
            if !got.is_multiple_of(4) {
                return Err(Error::Alignment { what, got, of: 4, unit: "bytes" });
            }
        }
        crate::base::view::fits(what, offset.saturating_add(bytes), self.bytes)
    }
}
