//! The small ops on wgpu, on a device with WebGPU's default limits and no features.
use std::sync::OnceLock;

use half::{bf16, f16};
use mla_support::{Ignored, ignored_unless_required};
use wgpu_mla::gpu::Pipelines;
use wgpu_mla::gpu::ops::{
    AppendStep, CopySpec, CopyStep, GatherStep, KvAppend, KvCopyPages, KvGather, MergeAttnStates,
};
use wgpu_mla::{
    AppendLayer, AppendSpec, Dtype, Error, Gather, GatherRange, GatherSpec, KvSpec, KvView, MergeStates,
    MergeStatesSpec, MlaShape, PageTable, View, e4m3_decode, e4m3_encode,
};

mod errors;
mod kv_append;
mod kv_copy_pages;
mod kv_gather;
mod merge_attn_states;
mod rope;
mod round;

const SHAPE: MlaShape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };

struct Gpu {
    device: wgpu::Device,
    queue: wgpu::Queue,
}

fn open(limits: wgpu::Limits) -> Result<Gpu, Ignored> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let adapter = match pollster::block_on(instance.request_adapter(&Default::default())) {
        Ok(adapter) => adapter,
        Err(e) => return Err(ignored_unless_required("MLA_REQUIRE_GPU", format!("no adapter: {e}"))),
    };
    let descriptor = wgpu::DeviceDescriptor { required_limits: limits, ..Default::default() };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).expect("a device");
    Ok(Gpu { device, queue })
}

fn gpu() -> Result<&'static Gpu, Ignored> {
    static GPU: OnceLock<Result<Gpu, Ignored>> = OnceLock::new();
    GPU.get_or_init(|| open(wgpu::Limits::default())).as_ref().map_err(Ignored::clone)
}

impl Gpu {
    fn buffer(&self, bytes: &[u8]) -> wgpu::Buffer {
        self.buffer_with(bytes, wgpu::BufferUsages::STORAGE)
    }

    fn buffer_with(&self, bytes: &[u8], usage: wgpu::BufferUsages) -> wgpu::Buffer {
        let mut bytes = bytes.to_vec();
        bytes.resize(bytes.len().next_multiple_of(4).max(4), 0);
        let buffer = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: bytes.len() as u64,
            usage: usage | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        self.queue.write_buffer(&buffer, 0, &bytes);
        buffer
    }

    fn submit(&self, record: impl FnOnce(&mut wgpu::CommandEncoder)) {
        let mut encoder = self.device.create_command_encoder(&Default::default());
        record(&mut encoder);
        self.queue.submit([encoder.finish()]);
    }

    fn read(&self, buffer: &wgpu::Buffer) -> Vec<u8> {
        let staging = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: buffer.size(),
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        self.submit(|encoder| encoder.copy_buffer_to_buffer(buffer, 0, &staging, 0, buffer.size()));
        staging.map_async(wgpu::MapMode::Read, .., |result| result.expect("mapped"));
        self.device.poll(wgpu::PollType::wait_indefinitely()).expect("polled");
        staging.get_mapped_range(..).expect("mapped").to_vec()
    }
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

crate::tests![(in kv_append, kv_copy_pages, errors, kv_gather, merge_attn_states, rope, round)];
