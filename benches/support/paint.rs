//! Buffers full of the same cycle of values, filled by copies on the device.

use wgpu_mla::gpu::Gpu;
use wgpu_mla::{Backend, Device, Dtype, wgpu};

use super::{Draws, Result};

/// Elements after which the paint repeats: four times a prime, so that rows and pages differ and a cycle of any dtype is
/// whole words.
pub const CYCLE: usize = 4 * 250_007;

/// One cycle in a dtype: its codes and what they mean.
pub struct Paint {
    pub dtype: Dtype,
    pub codes: Vec<u8>,
    pub values: Vec<f32>,
}

impl Paint {
    /// Values of about normal / 10.
    pub fn new(dtype: Dtype) -> Self {
        Self::scaled(dtype, 1.0)
    }

    /// For queries: against keys of [`Paint::new`] logits of about 1.8 times normal, so that heads and tokens differ by more
    /// than the tolerances.
    pub fn query(dtype: Dtype) -> Self {
        Self::scaled(dtype, 64.0)
    }

    fn scaled(dtype: Dtype, factor: f32) -> Self {
        let mut draws = Draws(0x9E37_79B9_7F4A_7C15);
        let mut sum = || draws.next() + draws.next() + draws.next() + draws.next();
        let values: Vec<f32> = (0..CYCLE).map(|_| (sum() - 2.0) * 0.173 * factor).collect();
        let codes = dtype.encode_all(&values);
        let values = dtype.decode_all(&codes);
        Self { dtype, codes, values }
    }

    /// The value at an element of a painted buffer.
    pub fn at(&self, element: u64) -> f32 {
        self.values[(element % CYCLE as u64) as usize]
    }

    /// The codes of some elements of a painted buffer.
    pub fn codes(&self, elements: std::ops::Range<u64>) -> Vec<u8> {
        let size = self.dtype.bytes();
        let code = |element: u64| &self.codes[(element % CYCLE as u64) as usize * size..][..size];
        elements.flat_map(code).copied().collect()
    }

    /// Bytes of `elements` elements, whole words.
    pub fn bytes(&self, elements: u64) -> u64 {
        (elements * self.dtype.bytes() as u64).next_multiple_of(4)
    }
}

/// A backend whose memory can be painted.
pub trait Canvas: Backend {
    fn painted(&self, paint: &Paint, elements: u64) -> Result<Self::Buffer>;
}

impl Canvas for wgpu_mla::cpu::Cpu {
    fn painted(&self, paint: &Paint, elements: u64) -> Result<Self::Buffer> {
        let bytes = paint.bytes(elements);
        let buffer = self.buffer(bytes)?;
        for begin in (0..bytes).step_by(paint.codes.len()) {
            let length = (bytes - begin).min(paint.codes.len() as u64) as usize;
            self.upload(&buffer, begin, &paint.codes[..length])?;
        }
        Ok(buffer)
    }
}

impl Canvas for Gpu {
    /// The host uploads some cycles; the device copies them as often as they are needed.
    fn painted(&self, paint: &Paint, elements: u64) -> Result<wgpu::Buffer> {
        let bytes = paint.bytes(elements);
        let buffer = self.buffer(bytes)?;
        let cycles = (32 << 20) / paint.codes.len();
        let stage = paint.codes.repeat(cycles.min(bytes as usize / paint.codes.len() + 1));
        let staged = self.buffer(stage.len() as u64)?;
        self.upload(&staged, 0, &stage)?;
        let mut encoder = self.device().create_command_encoder(&Default::default());
        for begin in (0..bytes).step_by(stage.len()) {
            let length = (bytes - begin).min(stage.len() as u64);
            encoder.copy_buffer_to_buffer(&staged, 0, &buffer, begin, length);
        }
        self.queue().submit([encoder.finish()]);
        self.device().poll(wgpu::PollType::wait_indefinitely())?;
        Ok(buffer)
    }
}
