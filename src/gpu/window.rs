//! The part of a caller's buffer that a shader sees.

use std::ops::Range;

use crate::{Error, Result};

/// Shaders count elements in `u32`, and an element has at least a byte.
const MAX_BINDING_BYTES: u64 = (u32::MAX as u64) & !255;

/// The part of a buffer that a shader sees.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window<'a> {
    buffer: &'a wgpu::Buffer,
    /// Bytes in front of it.
    pub(crate) offset: u64,
    size: u64,
}

impl<'a> Window<'a> {
    /// The whole buffer where the device can bind it, else the aligned part around the bytes `view`.
    ///
    /// # Errors
    /// [`Error::BufferUsage`], [`Error::BufferTooSmall`] where the last word is torn, and [`Error::Limit`].
    pub(crate) fn new(
        limits: &wgpu::Limits,
        what: &'static str,
        buffer: &'a wgpu::Buffer,
        view: Range<u64>,
    ) -> Result<Self> {
        if !buffer.usage().contains(wgpu::BufferUsages::STORAGE) {
            return Err(Error::BufferUsage { what, usage: "STORAGE" });
        }
        // Bindings and shaders know whole words only.
        let (end, size) = (view.end.next_multiple_of(4), buffer.size() & !3);
        if end > size {
            return Err(Error::BufferTooSmall { what, end, size: buffer.size() });
        }
        let limit = limits.max_storage_buffer_binding_size.min(MAX_BINDING_BYTES);
        if size <= limit {
            return Ok(Self { buffer, offset: 0, size });
        }
        let offset = view.start - view.start % u64::from(limits.min_storage_buffer_offset_alignment);
        let need = end - offset;
        if need > limit {
            let cure =
                "make the device with `wanted`'s max_storage_buffer_binding_size, or use smaller arrays";
            return Err(Error::Limit { what, need, limit, cure });
        }
        Ok(Self { buffer, offset, size: need })
    }

    /// Elements of `bytes` bytes in front of the window.
    pub(crate) fn skipped(&self, bytes: usize) -> u64 {
        self.offset / bytes as u64
    }

    pub(crate) fn resource(&self) -> wgpu::BindingResource<'a> {
        let size = std::num::NonZeroU64::new(self.size);
        wgpu::BindingResource::Buffer(wgpu::BufferBinding { buffer: self.buffer, offset: self.offset, size })
    }
}
