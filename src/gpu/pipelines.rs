//! From WGSL to compiled pipelines, kept by their text and layouts, and from a caller's buffers to bind groups.

use std::num::NonZero;
use std::ops::Deref;
use std::sync::{Arc, PoisonError};

use super::buffer::Bound;
use super::device::Gpu;
pub(super) use super::device::Pipeline;
use super::disk_cache::DiskCache;
use super::kernels::GROUP;
use super::kernels::compose::Source;
use super::limits::{self, Bindings};
use super::scope::{scoped, uniform};
use crate::base::error::{Error, Result};

/// How a shader accesses a binding.
#[derive(Debug, Clone, Copy)]
pub enum Access {
    Uniform,
    /// With a dynamic offset, of at least so many bytes: given here, wgpu does not check it at each dispatch.
    UniformAt(u64),
    Read,
    /// Only read, but bound as an array that is written.
    ReadPinned,
    Write,
    /// No binding of this number.
    Absent,
}

impl Access {
    fn bindings(self) -> Bindings {
        match self {
            Self::Uniform => Bindings { uniforms: 1, ..Bindings::default() },
            Self::UniformAt(uniform_bytes) => Bindings { uniforms: 1, dynamic: 1, uniform_bytes, storage: 0 },
            Self::Read | Self::ReadPinned | Self::Write => Bindings { storage: 1, ..Bindings::default() },
            Self::Absent => Bindings::default(),
        }
    }
}

/// The layout of a bind group, and what it takes of the device's limits.
#[derive(Debug)]
pub(super) struct Layout {
    raw: wgpu::BindGroupLayout,
    bindings: Bindings,
    accesses: Vec<Access>,
}

impl Deref for Layout {
    type Target = wgpu::BindGroupLayout;

    fn deref(&self) -> &wgpu::BindGroupLayout {
        &self.raw
    }
}

/// The layout of a bind group, its bindings in order.
///
/// # Errors
/// [`Error::Limit`], and those of [`scoped`].
pub(super) fn layout(gpu: &Gpu, label: &'static str, accesses: &[Access]) -> Result<Layout> {
    let bindings = accesses.iter().fold(Bindings::default(), |all, access| all.with(access.bindings()));
    bindings.check_group(gpu)?;
    let entry = |(binding, access): (u32, &Access)| {
        let (ty, size) = match *access {
            Access::Absent => return None,
            Access::Uniform => (wgpu::BufferBindingType::Uniform, None),
            Access::UniformAt(bytes) => (wgpu::BufferBindingType::Uniform, NonZero::new(bytes)),
            Access::Read => {
                (wgpu::BufferBindingType::Storage { read_only: !gpu.shared.shared_buffers }, None)
            }
            Access::ReadPinned | Access::Write => {
                (wgpu::BufferBindingType::Storage { read_only: false }, None)
            }
        };
        Some(wgpu::BindGroupLayoutEntry {
            binding,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset: size.is_some(), min_binding_size: size },
            count: None,
        })
    };
    let entries: Vec<_> = (0..).zip(accesses).filter_map(entry).collect();
    let label = Some(label);
    let raw = scoped(gpu.device(), "a bind group layout", || {
        gpu.device().create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label, entries: &entries })
    })?;
    Ok(Layout { raw, bindings, accesses: accesses.to_vec() })
}

/// A bind group of these resources in order.
///
/// # Errors
/// The errors of [`numbered_group`].
pub(super) fn group<'a>(
    gpu: &Gpu,
    label: &'static str,
    layout: &Layout,
    resources: impl IntoIterator<Item = impl Into<Bound<'a>>>,
) -> Result<wgpu::BindGroup> {
    numbered_group(gpu, label, layout, (0..).zip(resources.into_iter().map(Into::into)))
}

/// A bind group of resources with the numbers of their bindings.
///
/// # Errors
/// [`Error::Aliased`] where arrays share buffers and overlap, and the errors of [`scoped`].
pub(super) fn numbered_group<'a>(
    gpu: &Gpu,
    label: &'static str,
    layout: &Layout,
    resources: impl IntoIterator<Item = (u32, Bound<'a>)>,
) -> Result<wgpu::BindGroup> {
    let resources: Vec<_> = resources.into_iter().collect();
    if gpu.shared.shared_buffers {
        check_apart(&layout.accesses, &resources)?;
    }
    let entry =
        |(binding, bound): (u32, Bound<'a>)| wgpu::BindGroupEntry { binding, resource: bound.resource };
    let entries: Vec<_> = resources.into_iter().map(entry).collect();
    scoped(gpu.device(), label, || {
        gpu.device().create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(label),
            layout,
            entries: &entries,
        })
    })
}

