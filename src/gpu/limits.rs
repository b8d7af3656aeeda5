//! Checks of a device's limits before wgpu is called: a device may have been made with less than WebGPU's defaults.

use super::device::Gpu;
use super::kernels::compose::Source;
use crate::base::error::{Error, Result};

const CURE: &str = "make the device with `wanted`'s limits, or use another adapter or backend";
/// Workgroup memory of a kernel that has any and no variants for less, which is WebGPU's default.
const WORKGROUP_BYTES: u64 = 16 << 10;

/// Needs by the limit's name, each with what the device has.
///
/// # Errors
/// [`Error::Limit`] of the first that is too much.
pub(super) fn check(needs: impl IntoIterator<Item = (&'static str, u64, u64)>) -> Result<()> {
    match needs.into_iter().find(|(_, need, limit)| need > limit) {
        Some((what, need, limit)) => Err(Error::Limit { what, need, limit, cure: CURE }),
        None => Ok(()),
    }
}

/// Bindings of one bind group, or of all of a pipeline's.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Bindings {
    pub(super) storage: u32,
    pub(super) uniforms: u32,
    /// How many of the uniforms have a dynamic offset.
    pub(super) dynamic: u32,
    /// Bytes of the largest uniform, where its size is known before it is bound.
    pub(super) uniform_bytes: u64,
}

impl Bindings {
    pub(super) const fn with(self, other: Self) -> Self {
        let bytes = if self.uniform_bytes > other.uniform_bytes { self } else { other }.uniform_bytes;
        Self {
            storage: self.storage + other.storage,
            uniforms: self.uniforms + other.uniforms,
            dynamic: self.dynamic + other.dynamic,
            uniform_bytes: bytes,
        }
    }

    /// Checks that a pipeline may have these.
    ///
    /// # Errors
    /// [`Error::Limit`].
    pub(super) fn check(&self, gpu: &Gpu) -> Result<()> {
        let has = gpu.device().limits();
        let storage = gpu.caps().max_storage_buffers.min(has.max_storage_buffers_per_shader_stage);
        let all = self.storage + self.uniforms;
        check([
            ("max_storage_buffers_per_shader_stage", self.storage.into(), storage.into()),
            (
                "max_uniform_buffers_per_shader_stage",
                self.uniforms.into(),
                has.max_uniform_buffers_per_shader_stage.into(),
            ),
            (
                "max_dynamic_uniform_buffers_per_pipeline_layout",
                self.dynamic.into(),
                has.max_dynamic_uniform_buffers_per_pipeline_layout.into(),
            ),
            (
                "max_buffers_and_acceleration_structures_per_shader_stage",
                all.into(),
                has.max_buffers_and_acceleration_structures_per_shader_stage.into(),
            ),
            ("max_uniform_buffer_binding_size", self.uniform_bytes, has.max_uniform_buffer_binding_size),
        ])
    }

    /// Checks that one bind group may have these.
    ///
    /// # Errors
    /// [`Error::Limit`].
    pub(super) fn check_group(&self, gpu: &Gpu) -> Result<()> {
        let most = gpu.device().limits().max_bindings_per_bind_group;
        check([("max_bindings_per_bind_group", (self.storage + self.uniforms).into(), most.into())])?;
        self.check(gpu)
    }
}

/// Checks that a kernel's workgroups, and so many bind groups, are within the device's limits.
///
/// # Errors
/// [`Error::Limit`].
pub(super) fn check_kernel(gpu: &Gpu, source: &Source, groups: usize) -> Result<()> {
    let (has, threads) = (gpu.device().limits(), u64::from(source.threads()));
    // Ops with variants have chosen one whose memory fits.
    let has_variants =
        ["mla_decode", "mla_prefill"].contains(&source.entry) || source.text.contains("enable f16;");
    let shares = source.text.contains("var<workgroup>") && !has_variants;
    check([
        ("max_bind_groups", groups as u64, has.max_bind_groups.into()),
        ("max_compute_workgroup_size_x", threads, has.max_compute_workgroup_size_x.into()),
        (
            "max_compute_invocations_per_workgroup",
            threads,
            has.max_compute_invocations_per_workgroup.min(gpu.caps().max_invocations).into(),
        ),
        ("max_compute_workgroup_size_y", 1, has.max_compute_workgroup_size_y.into()),
        ("max_compute_workgroup_size_z", 1, has.max_compute_workgroup_size_z.into()),
        (
            "max_compute_workgroup_storage_size",
            if shares { WORKGROUP_BYTES } else { 0 },
            gpu.caps().workgroup_memory_bytes.into(),
        ),
    ])
}
