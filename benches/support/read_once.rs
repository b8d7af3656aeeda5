//! A shader that reads some bytes once and does nothing else: the least time of an op that reads them.

use wgpu_mla::gpu::Gpu;
use wgpu_mla::{Device, wgpu};

use super::Result;
use super::device::Timed;

/// Bytes that a workgroup of read_once.wgsl reads for each load of a thread.
const LOAD_BYTES: u64 = 256 * 16;

/// By read_once.wgsl, with some numbers of loads a thread: see [`Timed::read_once`].
pub fn seconds(gpu: &Gpu, buffer: &wgpu::Buffer, bytes: u64, parts: u64, replays: usize) -> Result<f64> {
    let target = gpu.buffer(16)?;
    let mut best = f64::NAN;
    for loads in [1, 2, 4, 8, 16] {
        if !bytes.is_multiple_of(LOAD_BYTES * loads) {
            continue;
        }
        let pipeline = pipeline(gpu, loads);
        let group = |part: u64| {
            let size = wgpu::BufferSize::new(bytes);
            let source = wgpu::BufferBinding { buffer, offset: part * bytes, size };
            gpu.device().create_bind_group(&wgpu::BindGroupDescriptor {
                label: None,
                layout: &pipeline.get_bind_group_layout(0),
                entries: &[
                    wgpu::BindGroupEntry { binding: 0, resource: wgpu::BindingResource::Buffer(source) },
                    wgpu::BindGroupEntry { binding: 1, resource: target.as_entire_binding() },
                ],
            })
        };
        let groups: Vec<_> = (0..parts).map(group).collect();
        let grid = (bytes / (LOAD_BYTES * loads)) as u32;
        let together = gpu.time(replays, |pass, call| {
            pass.set_pipeline(&pipeline);
            pass.set_bind_group(0, &groups[call % groups.len()], &[]);
            pass.dispatch_workgroups(grid, 1, 1);
            Ok(())
        })?;
        best = together.median.min(best);
    }
    Ok(best)
}

fn pipeline(gpu: &Gpu, loads: u64) -> wgpu::ComputePipeline {
    let read = |i| format!("let quad_{i} = source[first + {i}u * GROUP];\n");
    let quads: Vec<_> = (0..loads).map(|i| format!("quad_{i}")).collect();
    let text = include_str!("read_once.wgsl")
        .replace("LOAD_QUADS", &(0..loads).map(read).collect::<String>())
        .replace("SUM_OF_QUADS", &quads.join(" ^ "));
    let text = format!("const LOADS = {loads}u;\n{text}");
    let descriptor =
        wgpu::ShaderModuleDescriptor { label: None, source: wgpu::ShaderSource::Wgsl(text.into()) };
    // SAFETY: each binding has as many quads as its grid's invocations read.
    let module = unsafe {
        gpu.device().create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked())
    };
    gpu.device().create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some("read_once"),
        layout: None,
        module: &module,
        entry_point: Some("read_once"),
        compilation_options: Default::default(),
        cache: None,
    })
}
