//! One of the backends, chosen once while the program runs.
//!
//! ```no_run
//! use wgpu_mla::any::AnyBackend;
//! use wgpu_mla::{Device, Dtype, KvSpec, MlaShape, MlaDecode};
//!
//! # fn main() -> wgpu_mla::Result<()> {
//! let spec = MlaDecode {
//!     shape: MlaShape { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64 },
//!     kv: KvSpec { layout: Dtype::Bf16.into(), page_size: 64, num_pages: 1024 },
//!     query: Dtype::Bf16,
//!     out: Dtype::Bf16,
//! };
//! let backend = AnyBackend::best(&spec); // CUDA, wgpu or the CPU
//! println!("{}: {}", backend.name(), backend.why());
//!
//! // From here on the program is the same on each.
//! let kv = backend.buffer(1024 * 64 * 576 * 2)?;
//! let mla = backend.compile(spec)?;
//! # Ok(()) }
//! ```
//!
//! What it makes lives in that backend: a [`Buffer`] is memory of the card, of the wgpu device or of the host, and nothing moves between
//! them but by [`crate::Device::upload`] and [`crate::Device::download`]. What another backend made is refused with
//! [`crate::Error::OtherBackend`].

mod absent;
mod ops;
mod parts;

pub use ops::OneOf;
pub use parts::{Buffer, Chosen};

use crate::cache::decode_spec::MlaDecode;
#[cfg(feature = "cuda")]
use crate::cuda::Cuda;
#[cfg(feature = "wgpu")]
use crate::gpu::Gpu;

/// A backend that was chosen while the program runs. A clone is another handle.
#[derive(Debug, Clone)]
pub struct AnyBackend {
    chosen: Chosen,
    why: String,
}

impl AnyBackend {
    /// The best backend on this machine for a model, chosen by the spec of the decode that it runs most. The backend serves other specs and
    /// every other op too, such as the prefills and whole layers of that model. The order of preference:
    ///
    /// 1. CUDA, with the feature `cuda`, on the driver's first card, if it is an Ampere or later, where a variant on tensor cores serves
    ///    the spec;
    /// 2. wgpu, with the feature `wgpu`, on the adapter that `Gpu::new` picks, where a variant on cooperative matrices does;
    /// 3. wgpu on any other variant, on a discrete card; then CUDA on any other; then wgpu on any adapter, also in software, such as
    ///    lavapipe;
    /// 4. the CPU, where wgpu finds no adapter at all.
    ///
    /// The order follows the times measured on one card, for decodes, prefills and layers of any batch. With f32 queries over a 16-bit
    /// cache either backend may be faster, depending on op and batch, which are unknown here.
    ///
    /// `CUDA_VISIBLE_DEVICES` hides cards from the driver, all of them if it is empty. To choose a backend yourself, use `From`:
    /// `AnyBackend::from(Gpu::new()?)`, or `Cuda::on_stream(stream)?` with the host's own stream.
    #[must_use]
    pub fn best(spec: &MlaDecode) -> Self {
        let (found, why) = choose(Found::cuda(spec), || Found::wgpu(spec));
        let chosen = found.unwrap_or_else(|| crate::cpu::Cpu::new().into());
        log::info!("{why}");
        Self { chosen, why }
    }

    /// Which backend was chosen, and what each better one lacks here.
    #[must_use]
    pub fn why(&self) -> &str {
        &self.why
    }

    /// The backend itself, such as for its stream, or its device and queue.
    #[must_use]
    pub fn chosen(&self) -> &Chosen {
        &self.chosen
    }

    /// The backend itself, for what [`crate::Device`] does not offer.
    #[must_use]
    pub fn into_chosen(self) -> Chosen {
        self.chosen
    }
}

impl<B: Into<Chosen>> From<B> for AnyBackend {
    fn from(backend: B) -> Self {
        Self { chosen: backend.into(), why: "the caller's choice".into() }
    }
}

/// A backend that can be used on this machine.
struct Found<T> {
    backend: T,
    /// Whether one of its variants on tensor cores serves the spec.
    tensor_cores: bool,
    /// Whether it is on a discrete card.
    card: bool,
}

