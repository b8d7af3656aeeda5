//! The memory bandwidth that this device gives to a shader that only reads, or only copies: the ceiling of every other figure.

use wgpu_mla::gpu::Gpu;
use wgpu_mla::{DeviceKind, Dtype, wgpu};

use super::Result;
use super::clock::{Clock, Passes};
use super::paint::{Canvas, Paint};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Bytes read.
    Read,
    /// Bytes read and written.
    Copy,
}

/// GB/s, the best over some numbers of workgroups, and the bytes it was measured over.
pub fn measure(gpu: &Gpu, kind: Kind, test: bool) -> Result<(f64, u64)> {
    let is_software = gpu.caps().kind == DeviceKind::Software;
    let limits = gpu.device().limits();
    let largest = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
    let wanted: u64 = match (test, is_software, kind) {
        (true, ..) => 4 << 20,
        (_, true, _) => 64 << 20,
        (.., Kind::Read) => (1 << 30) + (128 << 20),
        (.., Kind::Copy) => 640 << 20,
    };
    let bytes = wanted.min(largest);
    let source = gpu.painted(&Paint::new(Dtype::F32), bytes / 4)?;
    let target_bytes = if kind == Kind::Copy { bytes } else { 16 };
    let target = gpu.painted(&Paint::new(Dtype::F32), target_bytes / 4)?;
    let (entry, turn) = match kind {
        Kind::Read => ("read_all", 8),
        Kind::Copy => ("copy_all", 4),
    };
    let module = gpu.device().create_shader_module(wgpu::ShaderModuleDescriptor {
        label: Some("ceiling"),
        source: wgpu::ShaderSource::Wgsl(include_str!("ceiling.wgsl").into()),
    });
    let pipeline = gpu.device().create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some(entry),
        layout: None,
        module: &module,
        entry_point: Some(entry),
        compilation_options: Default::default(),
        cache: None,
    });
    let clock = Clock::new(gpu, if test { 1 } else { 9 });
    let grids: &[u32] = if is_software { &[16, 64] } else { &[264, 528, 1056, 2112, 4224, 16_896] };
    let mut best = (0.0, 0);
    for &groups in grids {
        let turn_bytes = u64::from(groups) * 256 * 16 * turn;
        let walked = bytes / turn_bytes * turn_bytes;
        if walked == 0 {
            continue;
        }
        let part = |buffer, size: u64| {
            let size = wgpu::BufferSize::new(size);
            wgpu::BindingResource::Buffer(wgpu::BufferBinding { buffer, offset: 0, size })
        };
        let group = gpu.device().create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &pipeline.get_bind_group_layout(0),
            entries: &[
                wgpu::BindGroupEntry { binding: 0, resource: part(&source, walked) },
                wgpu::BindGroupEntry { binding: 1, resource: part(&target, target_bytes) },
            ],
        });
        let timing = clock.time(Passes::One, |pass, _| {
            pass.set_pipeline(&pipeline);
            pass.set_bind_group(0, &group, &[]);
            pass.dispatch_workgroups(groups, 1, 1);
            Ok(())
        })?;
        let moved = if kind == Kind::Copy { 2 * walked } else { walked };
        let rate = moved as f64 / timing.median / 1e9;
        if rate > best.0 {
            best = (rate, walked);
        }
    }
    Ok(best)
}
