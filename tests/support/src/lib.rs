//! What tests, benches and examples share: case files, the accuracy check, test problems and the conformance suite.

pub mod cache;
pub mod case;
pub mod close;
#[cfg(feature = "cuda")]
pub mod graph;
pub mod index_rows;
#[cfg(all(feature = "wgpu", not(target_arch = "wasm32")))]
pub mod logged;
pub mod paint;
pub mod ranks;
pub mod reference;
#[cfg(all(feature = "wgpu", not(target_arch = "wasm32")))]
pub mod rig;
pub mod suite;

/// Why a test cannot run here: no device, or one that lacks something. The runner counts it as ignored, never as passed.
#[derive(Debug, Clone)]
pub struct Ignored(pub String);

/// What a test ends with that may not be able to run here. A failure panics.
pub type Outcome = Result<(), Ignored>;

/// Panics where a variable of the environment is 1 (`MLA_REQUIRE_GPU`, `MLA_REQUIRE_CUDA`), and otherwise gives the reason back.
pub fn ignored_unless_required(variable: &str, why: impl ToString) -> Ignored {
    let why = why.to_string();
    assert!(std::env::var(variable).as_deref() != Ok("1"), "{variable}=1, but: {why}");
    Ignored(why)
}

/// The device that tests share, so that each pipeline is compiled once. With `MLA_REQUIRE_GPU=1` its lack is a failure.
///
/// A software device compiles and runs on one thread of its own. There are two of them, and the runner's threads take one each, so that a
/// second core is busy too.
#[cfg(all(feature = "wgpu", not(target_arch = "wasm32")))]
pub fn gpu() -> Result<wgpu_mla::gpu::Gpu, Ignored> {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static THREAD: usize = THREADS.fetch_add(1, Ordering::Relaxed);
    }
    gpu_of(THREAD.with(|thread| *thread))
}

/// Like [`gpu`], where tests that share pipelines have a number in common.
#[cfg(all(feature = "wgpu", not(target_arch = "wasm32")))]
pub fn gpu_of(number: usize) -> Result<wgpu_mla::gpu::Gpu, Ignored> {
    use std::sync::OnceLock;
    use wgpu_mla::gpu::{DeviceKind, Gpu};
    static GPUS: [OnceLock<Result<Gpu, String>>; 2] = [const { OnceLock::new() }; 2];
    let open =
        |place: usize| GPUS[place].get_or_init(|| Gpu::new().map_err(|error| error.to_string())).clone();
    let made = match open(0) {
        Ok(first) if first.caps().kind == DeviceKind::Software => open(number % GPUS.len()),
        made => made,
    };
    made.map_err(|why| ignored_unless_required("MLA_REQUIRE_GPU", why))
}

/// The card that all tests share. With `MLA_REQUIRE_CUDA=1` its lack is a failure.
#[cfg(feature = "cuda")]
pub fn cuda() -> Result<wgpu_mla::cuda::Cuda, Ignored> {
    use wgpu_mla::cuda::Cuda;
    static CUDA: std::sync::OnceLock<Result<Cuda, String>> = std::sync::OnceLock::new();
    let open = || Cuda::new(0).map_err(|error| error.to_string());
    CUDA.get_or_init(open).clone().map_err(|why| ignored_unless_required("MLA_REQUIRE_CUDA", why))
}
