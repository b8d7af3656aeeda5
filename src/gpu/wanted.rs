//! What a host should ask for when it makes its device, and what a device can do.

use super::caps::{Caps, DeviceKind, STORAGE_BUFFERS};

/// The part of a [`wgpu::DeviceDescriptor`] that this crate's faster kernel variants need. Made by [`wanted`]; a host may change it, and
/// add its own needs.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// For `required_features`. Those of these that the adapter has: `SUBGROUP`, `SHADER_F16`, `SHADER_I16` and
    /// `EXPERIMENTAL_COOPERATIVE_MATRIX` for kernel variants, `PIPELINE_CACHE` for [`Setup::disk_cache`](super::Setup::disk_cache),
    /// `TIMESTAMP_QUERY` to measure. Without cooperative matrices on a software adapter with subgroups of fewer than 8 lanes.
    pub features: wgpu::Features,
    /// For `required_limits`. WebGPU's defaults, or what the adapter has where that is less. Raised to what the adapter has: bytes of a
    /// storage binding and of a buffer, bytes and invocations of a workgroup. One layer's cache, or a slab of it where the pool is in
    /// several buffers ([`KvView::in_slabs`](crate::KvView::in_slabs)), has to fit one storage binding, which is 128 MiB by default.
    pub limits: wgpu::Limits,
    /// For `experimental_features`: what [`wanted`] was given. wgpu refuses a device whose `features` have an experimental one while this
    /// is disabled.
    pub experimental: wgpu::ExperimentalFeatures,
}

/// The features and limits to put into a device descriptor for this adapter.
///
/// `experimental` is the choice of cooperative matrices (tensor cores), which wgpu counts among its experimental features.
/// [`ExperimentalFeatures::enabled`](wgpu::ExperimentalFeatures::enabled) is `unsafe`, since wgpu may have bugs there that safe code runs
/// into, and it holds for the whole device, the host's own shaders included: so the host decides, not this crate. With
/// [`ExperimentalFeatures::disabled`](wgpu::ExperimentalFeatures::disabled) the variants on subgroups are the best that is selected.
/// `Gpu::new` enables them on the device that it makes.
///
/// This crate's own use is narrow: matrices are loaded from and stored to arrays of its own size, at indices known when a kernel is
/// composed, by whole subgroups. Its tests compare the results with an oracle on every device at hand.
///
/// A host adds its own needs:
///
/// ```no_run
/// # async fn host(adapter: wgpu_mla::wgpu::Adapter) -> Result<(), Box<dyn std::error::Error>> {
/// use wgpu_mla::wgpu;
/// // SAFETY: this program has no other shader that uses experimental features.
/// let experimental = unsafe { wgpu::ExperimentalFeatures::enabled() };
/// let wanted = wgpu_mla::gpu::wanted(&adapter, experimental);
/// let (device, queue) = adapter
///     .request_device(&wgpu::DeviceDescriptor {
///         required_features: wanted.features,
///         required_limits: wanted.limits,
///         experimental_features: wanted.experimental,
///         ..Default::default()
///     })
///     .await?;
/// # Ok(()) }
/// ```
#[must_use]
pub fn wanted(adapter: &wgpu::Adapter, experimental: wgpu::ExperimentalFeatures) -> Wanted {
    let useful = wgpu::Features::SUBGROUP
        | wgpu::Features::SHADER_F16
        | wgpu::Features::SHADER_I16
        | wgpu::Features::PIPELINE_CACHE
        | wgpu::Features::TIMESTAMP_QUERY
        | wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX;
    let has = adapter.limits();
    let mut limits = wgpu::Limits::default().or_worse_values_from(&has);
    limits.max_storage_buffer_binding_size = has.max_storage_buffer_binding_size;
    limits.max_buffer_size = has.max_buffer_size;
    limits.max_compute_workgroup_storage_size = has.max_compute_workgroup_storage_size;
    limits.max_compute_invocations_per_workgroup = has.max_compute_invocations_per_workgroup;
    limits.max_compute_workgroup_size_x = has.max_compute_workgroup_size_x;
    // One more than WebGPU's eight, for the lengths of lists of slots.
    limits.max_storage_buffers_per_shader_stage =
        has.max_storage_buffers_per_shader_stage.min(STORAGE_BUFFERS + 1);
    let mut features = adapter.features() & useful;
    if !experimental.is_enabled() {
        features.remove(wgpu::Features::all_experimental_mask());
    }
    if lists_matrices_that_are_off(&adapter.get_info()) {
        features.remove(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX);
    }
    Wanted { features, limits, experimental }
}

