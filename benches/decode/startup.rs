//! First and second start with a pipeline cache on disk, the driver's own cache off.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use wgpu_mla::gpu::{Gpu, MlaDecode, Pipelines};
use wgpu_mla::{Dtype, KvSpec, MlaShape, MlaSpec};

use crate::support::Result;

/// Starts this program twice on an empty directory; each compiles the decodes of one application.
pub fn run(directory: &Path) -> Result<()> {
    if directory.exists() {
        return Err(format!("{} exists: name a directory that does not", directory.display()).into());
    }
    for start in ["first", "second"] {
        print!("{start} start: ");
        std::io::Write::flush(&mut std::io::stdout())?;
        let status = Command::new(std::env::current_exe()?)
            .arg("--startup-child")
            .arg(directory)
            .envs([("__GL_SHADER_DISK_CACHE", "0"), ("MESA_SHADER_CACHE_DISABLE", "true")])
            .status()?;
        if !status.success() {
            return Err(format!("{start} start: {status}").into());
        }
    }
    Ok(())
}

pub fn child(directory: &Path) -> Result<()> {
    let gpu = Gpu::new()?;
    let begin = Instant::now();
    let setup = Setup { adapter: Some(&gpu.adapter), disk_cache: Some(directory), ..Default::default() };
    let pipelines = Pipelines::open(&gpu.device, &setup);
    let status = pipelines.disk().map(|disk| disk.status().clone());
    let mut decodes = 0;
    for dtype in [Dtype::F16, Dtype::Bf16, Dtype::E4m3] {
        for heads in [16, 20] {
            let spec = MlaSpec {
                shape: MlaShape { num_heads: heads, kv_lora_rank: 512, qk_rope_head_dim: 64 },
                kv: KvSpec { dtype, page_size: 64, num_pages: 64 },
                query: Dtype::Bf16,
                out: Dtype::Bf16,
            };
            MlaDecode::new(&pipelines, &spec, &Default::default())?;
            decodes += 1;
        }
    }
    println!("{decodes} decodes in {:.1} ms, cache {status:?}", begin.elapsed().as_secs_f64() * 1e3);
    pipelines.save()?;
    Ok(())
}
