//! From a caller's buffers to a bind group: usages, aliases, windows.

use crate::gpu::scope::{scoped, uniform};
use crate::gpu::window::Window;
use crate::layer::View;
use crate::{Error, Result};

/// The window of a view of `[tokens, heads, dim]` elements of `bytes` bytes.
///
/// # Errors
/// Those of [`Window::new`].
pub(super) fn window_of<'a>(
    limits: &wgpu::Limits,
    what: &'static str,
    view: &View<&'a wgpu::Buffer>,
    [tokens, heads, dim]: [u32; 3],
    bytes: usize,
) -> Result<Window<'a>> {
    let end = view.end(tokens.into(), heads.into(), dim.into());
    let bytes = bytes as u64;
    Window::new(limits, what, view.buffer, view.offset.saturating_mul(bytes)..end.saturating_mul(bytes))
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
