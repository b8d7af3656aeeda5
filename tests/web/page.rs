//! The page's device, and arrays on it.

use std::cell::RefCell;

use wasm_bindgen_test::console_log;
use wgpu_mla::gpu::{Gpu, read};
use wgpu_mla::{Device, Result, wgpu};

use mla_support::paint::POISON;

/// Bytes of poison behind every array.
const GUARD: usize = 64;

/// One device for all tests, so that each pipeline is compiled once. No device is a failure, never a skip.
pub async fn gpu() -> Gpu {
    thread_local!(static GPU: RefCell<Option<Gpu>> = const { RefCell::new(None) });
    if let Some(gpu) = GPU.with_borrow(Clone::clone) {
        return gpu;
    }
    let gpu = Gpu::request().await.expect("a browser with WebGPU");
    console_log!("{}, features {:?}, {:?}", gpu.describe(), gpu.device().features(), gpu.caps());
    GPU.set(Some(gpu.clone()));
    gpu
}

/// A buffer that holds `bytes` and a guard of poison.
pub fn upload(gpu: &Gpu, bytes: &[u8]) -> wgpu::Buffer {
    let mut padded = bytes.to_vec();
    padded.resize((bytes.len() + GUARD).next_multiple_of(4), POISON);
    let buffer = gpu.buffer(padded.len() as u64).expect("a buffer");
    gpu.upload(&buffer, 0, &padded).expect("uploads");
    buffer
}

/// What [`upload`] of `len` bytes has become, its guard included.
pub async fn download(gpu: &Gpu, buffer: &wgpu::Buffer, len: usize) -> Result<Vec<u8>> {
    read(gpu.device(), gpu.queue(), buffer, (len + GUARD).next_multiple_of(4) as u64).await
}
