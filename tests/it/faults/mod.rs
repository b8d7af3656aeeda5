//! What breaks under a host: devices that are lost, memory that is refused, ranks that stop, caches on disk that change. Each is an
//! [`Error`](wgpu_mla::Error), nothing is lost in a pool, and what comes after works.

#[cfg(feature = "wgpu")]
mod cache_folder;
#[cfg(feature = "wgpu")]
mod lost;
mod memory;
mod ranks;

crate::tests![(in #[cfg(feature = "wgpu")] cache_folder, #[cfg(feature = "wgpu")] lost, memory, ranks)];
