//! From WGSL to compiled pipelines, kept by their text, and from a caller's buffers to bind groups.

use std::num::NonZero;
use std::sync::PoisonError;

use super::device::Gpu;
use super::disk_cache::DiskCache;
use super::kernels::GROUP;
use super::kernels::compose::Source;
use super::scope::{scoped, uniform};
use crate::Result;

/// What a binding is to a shader.
#[derive(Debug, Clone, Copy)]
pub(super) enum Access {
    Uniform,
    /// With a dynamic offset, of at least so many bytes: given here, wgpu does not check it at each dispatch.
    UniformAt(u64),
    Read,
    Write,
}

/// The layout of a bind group, its bindings in order.
///
/// # Errors
/// Those of [`scoped`].
pub(super) fn layout(gpu: &Gpu, label: &'static str, accesses: &[Access]) -> Result<wgpu::BindGroupLayout> {
    let entry = |(binding, access): (u32, &Access)| {
        let (ty, size) = match *access {
            Access::Uniform => (wgpu::BufferBindingType::Uniform, None),
            Access::UniformAt(bytes) => (wgpu::BufferBindingType::Uniform, NonZero::new(bytes)),
            Access::Read => (wgpu::BufferBindingType::Storage { read_only: true }, None),
            Access::Write => (wgpu::BufferBindingType::Storage { read_only: false }, None),
        };
        wgpu::BindGroupLayoutEntry {
            binding,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset: size.is_some(), min_binding_size: size },
            count: None,
        }
    };
    let entries: Vec<_> = (0..).zip(accesses).map(entry).collect();
    let label = Some(label);
    scoped(gpu.device(), "a bind group layout", || {
        gpu.device().create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label, entries: &entries })
    })
}

/// A bind group of these resources in order.
///
/// # Errors
/// Those of [`scoped`].
pub(super) fn group<'a>(
    gpu: &Gpu,
    label: &'static str,
    layout: &wgpu::BindGroupLayout,
    resources: impl IntoIterator<Item = wgpu::BindingResource<'a>>,
) -> Result<wgpu::BindGroup> {
    let resources = (0..).zip(resources);
    let entries: Vec<_> =
        resources.map(|(binding, resource)| wgpu::BindGroupEntry { binding, resource }).collect();
    scoped(gpu.device(), label, || {
        gpu.device().create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(label),
            layout,
            entries: &entries,
        })
    })
}

/// Bind groups of one layout, made together: `resources` gives those of each region of a step's buffers.
///
/// # Errors
/// Those of [`scoped`].
pub(super) fn groups_of_regions<'a, const N: usize>(
    gpu: &Gpu,
    label: &'static str,
    layout: &wgpu::BindGroupLayout,
    regions: u32,
    resources: impl Fn(u64) -> [wgpu::BindingResource<'a>; N],
) -> Result<Vec<wgpu::BindGroup>> {
    let group = |region: u32| {
        let resources = (0..).zip(resources(region.into()));
        let entries: Vec<_> =
            resources.map(|(binding, resource)| wgpu::BindGroupEntry { binding, resource }).collect();
        gpu.device().create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(label),
            layout,
            entries: &entries,
        })
    };
    scoped(gpu.device(), label, || (0..regions).map(group).collect())
}

/// A part of a buffer as a resource.
pub(super) fn part(buffer: &wgpu::Buffer, offset: u64, bytes: u64) -> wgpu::BindingResource<'_> {
    wgpu::BindingResource::Buffer(wgpu::BufferBinding { buffer, offset, size: NonZero::new(bytes) })
}

/// A bind group whose binding 0 is a uniform buffer of `params` and whose others are `resources`.
///
/// # Errors
/// Those of [`scoped`].
pub(super) fn group_with_params<'a>(
    gpu: &Gpu,
    label: &'static str,
    layout: &wgpu::BindGroupLayout,
    params: &impl bytemuck::NoUninit,
    resources: impl IntoIterator<Item = wgpu::BindingResource<'a>>,
) -> Result<wgpu::BindGroup> {
    let uniform = scoped(gpu.device(), label, || uniform(gpu.device(), label, bytemuck::bytes_of(params)))?;
    // Not `once(uniform).chain(resources)`: that would have to live as long as the resources do.
    let mut all = vec![uniform.as_entire_binding()];
    for resource in resources {
        all.push(resource);
    }
    group(gpu, label, layout, all)
}

/// A buffer that shaders read and the host may write, of at least a word.
///
/// # Errors
/// Those of [`scoped`].
pub(super) fn storage(gpu: &Gpu, label: &'static str, bytes: u64) -> Result<wgpu::Buffer> {
    buffer(gpu, label, bytes, wgpu::BufferUsages::STORAGE)
}

/// As [`storage`], for another usage.
///
/// # Errors
/// Those of [`scoped`].
pub(super) fn buffer(
    gpu: &Gpu,
    label: &'static str,
    bytes: u64,
    usage: wgpu::BufferUsages,
) -> Result<wgpu::Buffer> {
    scoped(gpu.device(), label, || {
        gpu.device().create_buffer(&wgpu::BufferDescriptor {
            label: Some(label),
            size: bytes.next_multiple_of(4).max(4),
            usage: usage | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        })
    })
}

