//! What a device can do, as plain data, so that tests can imitate a weaker device on a stronger one.

/// Storage buffers that a decode binds: q_nope, q_pe, kv, out, lse, tables, page list or lists of slots, and the step's partial results.
pub(crate) const STORAGE_BUFFERS: u32 = 8;

/// The kind of device, as far as scheduling cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceKind {
    /// A card with memory of its own.
    Discrete,
    /// Shares memory with the CPU.
    Integrated,
    /// Software rendering.
    Software,
    /// A virtual GPU, or one that does not say.
    Other,
}

/// Capabilities that kernels and planner look at. Limits are those the device was made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caps {
    /// Kind of device.
    pub kind: DeviceKind,
    /// Subgroup operations in compute shaders.
    pub subgroups: bool,
    /// Smallest subgroup a shader may run with; 0 where unknown.
    pub min_subgroup_size: u32,
    /// Largest subgroup a shader may run with; 0 where unknown.
    pub max_subgroup_size: u32,
    /// f16 arithmetic.
    pub shader_f16: bool,
    /// Side of the cooperative matrices of f16 that a subgroup multiplies into f32: 16, 8, or 0 for none. The
    /// device needs SHADER_F16 and SHADER_I16 for them too, and the pipelines its adapter.
    pub cooperative_tile: u32,
    /// The device has cooperative matrices, of sizes that only its adapter tells, which was not given: none are used.
    pub matrices_unknown: bool,
    /// The driver's compiler is known to hold the loads of two blocks beside a tile of 32 rows without spilling registers.
    pub deep_loads: bool,
    /// `unpack2x16float` is known to keep f16 subnormals, which WGSL leaves open: e4m3 is then read through f16.
    pub f16_subnormals: bool,
    /// Workgroup memory of one workgroup.
    pub workgroup_memory_bytes: u32,
    /// Invocations of one workgroup.
    pub max_invocations: u32,
    /// Storage buffers one shader may bind.
    pub max_storage_buffers: u32,
    /// Largest range of one storage binding.
    pub max_binding_bytes: u64,
    /// Largest buffer.
    pub max_buffer_bytes: u64,
    /// Workgroups in one dimension of a dispatch.
    pub max_workgroups: u32,
}

impl Caps {
    /// WebGPU's default limits and no feature: what every adapter has.
    pub const WEBGPU: Self = Self {
        kind: DeviceKind::Other,
        subgroups: false,
        min_subgroup_size: 0,
        max_subgroup_size: 0,
        shader_f16: false,
        cooperative_tile: 0,
        matrices_unknown: false,
        deep_loads: false,
        f16_subnormals: false,
        workgroup_memory_bytes: 16 << 10,
        max_invocations: 256,
        max_storage_buffers: 8,
        max_binding_bytes: 128 << 20,
        max_buffer_bytes: 256 << 20,
        max_workgroups: 65_535,
    };

    /// The capabilities that both have, with the kind of the other. Subgroup sizes range over those of either.
    #[must_use]
    pub fn no_better_than(self, other: &Self) -> Self {
        let subgroups = self.subgroups && other.subgroups;
        let size = |lanes: u32| if subgroups { lanes } else { 0 };
        let tile = if self.cooperative_tile == other.cooperative_tile { self.cooperative_tile } else { 0 };
        Self {
            kind: other.kind,
            subgroups,
            min_subgroup_size: size(self.min_subgroup_size.min(other.min_subgroup_size)),
            max_subgroup_size: size(self.max_subgroup_size.max(other.max_subgroup_size)),
            shader_f16: self.shader_f16 && other.shader_f16,
            cooperative_tile: tile,
            matrices_unknown: self.matrices_unknown && other.matrices_unknown,
            deep_loads: self.deep_loads && other.deep_loads,
            f16_subnormals: self.f16_subnormals && other.f16_subnormals,
            workgroup_memory_bytes: self.workgroup_memory_bytes.min(other.workgroup_memory_bytes),
            max_invocations: self.max_invocations.min(other.max_invocations),
            max_storage_buffers: self.max_storage_buffers.min(other.max_storage_buffers),
            max_binding_bytes: self.max_binding_bytes.min(other.max_binding_bytes),
            max_buffer_bytes: self.max_buffer_bytes.min(other.max_buffer_bytes),
            max_workgroups: self.max_workgroups.min(other.max_workgroups),
        }
    }

    fn with_subgroups_to_32(self) -> Self {
        let min = self.min_subgroup_size.min(8);
        Self { min_subgroup_size: min, max_subgroup_size: if self.subgroups { 32 } else { 0 }, ..self }
    }

    /// Whether subgroups vary from 8 lanes, or from 16, to 32, which only Intel's do: the more registers a kernel takes, the fewer lanes
    /// its compiler gives it, and with more than 128 a lane at the fewest it spills.
    pub(super) const fn subgroups_vary_to_32(&self) -> bool {
        matches!((self.min_subgroup_size, self.max_subgroup_size), (8 | 16, 32))
    }

    /// Every weaker set that a kernel may meet on some device: tests force each one.
    #[must_use]
    pub fn downgrades(self) -> Vec<(&'static str, Self)> {
        vec![
            ("as it is", self),
            ("no subgroups", Self { subgroups: false, min_subgroup_size: 0, max_subgroup_size: 0, ..self }),
            ("subgroups of 4", Self { min_subgroup_size: 4, max_subgroup_size: 4, ..self }),
            ("subgroups of 8 to 32, as Intel's", self.with_subgroups_to_32()),
            ("no cooperative matrices", Self { cooperative_tile: 0, deep_loads: false, ..self }),
            ("no f16", Self { shader_f16: false, f16_subnormals: false, ..self }),
            (
                "32 KiB of workgroup memory",
                Self { workgroup_memory_bytes: self.workgroup_memory_bytes.min(32 << 10), ..self },
            ),
            (
                "16 KiB of workgroup memory",
                Self { workgroup_memory_bytes: self.workgroup_memory_bytes.min(16 << 10), ..self },
            ),
            ("WebGPU's defaults", Self { kind: self.kind, ..Self::WEBGPU }),
        ]
    }
}
