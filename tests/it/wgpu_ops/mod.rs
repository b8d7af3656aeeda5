//! The small ops on wgpu, on a device with WebGPU's default limits and no features.
use std::sync::OnceLock;

use half::{bf16, f16};
use mla_support::{Ignored, Outcome};
use wgpu_mla::gpu::{Gpu, Wanted};
use wgpu_mla::{
    Compiled, Device, Dtype, Error, GatherBatch, GatherRange, KvAppend, KvAppendArgs, KvCopyPages, KvGather,
    KvGatherArgs, KvSpec, KvView, MergeState, MergeStateArgs, MlaDecode, MlaShape, PageTable, Step, View,
    e4m3_decode, e4m3_encode, wgpu,
};

mod errors;
mod kv_append;
mod kv_copy_pages;
mod kv_gather;
mod merge_state;
mod rope;
mod round;

const SHAPE: MlaShape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };

/// The shapes of a decode that has the same cache.
fn decode(kv: KvSpec) -> MlaDecode {
    MlaDecode { shape: SHAPE, kv, query: Dtype::F32, out: Dtype::F32 }
}

/// A device without features, on the adapter that all tests share.
fn open(limits: wgpu::Limits) -> Result<Gpu, Ignored> {
    let adapter = mla_support::gpu()?.adapter().expect("of a device that this crate made").clone();
    let experimental = wgpu::ExperimentalFeatures::disabled();
    let none = Wanted { features: wgpu::Features::empty(), limits, experimental };
    let made = Gpu::from_adapter(adapter, &none);
    Ok(pollster::block_on(made).expect("a device"))
}

fn gpu() -> Result<&'static Gpu, Ignored> {
    static GPU: OnceLock<Result<Gpu, Ignored>> = OnceLock::new();
    GPU.get_or_init(|| open(wgpu::Limits::default())).as_ref().map_err(Ignored::clone)
}

/// A buffer of these bytes, up to whole words.
fn upload(gpu: &Gpu, bytes: &[u8]) -> wgpu::Buffer {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    let buffer = gpu.buffer(bytes.len() as u64).expect("a buffer");
    gpu.upload(&buffer, 0, &bytes).expect("uploads");
    buffer
}

/// A buffer of 8 KB that no kernel may read or write.
fn without_storage(gpu: &Gpu) -> wgpu::Buffer {
    gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 8192,
        usage: wgpu::BufferUsages::UNIFORM,
        mapped_at_creation: false,
    })
}

fn download(gpu: &Gpu, buffer: &wgpu::Buffer) -> Vec<u8> {
    gpu.download(buffer, buffer.size()).expect("downloads")
}

/// A fixed pseudo-random sequence.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = self.0 ^ (self.0 >> 29);
        (x.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32
    }

    /// In -1..1.
    fn unit(&mut self) -> f32 {
        self.bits() as f32 / u32::MAX as f32 * 2.0 - 1.0
    }
}

/// f32 patterns that are hard to convert: every f16 and bf16 value, what lies halfway between two f16 or e4m3 values,
/// the neighbours of those, infinities, NaNs and subnormals.
fn hard_patterns() -> Vec<u32> {
    let mut all = Vec::new();
    let mut near = |bits: u32| all.extend([bits.wrapping_sub(1), bits, bits.wrapping_add(1)]);
    for code in 0..=u16::MAX {
        near(f16::from_bits(code).to_f32().to_bits());
        near(u32::from(code) << 16);
        near((u32::from(code) << 16) | 0x8000);
        let (low, high) = (f16::from_bits(code).to_f32(), f16::from_bits(code.wrapping_add(1)).to_f32());
        near(f32::midpoint(low, high).to_bits());
    }
    for code in 0..0x7Eu8 {
        let middle = f32::midpoint(e4m3_decode(code), e4m3_decode(code + 1));
        near(middle.to_bits());
        near((-middle).to_bits());
    }
    for x in [448f32, 464.0, 480.0, 65504.0, 65520.0, 65536.0, f32::MAX, f32::MIN_POSITIVE] {
        near(x.to_bits());
        near((-x).to_bits());
    }
    all
}

crate::tests![(in kv_append, kv_copy_pages, errors, kv_gather, merge_state, rope, round)];
