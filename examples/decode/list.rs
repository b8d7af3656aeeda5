//! `--list`: what there is to run on, and what to run.

use wgpu_mla::cpu::Cpu;
use wgpu_mla::{Backend, Dtype};
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
    let chosen = gpu.as_ref().ok().map(|gpu| gpu.adapter.get_info());
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

/// The ladder for the common shape; by cache dtype where they differ.
fn list_variants<B: Backend>(out: &mut Output, backend: &B) {
    out.line("  variants, best first, for 16 heads of 512+64:");
    let ladders = Dtype::ALL.map(|cache| (cache, backend.ladder(&common_spec(cache))));
    for (at, &(name, _)) in ladders[0].1.iter().enumerate() {
        let state = |ladder: &[(&str, Option<String>)]| match ladder.get(at) {
            Some((_, None)) => "runs".to_owned(),
            Some((_, Some(why))) => format!("does not run: {why}"),
            None => "unknown".to_owned(),
        };
        let first = state(&ladders[0].1);
        if ladders.iter().all(|(_, ladder)| state(ladder) == first) {
            out.line(&format!("    {name}: {first}"));
            continue;
        }
        for (cache, ladder) in &ladders {
            out.line(&format!("    {name}, {cache} cache: {}", state(ladder)));
        }
    }
}
