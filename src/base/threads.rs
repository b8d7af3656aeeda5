//! What may be used from several threads.

/// `Send + Sync`; on `wasm32`, where wgpu's objects stay on their thread, no requirement. It is like wgpu's trait of this name. Every type
/// that is `Send + Sync` has it.
#[cfg(not(target_arch = "wasm32"))]
pub trait WasmNotSendSync: Send + Sync {}
#[cfg(not(target_arch = "wasm32"))]
impl<T: ?Sized + Send + Sync> WasmNotSendSync for T {}

/// `Send + Sync`; on `wasm32`, where wgpu's objects stay on their thread, no requirement. It is like wgpu's trait of this name. Every type
/// has it.
#[cfg(target_arch = "wasm32")]
pub trait WasmNotSendSync {}
#[cfg(target_arch = "wasm32")]
impl<T: ?Sized> WasmNotSendSync for T {}
