//! From a caller's buffers to a bind group: usages, aliases, windows.

use crate::gpu::scope::{scoped, uniform};
use crate::layer::View;
use crate::{Error, Result};

/// Shaders count elements in `u32`, and an element has at least a byte.
const MAX_BINDING_BYTES: u64 = (u32::MAX as u64) & !255;

/// The part of a buffer that a shader sees.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window<'a> {
    buffer: &'a wgpu::Buffer,
    offset: u64,
    size: u64,
}

impl<'a> Window<'a> {
    /// The whole buffer where the device can bind it, else the part around `[start, end)` bytes.
    ///
    /// # Errors
    /// [`Error::BufferUsage`], [`Error::BufferTooSmall`] where the last word is torn, and [`Error::Limit`].
    pub(super) fn new(
        limits: &wgpu::Limits,
        what: &'static str,
        buffer: &'a wgpu::Buffer,
        start: u64,
        end: u64,
    ) -> Result<Self> {
        if !buffer.usage().contains(wgpu::BufferUsages::STORAGE) {
            return Err(Error::BufferUsage { what, usage: "STORAGE" });
        }
        // Bindings and shaders know whole words only.
        let (end, size) = (end.next_multiple_of(4), buffer.size() & !3);
        if end > size {
            return Err(Error::BufferTooSmall { what, end, size: buffer.size() });
        }
        let limit = limits.max_storage_buffer_binding_size.min(MAX_BINDING_BYTES);
        if size <= limit {
            return Ok(Self { buffer, offset: 0, size });
        }
        let offset = start - start % u64::from(limits.min_storage_buffer_offset_alignment);
        let need = end - offset;
        if need > limit {
            let cure = "ask for a larger max_storage_buffer_binding_size, or use smaller arrays";
            return Err(Error::Limit { what, need, limit, cure });
        }
        Ok(Self { buffer, offset, size: need })
    }

    /// Elements of `bytes` bytes in front of the window.
    pub(super) fn skipped(&self, bytes: usize) -> u64 {
        self.offset / bytes as u64
    }

    pub(super) fn resource(&self) -> wgpu::BindingResource<'a> {
        let size = std::num::NonZeroU64::new(self.size);
        wgpu::BindingResource::Buffer(wgpu::BufferBinding { buffer: self.buffer, offset: self.offset, size })
    }
}

/// The window of a view of `[tokens, heads, dim]` elements of `bytes` bytes.
///
/// # Errors
/// Those of [`Window::new`].
pub(super) fn window_of<'a>(
    limits: &wgpu::Limits,
    what: &'static str,
    view: &View<'a, wgpu::Buffer>,
    [tokens, heads, dim]: [u32; 3],
    bytes: usize,
) -> Result<Window<'a>> {
    let end = view.end(tokens.into(), heads.into(), dim.into());
    let bytes = bytes as u64;
    Window::new(limits, what, view.buffer, view.offset.saturating_mul(bytes), end.saturating_mul(bytes))
}

/// # Errors
/// [`Error::Aliased`] where `output` is one of `inputs` too.
pub(super) fn distinct_buffers(
    output: (&'static str, &wgpu::Buffer),
    others: &[(&'static str, &wgpu::Buffer)],
) -> Result<()> {
    match others.iter().find(|other| other.1 == output.1) {
        Some(other) => Err(Error::Aliased { a: output.0, b: other.0 }),
        None => Ok(()),
    }
}

/// What a binding is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Slot {
    Uniform,
    Read,
    Write,
}

/// The layout of a bind group, its bindings in order.
///
/// # Errors
/// Those of [`scoped`].
pub(super) fn layout(
    device: &wgpu::Device,
    label: &'static str,
    slots: &[Slot],
) -> Result<wgpu::BindGroupLayout> {
    let entry = |(binding, slot): (usize, &Slot)| {
        let ty = match slot {
            Slot::Uniform => wgpu::BufferBindingType::Uniform,
            Slot::Read => wgpu::BufferBindingType::Storage { read_only: true },
            Slot::Write => wgpu::BufferBindingType::Storage { read_only: false },
        };
        wgpu::BindGroupLayoutEntry {
            binding: binding as u32,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None },
            count: None,
        }
    };
    let entries: Vec<_> = slots.iter().enumerate().map(entry).collect();
    let label = Some(label);
    scoped(device, "a bind group layout", || {
        device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label, entries: &entries })
    })
}

/// A bind group whose binding 0 is a uniform buffer of `params` and whose others are `resources`.
///
/// # Errors
/// Those of [`scoped`].
pub(super) fn bind_group<'a>(
    device: &wgpu::Device,
    label: &'static str,
    layout: &wgpu::BindGroupLayout,
    params: &[u8],
    resources: impl IntoIterator<Item = wgpu::BindingResource<'a>>,
) -> Result<wgpu::BindGroup> {
    scoped(device, label, || {
        let uniform = uniform(device, label, params);
        let mut entries = vec![wgpu::BindGroupEntry { binding: 0, resource: uniform.as_entire_binding() }];
        for (binding, resource) in (1..).zip(resources) {
            entries.push(wgpu::BindGroupEntry { binding, resource });
        }
        device.create_bind_group(&wgpu::BindGroupDescriptor { label: Some(label), layout, entries: &entries })
    })
}
