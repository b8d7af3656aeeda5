//! Compiled pipelines, kept by their text, and the bind group layouts that all of a decode's pipelines share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::disk_cache::DiskCache;
use super::scope::scoped;
use super::wanted::caps_on;
use crate::caps::Caps;
use crate::compose::Source;
use crate::kernel::VARIANTS;
use crate::{MlaSpec, Result};

/// A device's pipelines: two decodes with the same shaders compile them once. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Pipelines {
    shared: Arc<Shared>,
}

/// What [`Pipelines::open`] may know or be asked beyond a device.
#[derive(Debug, Clone, Copy, Default)]
pub struct Setup<'a> {
    /// The adapter that the device was made from: only it tells of cooperative matrices. Rows on tensor cores are not
    /// chosen without it.
    pub adapter: Option<&'a wgpu::Adapter>,
    /// Where to keep what the driver compiled, if the device was made with [`wgpu::Features::PIPELINE_CACHE`]: see
    /// [`DiskCache`]. Call [`Pipelines::save`] once all is compiled.
    pub disk_cache: Option<&'a std::path::Path>,
    /// Keeps wgpu's run-time checks of every index and loop in kernels that do without, since the host has proved them.
    /// The environment variable `MLA_CHECKED_SHADERS` does the same.
    pub checked_shaders: bool,
}

#[derive(Debug)]
struct Shared {
    device: wgpu::Device,
    caps: Caps,
    /// By text.
    compiled: Mutex<HashMap<String, wgpu::ComputePipeline>>,
    disk: Option<DiskCache>,
    checked_shaders: bool,
}

impl Pipelines {
    /// An empty store on a device. The device is only referred to: it stays the host's.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::open(device, &Setup::default())
    }

    /// As [`Pipelines::new`], knowing more. Give it the adapter, or rows on tensor cores are not chosen.
    // In a browser wgpu's objects stay on their thread, and so does what holds them.
    #[cfg_attr(target_arch = "wasm32", allow(clippy::arc_with_non_send_sync))]
    pub fn open(device: &wgpu::Device, setup: &Setup<'_>) -> Self {
        let shared = Shared {
            device: device.clone(),
            caps: caps_on(setup.adapter, device),
            compiled: Mutex::default(),
            disk: setup.disk_cache.map(|directory| DiskCache::open(device, directory)),
            checked_shaders: setup.checked_shaders || std::env::var_os("MLA_CHECKED_SHADERS").is_some(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Writes the file of [`Setup::disk_cache`], if what was compiled changed it. True if it was written.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn save(&self) -> std::io::Result<bool> {
        self.shared.disk.as_ref().map_or(Ok(false), DiskCache::save)
    }

    /// The file behind the store.
    pub fn disk(&self) -> Option<&DiskCache> {
        self.shared.disk.as_ref()
    }

    /// The device.
    pub fn device(&self) -> &wgpu::Device {
        &self.shared.device
    }

    /// What the device can do.
    pub fn caps(&self) -> &Caps {
        &self.shared.caps
    }

    /// Every decode variant there is, best first, and what keeps it from running on this device for a spec, if anything does.
    pub fn ladder(&self, spec: &MlaSpec) -> Vec<(&'static str, Option<String>)> {
        VARIANTS.iter().map(|variant| (variant.name, variant.runs_on(self.caps(), spec).err())).collect()
    }

    /// The pipeline of a source over a layout, compiled now if it is not yet. One text has one layout. wgpu's run-time checks
    /// are left out: whoever calls this writes down beside the call why every index is inside its array and every loop ends.
    ///
    /// # Errors
    /// [`crate::Error::Internal`] where the driver refuses it, [`crate::Error::OutOfMemory`], [`crate::Error::DeviceLost`].
    pub(crate) fn get(
        &self,
        source: &Source,
        layout: &wgpu::PipelineLayout,
    ) -> Result<wgpu::ComputePipeline> {
        let mut compiled = self.shared.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = compiled.get(&source.text) {
            return Ok(pipeline.clone());
        }
        let device = &self.shared.device;
        let pipeline = scoped(device, source.entry, || {
            log::debug!("compiling {}", source.label);
            let label = Some(source.label.as_str());
            let descriptor = wgpu::ShaderModuleDescriptor {
                label,
                source: wgpu::ShaderSource::Wgsl(source.text.as_str().into()),
            };
            let module = if self.shared.checked_shaders {
                device.create_shader_module(descriptor)
            } else {
                // SAFETY: the text is this crate's own, and whoever calls this has written down beside the call which check
                // of the host bounds which index, and why every loop ends.
                unsafe {
                    let checks = wgpu::ShaderRuntimeChecks::unchecked();
                    device.create_shader_module_trusted(descriptor, checks)
                }
            };
            device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label,
                layout: Some(layout),
                module: &module,
                entry_point: Some(source.entry),
                compilation_options: wgpu::PipelineCompilationOptions {
                    // Every shader writes its workgroup memory before it reads it.
                    zero_initialize_workgroup_memory: false,
                    ..Default::default()
                },
                cache: self.shared.disk.as_ref().and_then(DiskCache::as_wgpu),
            })
        })?;
        compiled.insert(source.text.clone(), pipeline.clone());
        Ok(pipeline)
    }
}

/// The bind group layouts of a step's kernels: group 0 a layer, group 1 a step.
#[derive(Debug, Clone)]
pub(crate) struct Layouts {
    pub(crate) layer: wgpu::BindGroupLayout,
    pub(crate) step: wgpu::BindGroupLayout,
    pub(crate) pipeline: wgpu::PipelineLayout,
}

impl Layouts {
    pub(crate) fn new(device: &wgpu::Device, pins_loads: bool) -> Result<Self> {
        scoped(device, "bind group layouts", || {
            let layer = bind_group_layout(
                device,
                "mla.layer",
                &[
                    storage(true),
                    storage(true),
                    storage(!pins_loads),
                    storage(false),
                    storage(false),
                    uniform(false),
                ],
            );
            let step = bind_group_layout(
                device,
                "mla.step",
                &[storage(!pins_loads), storage(false), uniform(true), storage(!pins_loads)],
            );
            let pipeline = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: Some("mla"),
                bind_group_layouts: &[Some(&layer), Some(&step)],
                immediate_size: 0,
            });
            Self { layer, step, pipeline }
        })
    }
}

pub(crate) fn bind_group_layout(
    device: &wgpu::Device,
    label: &str,
    types: &[wgpu::BindingType],
) -> wgpu::BindGroupLayout {
    let entries: Vec<_> = types
        .iter()
        .zip(0..)
        .map(|(&ty, binding)| wgpu::BindGroupLayoutEntry {
            binding,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty,
            count: None,
        })
        .collect();
    device
        .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some(label), entries: &entries })
}

pub(crate) const fn storage(read_only: bool) -> wgpu::BindingType {
    let ty = wgpu::BufferBindingType::Storage { read_only };
    wgpu::BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None }
}

pub(crate) const fn uniform(has_dynamic_offset: bool) -> wgpu::BindingType {
    let ty = wgpu::BufferBindingType::Uniform;
    // Known, so that a dispatch has nothing left to check.
    let bytes = size_of::<super::step::SliceUniform>() as u64;
    let min_binding_size = if has_dynamic_offset { std::num::NonZero::new(bytes) } else { None };
    wgpu::BindingType::Buffer { ty, has_dynamic_offset, min_binding_size }
}
