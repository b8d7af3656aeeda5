//! Enums over the backends, such as the buffer of whichever was chosen.

use crate::base::error::{Error, Result};

/// Extracts a backend's own value from `T`, an enum over backends.
pub(super) trait Part<T> {
    type Own;

    /// # Errors
    /// [`Error::OtherBackend`].
    fn own(any: &T) -> Result<&Self::Own>;
}

/// An enum over the backends that were built in, with `From` and [`Part`] for each.
macro_rules! one_of {
    ($(#[$about:meta])* $name:ident, $what:literal: $cuda:ty, $wgpu:ty, $cpu:ty) => {
        $(#[$about])*
        #[derive(Debug, Clone)]
        #[non_exhaustive]
        pub enum $name {
            /// The part of the CUDA backend.
            #[cfg(feature = "cuda")]
            Cuda($cuda),
            /// The part of the wgpu backend.
            #[cfg(feature = "wgpu")]
            Wgpu($wgpu),
            /// The part of the CPU backend.
            Cpu($cpu),
        }

        impl $name {
            /// The backend it belongs to.
            fn of(&self) -> &'static str {
                match self {
                    #[cfg(feature = "cuda")]
                    Self::Cuda(_) => "CUDA",
                    #[cfg(feature = "wgpu")]
                    Self::Wgpu(_) => "wgpu",
                    Self::Cpu(_) => "the CPU",
                }
            }
        }

        #[cfg(feature = "cuda")]
        one_of!(@part $name, $what, Cuda, "CUDA", crate::cuda::Cuda, $cuda);
        #[cfg(feature = "wgpu")]
        one_of!(@part $name, $what, Wgpu, "wgpu", crate::gpu::Gpu, $wgpu);
        one_of!(@part $name, $what, Cpu, "the CPU", crate::cpu::Cpu, $cpu);
    };
    (@part $name:ident, $what:literal, $variant:ident, $here:literal, $backend:ty, $own:ty) => {
        impl From<$own> for $name {
            fn from(own: $own) -> Self {
                Self::$variant(own)
            }
        }

        impl Part<$name> for $backend {
            type Own = $own;

            fn own(any: &$name) -> Result<&$own> {
                match any {
                    $name::$variant(own) => Ok(own),
                    #[allow(unreachable_patterns)] // With one backend.
                    other => Err(Error::OtherBackend { what: $what, of: other.of(), here: $here }),
                }
            }

        }
    };
}

one_of! {
    /// The backend that was chosen.
    Chosen, "backend": crate::cuda::Cuda, crate::gpu::Gpu, crate::cpu::Cpu
}
one_of! {
    /// Memory of one of the backends. A host that launches kernels of its own on it finds the native buffer inside, and one that
    /// has a native buffer hands it over by `From`.
    Buffer, "buffer": crate::cuda::Buffer, wgpu::Buffer, crate::cpu::Buffer
}