/// wgpu-hal 30 offers cooperative matrices wherever a driver lists their sizes, without a look at the driver's feature, and panics as the
/// device is made where that is off. Mesa's lavapipe has it off with vectors of 128 bits, its only width on aarch64. No kernel here runs on
/// matrices with so few lanes.
fn lists_matrices_that_are_off(info: &wgpu::AdapterInfo) -> bool {
    info.device_type == wgpu::DeviceType::Cpu && info.subgroup_max_size < 8
}

/// The capabilities of a device without its adapter: no cooperative matrices, whose sizes only the adapter tells.
#[must_use]
pub fn caps(device: &wgpu::Device) -> Caps {
    caps_on(None, device)
}

/// The capabilities of a device that was made from this adapter.
#[must_use]
pub fn caps_on(adapter: Option<&wgpu::Adapter>, device: &wgpu::Device) -> Caps {
    let (info, limits, features) = (device.adapter_info(), device.limits(), device.features());
    let subgroups = features.contains(wgpu::Features::SUBGROUP);
    let size = |lanes: u32| if subgroups { lanes } else { 0 };
    // The kernels on matrices build halves from integers.
    let matrices =
        features.contains(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX | wgpu::Features::SHADER_I16);
    let cooperative_tile = match adapter {
        Some(adapter) if matrices => cooperative_tile(&adapter.cooperative_matrix_properties()),
        _ => 0,
    };
    Caps {
        kind: match info.device_type {
            wgpu::DeviceType::DiscreteGpu => DeviceKind::Discrete,
            wgpu::DeviceType::IntegratedGpu => DeviceKind::Integrated,
            wgpu::DeviceType::Cpu => DeviceKind::Software,
            wgpu::DeviceType::VirtualGpu | wgpu::DeviceType::Other => DeviceKind::Other,
        },
        subgroups,
        min_subgroup_size: size(info.subgroup_min_size),
        max_subgroup_size: size(info.subgroup_max_size),
        cooperative_tile,
        matrices_unknown: matrices && adapter.is_none(),
        // NVIDIA's own driver on an H200. NVK spills.
        deep_loads: cooperative_tile > 0 && info.backend == wgpu::Backend::Vulkan && info.driver == "NVIDIA",
        shader_f16: features.contains(wgpu::Features::SHADER_F16),
        f16_subnormals: features.contains(wgpu::Features::SHADER_F16) && keeps_f16_subnormals(&info),
        workgroup_memory_bytes: limits.max_compute_workgroup_storage_size,
        max_invocations: limits
            .max_compute_invocations_per_workgroup
            .min(limits.max_compute_workgroup_size_x),
        max_storage_buffers: limits.max_storage_buffers_per_shader_stage,
        max_binding_bytes: limits.max_storage_buffer_binding_size,
        max_buffer_bytes: limits.max_buffer_size,
        max_workgroups: limits.max_compute_workgroups_per_dimension,
    }
}

/// The larger of the sides that the shaders support.
fn cooperative_tile(offered: &[wgpu::CooperativeMatrixProperties]) -> u32 {
    let halves = |p: &&wgpu::CooperativeMatrixProperties| {
        p.ab_type == wgpu::CooperativeScalarType::F16 && p.cr_type == wgpu::CooperativeScalarType::F32
    };
    let side = |p: &wgpu::CooperativeMatrixProperties| {
        [16, 8].into_iter().find(|&side| p.m_size == side && p.n_size == side && p.k_size == side)
    };
    offered.iter().filter(halves).filter_map(side).max().unwrap_or(0)
}

/// Devices whose conversion from f16 keeps subnormals. By Vulkan's float controls Mesa's drivers for AMD, Apple and NVIDIA
/// can keep them and the one for Adreno only flushes; tests/it/codes.rs shows what a device does. Add one where it passes.
fn keeps_f16_subnormals(info: &wgpu::AdapterInfo) -> bool {
    const AMD: u32 = 0x1002;
    const APPLE: u32 = 0x106B;
    const MESA_LAVAPIPE: u32 = 0x10005;
    const NVIDIA: u32 = 0x10DE;
    match info.backend {
        wgpu::Backend::Vulkan => [AMD, APPLE, MESA_LAVAPIPE, NVIDIA].contains(&info.vendor),
        // Metal reports no vendor.
        wgpu::Backend::Metal => info.name.starts_with("Apple"),
        _ => false,
    }
}
