//! The wgpu backend.

pub mod disk_cache;
