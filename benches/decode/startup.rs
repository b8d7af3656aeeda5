//! First and second start: of wgpu with a pipeline cache on disk and the driver's own cache off, of CUDA with the driver's cache in a new
//! folder.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use wgpu_mla::gpu::{Gpu, Setup};
use wgpu_mla::{Device, Dtype, KvSpec, MlaDecode, MlaShape};

use crate::support::Result;

/// Starts this program twice on an empty directory; each compiles the decodes of one application.
pub fn run(directory: &Path, backend: &str) -> Result<()> {
    if directory.exists() {
        return Err(format!("{} exists: name a directory that does not", directory.display()).into());
    }
    for start in ["first", "second"] {
        print!("{start} start: ");
        std::io::Write::flush(&mut std::io::stdout())?;
        let status = Command::new(std::env::current_exe()?)
            .arg("--startup-child")
            .arg(directory)
            .args(["--backend", backend])
            .env("CUDA_CACHE_PATH", directory)
            .envs([("__GL_SHADER_DISK_CACHE", "0"), ("MESA_SHADER_CACHE_DISABLE", "true")])
            .status()?;
        if !status.success() {
            return Err(format!("{start} start: {status}").into());
        }
    }
    Ok(())
}

pub fn child(directory: &Path, backend: &str) -> Result<()> {
    match backend {
        "wgpu" => wgpu(directory),
        #[cfg(feature = "cuda")]
        "cuda" => cuda(),
        _ => Err(format!("--backend {backend} has no start that is timed").into()),
    }
}

fn wgpu(directory: &Path) -> Result<()> {
    let made = Gpu::new()?;
    let begin = Instant::now();
    let setup = Setup { disk_cache: Some(directory), ..Default::default() };
    let adapter = made.adapter().ok_or("the device has no adapter")?;
    let gpu = Gpu::with(adapter, made.device(), made.queue(), &setup);
    let status = gpu.disk().map(|disk| disk.status().clone());
    let specs = specs();
    for spec in &specs {
        gpu.compile(*spec)?;
    }
    let took = begin.elapsed().as_secs_f64() * 1e3;
    println!("{} decodes in {took:.1} ms, cache {status:?}", specs.len());
    gpu.save()?;
    Ok(())
}

/// The first decode, and all.
#[cfg(feature = "cuda")]
fn cuda() -> Result<()> {
    let cuda = wgpu_mla::cuda::Cuda::new(0)?;
    let begin = Instant::now();
    let specs = specs();
    for (i, spec) in specs.iter().enumerate() {
        cuda.compile(*spec)?;
        let took = begin.elapsed().as_secs_f64() * 1e3;
        if i == 0 {
            print!("one decode in {took:.1} ms, ");
        } else if i + 1 == specs.len() {
            println!("{} in {took:.1} ms", specs.len());
        }
    }
    Ok(())
}

fn specs() -> Vec<MlaDecode> {
    let spec = |(num_heads, dtype): (u32, Dtype)| MlaDecode {
        shape: MlaShape { num_heads, kv_lora_rank: 512, qk_rope_head_dim: 64 },
        kv: KvSpec { layout: dtype.into(), page_size: 64, num_pages: 64 },
        query: Dtype::Bf16,
        out: Dtype::Bf16,
    };
    let dtypes = [Dtype::Bf16, Dtype::F16, Dtype::E4m3];
    dtypes.into_iter().flat_map(|dtype| [16, 20].map(|heads| spec((heads, dtype)))).collect()
}