impl Found<Chosen> {
    #[cfg(feature = "cuda")]
    fn cuda(spec: &MlaDecode) -> Result<Self, String> {
        let cuda = Cuda::new(0).map_err(lack)?;
        Ok(Self { tensor_cores: cuda.has_tensor_cores_for(spec), card: true, backend: cuda.into() })
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda(_: &MlaDecode) -> Result<Self, String> {
        Err("built without the feature `cuda`".into())
    }

    #[cfg(feature = "wgpu")]
    fn wgpu(spec: &MlaDecode) -> Result<Self, String> {
        let gpu = Gpu::new().map_err(lack)?;
        let card = gpu.caps().kind == crate::gpu::DeviceKind::Discrete;
        Ok(Self { tensor_cores: gpu.has_tensor_cores_for(spec), card, backend: gpu.into() })
    }

    #[cfg(not(feature = "wgpu"))]
    fn wgpu(_: &MlaDecode) -> Result<Self, String> {
        Err("built without the feature `wgpu`".into())
    }
}

/// An error as a part of a sentence, without its cure.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn lack(error: crate::base::error::Error) -> String {
    match error {
        crate::base::error::Error::NoCuda { detail } => format!("no device: {detail}"),
        crate::base::error::Error::NoAdapter { detail } => format!("no adapter: {detail}"),
        other => other.to_string(),
    }
}

/// The order of [`AnyBackend::best`], `None` for the CPU, and a sentence about the choice. wgpu's device is made only if it may be chosen.
///
/// By measurement, CUDA and wgpu on one H200 (`benches/results/h200-2026-11-26.md`): bf16, 16 heads, 64 x 8192, 144 and 171 us, with an f32
/// query 182 and 178, and on wgpu without tensor cores 861; 1 x 4096, 8.4 and 14.8 us; prefill of 8192 tokens, 621 and 222 TFLOP/s. f32
/// queries of bf16 take CUDA too: 0.86 of wgpu's time on the whole. Without tensor cores on either, all of f32, CUDA takes 1.2 to 2.0 of
/// wgpu's time (`h200-layer-cuda-2026-11-25.md`). `tests/it/fastest.rs` measures again.
fn choose<T>(
    cuda: Result<Found<T>, String>,
    wgpu: impl FnOnce() -> Result<Found<T>, String>,
) -> (Option<T>, String) {
    let cuda_is_best = cuda.as_ref().is_ok_and(|cuda| cuda.tensor_cores);
    let wgpu = if cuda_is_best { Err("CUDA is better".into()) } else { wgpu() };
    let (backend, why) = match (cuda, wgpu) {
        (Ok(cuda), _) if cuda.tensor_cores => (cuda.backend, "CUDA, on tensor cores".into()),
        (Ok(_), Ok(wgpu)) if wgpu.tensor_cores => (
            wgpu.backend,
            "wgpu, on cooperative matrices; not CUDA: no variant on tensor cores serves this".into(),
        ),
        (Ok(_), Ok(wgpu)) if wgpu.card => (
            wgpu.backend,
            "wgpu, faster than CUDA where neither has a variant on tensor cores for this".into(),
        ),
        (Ok(cuda), _) => {
            (cuda.backend, "CUDA; neither it nor wgpu has a variant on tensor cores for this".into())
        }
        (Err(no_cuda), Ok(wgpu)) => (wgpu.backend, format!("wgpu; not CUDA: {no_cuda}")),
        (Err(no_cuda), Err(no_wgpu)) => {
            return (None, format!("the CPU; not CUDA: {no_cuda}; not wgpu: {no_wgpu}"));
        }
    };
    (Some(backend), why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuda_where_it_is_better_and_wgpu_elsewhere() {
        // What is found here: whether on tensor cores, and whether on a discrete card.
        type Of = Option<(bool, bool)>;
        let found = |name: &'static str, of: Of| {
            of.map(|(tensor_cores, card)| Found { backend: name, tensor_cores, card })
                .ok_or(format!("no {name} here"))
        };
        let (both, card, neither) = (Some((true, true)), Some((false, true)), Some((false, false)));
        let chosen = |cuda: Of, wgpu: Of| choose(found("cuda", cuda), || found("wgpu", wgpu));
        for (cuda, wgpu, want) in [
            (both, None, Some("cuda")),
            (both, both, Some("cuda")),
            (card, both, Some("wgpu")),
            (card, card, Some("wgpu")),
            (card, neither, Some("cuda")),
            (card, None, Some("cuda")),
            (None, both, Some("wgpu")),
            (None, neither, Some("wgpu")),
            (None, None, None),
        ] {
            let (got, why) = chosen(cuda, wgpu);
            assert_eq!(got, want, "{cuda:?} {wgpu:?}: {why}");
            assert!(cuda.is_some() || why.contains("not CUDA: no cuda here"), "{why}");
            assert!(got.is_some() || why.contains("not wgpu: no wgpu here"), "{why}");
        }
    }

    #[test]
    fn no_device_is_made_for_wgpu_where_cuda_is_better() {
        let (got, _) =
            choose(Ok(Found { backend: 1, tensor_cores: true, card: true }), || unreachable!("asked wgpu"));
        assert_eq!(got, Some(1));
    }
}
