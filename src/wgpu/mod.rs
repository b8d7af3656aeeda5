//! Kernels on wgpu. The host brings device, queue, buffers and encoder.

pub mod ops;
mod scope;
