//! Where attention runs.

#[cfg(not(target_arch = "wasm32"))]
use wgpu_mla::{Device as _, MlaDecode, any::AnyBackend};

use crate::{Error, Result};

/// The choice of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Where {
    /// The best one here.
    #[default]
    Auto,
    Cuda,
    Wgpu,
    Cpu,
}

impl std::str::FromStr for Where {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "cuda" => Ok(Self::Cuda),
            "wgpu" => Ok(Self::Wgpu),
            "cpu" => Ok(Self::Cpu),
            other => Err(Error::Input(format!("--backend {other}: must be auto, cuda, wgpu or cpu"))),
        }
    }
}

impl Where {
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cuda => "CUDA",
            Self::Wgpu => "wgpu",
            Self::Cpu => "CPU",
        }
    }
}

/// The CPU, then the backend that was asked for; for [`Where::Auto`] all that are here.
///
/// # Errors
/// The errors of a backend that was asked for by name.
#[cfg(not(target_arch = "wasm32"))]
pub fn with_cpu(wish: Where) -> Result<Vec<Where>> {
    Ok(match wish {
        Where::Cpu => vec![Where::Cpu],
        Where::Auto => {
            let is_here = |&backend: &Where| match backend {
                Where::Wgpu => wgpu_mla::gpu::Gpu::new().is_ok(),
                #[cfg(feature = "cuda")]
                Where::Cuda => wgpu_mla::cuda::Cuda::new(0).is_ok(),
                other => other == Where::Cpu,
            };
            [Where::Cpu, Where::Wgpu, Where::Cuda].into_iter().filter(is_here).collect()
        }
        other => vec![Where::Cpu, other],
    })
}

/// What each backend would run on, or why it cannot.
#[cfg(not(target_arch = "wasm32"))]
pub fn devices() -> Vec<(Where, Result<String>)> {
    let of = |backend| {
        let name = match backend {
            Where::Wgpu => wgpu_mla::gpu::Gpu::new().map(|it| it.name()).map_err(Error::from),
            #[cfg(feature = "cuda")]
            Where::Cuda => wgpu_mla::cuda::Cuda::new(0).map(|it| it.name()).map_err(Error::from),
            #[cfg(not(feature = "cuda"))]
            Where::Cuda => {
                Err(Error::Input("built without the feature `cuda`: build with `--features cuda`".into()))
            }
            _ => Ok(wgpu_mla::cpu::Cpu::new().name()),
        };
        (backend, name)
    };
    [Where::Cuda, Where::Wgpu, Where::Cpu].map(of).into()
}

/// The backend that was asked for.
///
/// # Errors
/// [`wgpu_mla::Error::NoAdapter`] and the like, [`Error::Input`] for CUDA without the feature `cuda`.
#[cfg(not(target_arch = "wasm32"))]
pub fn open(wish: Where, spec: &MlaDecode) -> Result<AnyBackend> {
    Ok(match wish {
        Where::Auto => AnyBackend::best(spec),
        #[cfg(feature = "cuda")]
        Where::Cuda => wgpu_mla::cuda::Cuda::new(0)?.into(),
        #[cfg(not(feature = "cuda"))]
        Where::Cuda => {
            let cure = "build with `--features cuda`";
            return Err(Error::Input(format!("--backend cuda: built without the feature `cuda`; {cure}")));
        }
        Where::Wgpu => wgpu_mla::gpu::Gpu::new()?.into(),
        Where::Cpu => wgpu_mla::cpu::Cpu::new().into(),
    })
}
