//! `--list`: the backends here, their variants, and the cases.

use wgpu_mla::cpu::Cpu;
use wgpu_mla::{Device, Dtype, Kernel, MlaDecode};
#[cfg(feature = "wgpu")]
use wgpu_mla::{gpu::Gpu, wgpu};

use crate::common_spec;
use crate::files::Found;
use crate::report::Output;

pub fn list(out: &mut Output, found: &Found) {
    list_cuda(out);
    list_wgpu(out);
    let cpu = Cpu::new();
    out.line(&format!("backend cpu: {}", cpu.name()));
    list_variants(out, &cpu);
    out.line(&format!("case files: {}", found.files.len()));
    for file in &found.files {
        out.line(&format!("  {}", file.display()));
    }
    for error in &found.errors {
        out.line(&format!("  {}: {}", error.name, error.why));
    }
}

#[cfg(feature = "wgpu")]
fn list_wgpu(out: &mut Output) {
    let gpu = Gpu::new();
    match &gpu {
        Ok(gpu) => out.line(&format!("backend wgpu: {}", gpu.name())),
        Err(error) => out.line(&format!("backend wgpu: none here: {error}")),
    }
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let backends = wgpu::Backends::from_env().unwrap_or(wgpu::Backends::all());
    let adapters = pollster::block_on(instance.enumerate_adapters(backends));
    let chosen = gpu.as_ref().ok().and_then(Gpu::adapter).map(wgpu::Adapter::get_info);
    out.line(&format!("  adapters: {}", adapters.len()));
    for info in adapters.iter().map(wgpu::Adapter::get_info) {
        let mark = if chosen.as_ref() == Some(&info) { "*" } else { " " };
        let driver = format!("{} {}", info.driver, info.driver_info);
        out.line(&format!("  {mark} {} ({:?}, {:?}, {driver})", info.name, info.backend, info.device_type));
    }
    if let Ok(gpu) = &gpu {
        list_variants(out, gpu);
    }
}

#[cfg(not(feature = "wgpu"))]
fn list_wgpu(out: &mut Output) {
    out.line("backend wgpu: not built in (feature `wgpu`)");
}

#[cfg(feature = "cuda")]
fn list_cuda(out: &mut Output) {
    match wgpu_mla::cuda::Cuda::new(0) {
        Ok(cuda) => {
            out.line(&format!("backend cuda: {}", cuda.name()));
            list_variants(out, &cuda);
        }
        Err(error) => out.line(&format!("backend cuda: none here: {error}")),
    }
}

#[cfg(not(feature = "cuda"))]
fn list_cuda(out: &mut Output) {
    out.line("backend cuda: not built in (feature `cuda`)");
}

/// The variants for the common shape; by cache dtype where they differ.
fn list_variants<D: Kernel<MlaDecode>>(out: &mut Output, device: &D) {
    out.line("  variants, best first, for 16 heads of 512+64:");
    let by_cache = Dtype::ALL.map(|cache| (cache, device.variants(&common_spec(cache))));
    for (at, first) in by_cache[0].1.iter().enumerate() {
        let states = by_cache.each_ref().map(|(cache, variants)| match variants.get(at).map(|v| &v.lacks) {
            Some(None) => (cache, "runs".to_owned()),
            Some(Some(why)) => (cache, format!("does not run: {why}")),
            None => (cache, "unknown".to_owned()),
        });
        if states.iter().all(|(_, state)| *state == states[0].1) {
            out.line(&format!("    {}: {}", first.name, states[0].1));
            continue;
        }
        for (cache, state) in states {
            out.line(&format!("    {}, {cache} cache: {state}", first.name));
        }
    }
}