/// A pipeline, and the layouts of what it is bound with: group 0 a step, group 1 a layer.
#[derive(Debug)]
pub struct Pipe {
    pub(super) pipeline: wgpu::ComputePipeline,
    pub(super) step: wgpu::BindGroupLayout,
    pub(super) layer: wgpu::BindGroupLayout,
}

impl Pipe {
    /// Of a step whose one binding is its `Table` of `ops/table.rs`. Labels are those of a step and of a layer.
    ///
    /// # Errors
    /// Those of [`Gpu::pipeline`].
    pub(super) fn new(
        gpu: &Gpu,
        [step, layer]: [&'static str; 2],
        layer_entries: &[Access],
        source: &Source,
    ) -> Result<Self> {
        let (step, layer) = (layout(gpu, step, &[Access::Read])?, layout(gpu, layer, layer_entries)?);
        Ok(Self { pipeline: gpu.pipeline(source, &[&step, &layer])?, step, layer })
    }
}

impl Gpu {
    /// The pipeline of a source, compiled if it is not yet. Layouts are explicit, so that a bind group fits every pipeline of its op; the
    /// same WGSL always has the same layouts. wgpu's run-time checks are left out: a comment beside each call says why every index is
    /// inside its array and every loop ends.
    ///
    /// # Errors
    /// [`crate::Error::Internal`] where the driver refuses it, [`crate::Error::OutOfMemory`], [`crate::Error::DeviceLost`].
    pub(super) fn pipeline(
        &self,
        source: &Source,
        groups: &[&wgpu::BindGroupLayout],
    ) -> Result<wgpu::ComputePipeline> {
        let mut compiled = self.shared.pipelines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = compiled.get(&source.text) {
            return Ok(pipeline.clone());
        }
        let (device, label) = (self.device(), Some(source.label.as_str()));
        let groups: Vec<_> = groups.iter().map(|&group| Some(group)).collect();
        let pipeline = scoped(device, source.entry, || {
            log::debug!("compiling {}", source.label);
            let layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label,
                bind_group_layouts: &groups,
                immediate_size: 0,
            });
            device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label,
                layout: Some(&layout),
                module: &self.module(source),
                entry_point: Some(source.entry),
                compilation_options: wgpu::PipelineCompilationOptions {
                    // Every shader writes its workgroup memory before it reads it.
                    zero_initialize_workgroup_memory: false,
                    ..Default::default()
                },
                cache: self.disk().and_then(DiskCache::as_wgpu),
            })
        })?;
        compiled.insert(source.text.clone(), pipeline.clone());
        Ok(pipeline)
    }

    fn module(&self, source: &Source) -> wgpu::ShaderModule {
        let descriptor = wgpu::ShaderModuleDescriptor {
            label: Some(source.label.as_str()),
            source: wgpu::ShaderSource::Wgsl(source.text.as_str().into()),
        };
        if self.shared.checked_shaders {
            return self.device().create_shader_module(descriptor);
        }
        // SAFETY: the WGSL is this crate's own, and a comment beside each call of `pipeline` says which check of the host bounds which
        // index, and why every loop ends.
        unsafe {
            self.device().create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked())
        }
    }

    /// Workgroups for `items` items, folded in two: a dimension is limited.
    pub(super) fn grid(&self, items: u64) -> [u32; 2] {
        grid(items, self.caps().max_workgroups)
    }
}

/// A shader numbers the lanes in a `u32`. They are at most twice the items and a workgroup, and every op's items are at
/// most 2^30: words, or more bytes, of a binding of at most 4 GiB.
fn grid(items: u64, limit: u32) -> [u32; 2] {
    let groups = items.div_ceil(u64::from(GROUP));
    let x = groups.min(u64::from(limit)).max(1);
    [x as u32, groups.div_ceil(x) as u32]
}

/// Adds a dispatch with its bind groups, from group 0 on.
pub(super) fn dispatch(
    pass: &mut wgpu::ComputePass<'_>,
    pipeline: &wgpu::ComputePipeline,
    groups: &[&wgpu::BindGroup],
    [x, y]: [u32; 2],
) {
    pass.set_pipeline(pipeline);
    for (index, &group) in (0..).zip(groups) {
        pass.set_bind_group(index, group, &[]);
    }
    pass.dispatch_workgroups(x, y, 1);
}

#[cfg(test)]
mod tests {
    use super::grid;

    #[test]
    fn a_grid_covers_its_items() {
        for items in [0, 1, 256, 257, 65_535 * 256, 65_535 * 256 + 1, u64::from(u32::MAX)] {
            let [x, y] = grid(items, 65_535);
            assert!(u64::from(x) * u64::from(y) * 256 >= items && x <= 65_535 && y <= 65_535);
            assert_eq!(y == 0, items == 0);
        }
    }
}
