//! The part of a caller's buffer that a shader sees.

use std::ops::Range;

use super::device::Gpu;
use crate::base::error::{Error, Result};
use crate::base::view::View;
use crate::cache::{KvSpec, KvView, MlaShape};

/// Shaders count elements in `u32`, and an element has at least a byte.
const MAX_BINDING_BYTES: u64 = (u32::MAX as u64) & !255;

/// The part of a buffer that a shader sees.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window<'a> {
    what: &'static str,
    buffer: &'a wgpu::Buffer,
    /// Bytes of the buffer before it.
    offset: u64,
    size: u64,
}

impl<'a> Window<'a> {
    /// The whole buffer where the device can bind it, else the aligned part around the bytes `view`; that part too where arrays share
    /// buffers.
    ///
    /// # Errors
    /// [`Error::BufferUsage`], [`Error::BufferTooSmall`] where the last word is torn, and [`Error::Limit`].
    pub(crate) fn new(
        gpu: &Gpu,
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
        let limit = gpu.caps().max_binding_bytes.min(MAX_BINDING_BYTES);
        if size <= limit && !gpu.shared.shared_buffers {
            return Ok(Self { what, buffer, offset: 0, size });
        }
        let offset =
            view.start - view.start % u64::from(gpu.device().limits().min_storage_buffer_offset_alignment);
        let need = end - offset;
        if need > limit {
            let cure = match what {
                "kv" => {
                    "make the device with `wanted`'s max_storage_buffer_binding_size, or cut the pool into slabs: `KvView::in_slabs`"
                }
                _ => "make the device with `wanted`'s max_storage_buffer_binding_size, or use smaller arrays",
            };
            return Err(Error::Limit { what, need, limit, cure });
        }
        Ok(Self { what, buffer, offset, size: need })
    }

    /// The window of a view of `[tokens, heads, dim]` elements of `bytes` bytes.
    ///
    /// # Errors
    /// The errors of [`Window::new`].
    pub(crate) fn of(
        gpu: &Gpu,
        what: &'static str,
        view: &View<&'a wgpu::Buffer>,
        [tokens, heads, dim]: [u32; 3],
        bytes: usize,
    ) -> Result<Self> {
        let end = view.end(tokens.into(), heads.into(), dim.into());
        let bytes = bytes as u64;
        Self::new(gpu, what, view.buffer, view.offset.saturating_mul(bytes)..end.saturating_mul(bytes))
    }

    /// The window of a layer's cache.
    ///
    /// # Errors
    /// The errors of [`Window::new`].
    pub(crate) fn of_cache(
        gpu: &Gpu,
        view: &KvView<&'a wgpu::Buffer>,
        kv: &KvSpec,
        shape: &MlaShape,
    ) -> Result<Self> {
        Self::new(gpu, "kv", view.buffer, view.base()..view.end(kv, shape))
    }

    /// Where element `offset` of the buffer is in the window, in units of `unit` elements of `bytes` bytes.
    pub(crate) fn at(&self, offset: u64, bytes: usize, unit: u64) -> u32 {
        ((offset - self.offset / bytes as u64) / unit) as u32
    }

    pub(crate) fn resource(&self) -> Bound<'a> {
        let size = std::num::NonZeroU64::new(self.size);
        let binding = wgpu::BufferBinding { buffer: self.buffer, offset: self.offset, size };
        Bound { what: self.what, resource: wgpu::BindingResource::Buffer(binding) }
    }
}

/// What is bound, by its name in errors.
#[derive(Debug, Clone)]
pub(crate) struct Bound<'a> {
    pub(crate) what: &'static str,
    pub(crate) resource: wgpu::BindingResource<'a>,
}

impl<'a> From<wgpu::BindingResource<'a>> for Bound<'a> {
    fn from(resource: wgpu::BindingResource<'a>) -> Self {
        Self { what: "an array of this crate's", resource }
    }
}

impl Bound<'_> {
    /// Whether both have bytes of one buffer in common.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let (wgpu::BindingResource::Buffer(a), wgpu::BindingResource::Buffer(b)) =
            (&self.resource, &other.resource)
        else {
            return false;
        };
        let end =
            |it: &wgpu::BufferBinding<'_>| it.size.map_or(it.buffer.size(), |size| it.offset + size.get());
        a.buffer == b.buffer && a.offset < end(b) && b.offset < end(a)
    }
}

/// A stride in units of `unit` elements. That of a dimension of one is unused and may be anything; every other is less than the window.
pub(crate) fn stride(count: u32, stride: u64, unit: u64) -> u32 {
    if count > 1 { (stride / unit) as u32 } else { 0 }
}