/// No array that is written has bytes in common with another.
///
/// # Errors
/// [`Error::Aliased`].
fn check_apart(accesses: &[Access], resources: &[(u32, Bound<'_>)]) -> Result<()> {
    let is_written =
        |&&(binding, _): &&(u32, Bound<'_>)| matches!(accesses.get(binding as usize), Some(Access::Write));
    for (written, b) in resources.iter().filter(is_written) {
        let mut others = resources.iter().filter(|(binding, _)| binding != written);
        if let Some((_, a)) = others.find(|(_, a)| a.overlaps(b)) {
            return Err(Error::Aliased { a: a.what, b: b.what });
        }
    }
    Ok(())
}

/// Bind groups of one layout, made together: `resources` gives those of each region of a step's buffers.
///
/// # Errors
/// The errors of [`scoped`].
pub(super) fn groups_of_regions<'a, R: IntoIterator<Item = wgpu::BindingResource<'a>>>(
    gpu: &Gpu,
    label: &'static str,
    layout: &wgpu::BindGroupLayout,
    regions: u32,
    resources: impl Fn(u64) -> R,
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
/// [`Error::Limit`], and those of [`numbered_group`].
pub(super) fn group_with_params<'a>(
    gpu: &Gpu,
    label: &'static str,
    layout: &Layout,
    params: &impl bytemuck::NoUninit,
    resources: impl IntoIterator<Item = impl Into<Bound<'a>>>,
) -> Result<wgpu::BindGroup> {
    check_uniform(gpu, params)?;
    let uniform = scoped(gpu.device(), label, || uniform(gpu.device(), label, bytemuck::bytes_of(params)))?;
    // Not `once(uniform).chain(resources)`: that would have to live as long as the resources do.
    let mut all: Vec<Bound<'_>> = vec![uniform.as_entire_binding().into()];
    for resource in resources {
        all.push(resource.into());
    }
    group(gpu, label, layout, all)
}

/// Whether a uniform of this size can be bound.
///
/// # Errors
/// [`Error::Limit`].
pub(super) fn check_uniform<T>(gpu: &Gpu, _: &T) -> Result<()> {
    let limit = gpu.device().limits().max_uniform_buffer_binding_size;
    limits::check([("max_uniform_buffer_binding_size", size_of::<T>() as u64, limit)])
}

/// A buffer that shaders read and the host may write, of at least a word.
///
/// # Errors
/// [`Error::Limit`], and those of [`scoped`].
pub(super) fn storage(gpu: &Gpu, label: &'static str, bytes: u64) -> Result<wgpu::Buffer> {
    buffer(gpu, label, bytes, wgpu::BufferUsages::STORAGE)
}

/// Like [`storage`], for another usage.
///
/// # Errors
/// The errors of [`scoped`].
pub(super) fn buffer(
    gpu: &Gpu,
    label: &'static str,
    bytes: u64,
    usage: wgpu::BufferUsages,
) -> Result<wgpu::Buffer> {
    let bytes = bytes.next_multiple_of(4).max(4);
    limits::check([("max_buffer_size", bytes, gpu.caps().max_buffer_bytes)])?;
    scoped(gpu.device(), label, || {
        gpu.device().create_buffer(&wgpu::BufferDescriptor {
            label: Some(label),
            size: bytes,
            usage: usage | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        })
    })
}

/// A pipeline, and the layouts of what it is bound with: group 0 a step, group 1 a layer.
#[derive(Debug)]
pub struct Pipe {
    pub(super) pipeline: Pipeline,
    pub(super) step: Layout,
    pub(super) layer: Layout,
}

impl Pipe {
    /// The pipeline of an op whose step is one binding, the `Table` of `ops/table.rs`. The two labels are those of a step's
    /// layout and of a layer's.
    ///
    /// # Errors
    /// The errors of [`Gpu::pipeline`].
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
    /// same WGSL always has the same layouts. wgpu's run-time checks are left out: docs/bounds.md proves that every index is inside its
    /// array and that every loop ends, under the name that a comment `bounds: NAME` gives beside each call.
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::Internal`] where the driver refuses it, [`Error::OutOfMemory`], [`Error::DeviceLost`].
    // In a browser wgpu's objects stay on their thread, and so does what holds them.
    #[cfg_attr(target_arch = "wasm32", allow(clippy::arc_with_non_send_sync))]
    pub(super) fn pipeline(&self, source: &Source, groups: &[&Layout]) -> Result<Pipeline> {
        let mut compiled = self.shared.pipelines.lock().unwrap_or_else(PoisonError::into_inner);
        // One text may be compiled with several layouts: a merge does not name the bindings of the split beside it.
        let accesses: Vec<_> = groups.iter().map(|group| &group.accesses).collect();
        let key = format!("{accesses:?}\n{}", source.text);
        if let Some(pipeline) = compiled.get(&key) {
            return Ok(pipeline.clone());
        }
        limits::check_kernel(self, source, groups.len())?;
        let bindings = groups.iter().fold(Bindings::default(), |all, group| all.with(group.bindings));
        bindings.check(self)?;
        let (device, label) = (self.device(), Some(source.label.as_str()));
        let groups: Vec<_> = groups.iter().map(|group| Some(&group.raw)).collect();
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
        let pipeline = Arc::new(pipeline);
        compiled.insert(key, pipeline.clone());
        Ok(pipeline)
    }

    /// Drops the compiled pipelines that no [`Compiled`](crate::Compiled), no binding and no
    /// [`BatchTables`](super::ops::BatchTables) of this device holds, and returns how many those were. Without it each is kept as long as
    /// the device, so that an op that is compiled again finds its own, as [`Device::once`](crate::Device::once) does: a host that compiles
    /// ever new specs calls it now and then.
    ///
    /// What was recorded or submitted with them still runs; wgpu frees their memory after that.
    pub fn drop_unused_pipelines(&self) -> usize {
        let mut compiled = self.shared.pipelines.lock().unwrap_or_else(PoisonError::into_inner);
        let before = compiled.len();
        compiled.retain(|_, pipeline| Arc::strong_count(pipeline) > 1);
        before - compiled.len()
    }

    fn module(&self, source: &Source) -> wgpu::ShaderModule {
        let text = source.text.as_str();
        let descriptor = wgpu::ShaderModuleDescriptor {
            label: Some(source.label.as_str()),
            source: wgpu::ShaderSource::Wgsl(match self.shared.shared_buffers {
                // `layout` has them so too.
                true => text.replace("var<storage, read>", "var<storage, read_write>").into(),
                false => text.into(),
            }),
        };
        if self.shared.checked_shaders {
            return self.device().create_shader_module(descriptor);
        }
        // SAFETY: the WGSL is this crate's own. docs/bounds.md says, under the name beside each call of `pipeline`, which check of the host
        // bounds which index, and why every loop ends.
        unsafe {
            self.device().create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked())
        }
    }

    /// Workgroups for `items` items, folded in two: a dimension is limited.
    ///
    /// # Errors
    /// [`Error::Limit`] where two dimensions do not hold them.
    pub(super) fn grid(&self, items: u64) -> Result<[u32; 2]> {
        grid(items, self.caps().max_workgroups)
    }
}

/// A shader numbers the lanes in a `u32`. They are at most twice the items and a workgroup, and every op's items are at
/// most 2^30: words, or more bytes, of a binding of at most 4 GiB.
fn grid(items: u64, limit: u32) -> Result<[u32; 2]> {
    let groups = items.div_ceil(u64::from(GROUP));
    let most = u64::from(limit).pow(2);
    if groups > most {
        let cure = "take fewer tokens, rows or pages at a time, or make the device with a higher max_compute_workgroups_per_dimension";
        return Err(Error::Limit { what: "workgroups of a dispatch", need: groups, limit: most, cure });
    }
    let x = groups.min(u64::from(limit)).max(1);
    Ok([x as u32, groups.div_ceil(x) as u32])
}

/// Adds a dispatch with its bind groups, from group 0 on.
pub(super) fn dispatch(
    pass: &mut wgpu::ComputePass<'_>,
    pipeline: &Pipeline,
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
    use super::*;

    #[test]
    fn a_grid_covers_its_items() {
        for items in [0, 1, 256, 257, 65_535 * 256, 65_535 * 256 + 1, u64::from(u32::MAX)] {
            let [x, y] = grid(items, 65_535).expect("it fits");
            assert!(u64::from(x) * u64::from(y) * 256 >= items && x <= 65_535 && y <= 65_535);
            assert_eq!(y == 0, items == 0);
        }
        assert_eq!(grid(24 * 24 * 256, 24), Ok([24, 24]));
        let refused = grid(24 * 24 * 256 + 1, 24);
        assert!(matches!(refused, Err(Error::Limit { need: 577, limit: 576, .. })), "{refused:?}");
    }
}
