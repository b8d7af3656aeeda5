//! What the tests share: case files, the accuracy check, test problems and the conformance suite.
#![allow(dead_code)] // Each test binary uses a part.

pub mod cache;
pub mod case;
pub mod close;
#[cfg(feature = "cuda")]
pub mod graph;
pub mod paint;
#[cfg(feature = "wgpu")]
pub mod rig;
pub mod suite;

/// A device, or `None` once it was said why there is none. With `MLA_REQUIRE_GPU=1` that is a failure.
#[cfg(feature = "wgpu")]
pub fn gpu_or_say_why() -> Option<wgpu_mla::gpu::Gpu> {
    match wgpu_mla::gpu::Gpu::new() {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            assert!(std::env::var("MLA_REQUIRE_GPU").as_deref() != Ok("1"), "{error}");
            eprintln!("NOT TESTED: {error}");
            None
        }
    }
}

/// A card, or `None` once it was said why there is none. With `MLA_REQUIRE_CUDA=1` that is a failure.
#[cfg(feature = "cuda")]
pub fn cuda_or_say_why() -> Option<wgpu_mla::cuda::Cuda> {
    static CUDA: std::sync::OnceLock<Option<wgpu_mla::cuda::Cuda>> = std::sync::OnceLock::new();
    let open = || match wgpu_mla::cuda::Cuda::new(0) {
        Ok(cuda) => Some(cuda),
        Err(error) => {
            assert!(std::env::var("MLA_REQUIRE_CUDA").is_err(), "{error}");
            eprintln!("NOT RUN: {error}");
            None
        }
    };
    CUDA.get_or_init(open).clone()
}
