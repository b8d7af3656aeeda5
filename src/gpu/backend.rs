//! [`Backend`] for [`Gpu`]: each verb with a submit of its own.

use super::{Gpu, LayerBinding, MlaDecode, Options, Step, scope::scoped};
use crate::backend::{Backend, sealed::Sealed};
use crate::kernel::VARIANTS;
use crate::ops::{AppendLayer, AppendSpec, MergeStates, MergeStatesSpec};
use crate::plan::{Plan, Tiling};
use crate::tables::{Capacity, PageTable};
use crate::{Error, KvSpec, KvView, Layer, MlaSpec, Result};

/// A compiled decode.
pub type GpuDecode = MlaDecode;

impl Sealed for Gpu {}

impl Backend for Gpu {
    type Buffer = wgpu::Buffer;
    type Decode = GpuDecode;
    type Step = Step;
    type Binding = LayerBinding;

    fn name(&self) -> String {
        self.describe()
    }

    fn buffer(&self, bytes: u64) -> Result<wgpu::Buffer> {
        let limit = self.pipelines.caps().max_buffer_bytes;
        if bytes > limit {
            let cure = "split it into several buffers, or make the device with `wanted`'s limits";
            return Err(Error::Limit { what: "max_buffer_size", need: bytes, limit, cure });
        }
        self.check_lost()?;
        scoped(&self.device, "a buffer", || {
            self.device.create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: bytes.next_multiple_of(4).max(4),
                usage: wgpu::BufferUsages::STORAGE
                    | wgpu::BufferUsages::COPY_DST
                    | wgpu::BufferUsages::COPY_SRC,
                mapped_at_creation: false,
            })
        })
    }

    fn upload(&self, buffer: &wgpu::Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        check_range(offset, bytes.len() as u64, buffer)?;
        self.check_lost()?;
        self.queue.write_buffer(buffer, offset, bytes);
        Ok(())
    }

    fn download(&self, buffer: &wgpu::Buffer, bytes: u64) -> Result<Vec<u8>> {
        check_range(0, bytes, buffer)?;
        self.check_lost()?;
        if bytes == 0 {
            return Ok(Vec::new());
        }
        let staging = scoped(&self.device, "a download", || {
            self.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("mla.download"),
                size: bytes,
                usage: wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::MAP_READ,
                mapped_at_creation: false,
            })
        })?;
        let mut encoder = self.device.create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(buffer, 0, &staging, 0, bytes);
        self.queue.submit([encoder.finish()]);
        staging.map_async(wgpu::MapMode::Read, .., |_| {});
        let lost = |detail: String| Error::DeviceLost { detail };
        self.device.poll(wgpu::PollType::wait_indefinitely()).map_err(|error| lost(error.to_string()))?;
        self.check_lost()?;
        let view = staging.get_mapped_range(..).map_err(|error| lost(error.to_string()))?;
        Ok(view.to_vec())
    }

    fn variants(&self, spec: &MlaSpec) -> Vec<&'static str> {
        let runs = VARIANTS.iter().filter(|variant| variant.runs_on(self.pipelines.caps(), spec).is_ok());
        runs.map(|variant| variant.name).collect()
    }

    fn decode(&self, spec: &MlaSpec, variant: Option<&str>) -> Result<MlaDecode> {
        let options = Options { variant: variant.map(Into::into), ..Default::default() };
        MlaDecode::new(&self.pipelines, spec, &options)
    }

    fn tiling(&self, decode: &MlaDecode) -> Tiling {
        decode.tiling()
    }

    fn step(&self, decode: &MlaDecode, capacity: Capacity) -> Result<Step> {
        decode.step(capacity)
    }

    fn prepare(&self, decode: &MlaDecode, step: &mut Step, plan: &Plan, pages: PageTable<'_>) -> Result<()> {
        decode.prepare(&self.queue, step, plan, pages)
    }

    fn bind(
        &self,
        decode: &MlaDecode,
        max_queries: u32,
        layer: &Layer<'_, wgpu::Buffer>,
    ) -> Result<LayerBinding> {
        decode.bind(max_queries, layer)
    }

    fn run(&self, decode: &MlaDecode, step: &Step, binding: &LayerBinding) -> Result<()> {
        decode.check(step, binding)?;
        self.check_lost()?;
        let mut encoder = self.device.create_command_encoder(&Default::default());
        decode.record(&mut encoder, step, binding);
        self.queue.submit([encoder.finish()]);
        Ok(())
    }

    fn merge_attn_states(&self, _: &MergeStatesSpec, _: &MergeStates<'_, wgpu::Buffer>) -> Result<()> {
        todo!()
    }

    fn kv_append(&self, _: &AppendSpec, _: &[i64], _: &AppendLayer<'_, wgpu::Buffer>) -> Result<()> {
        todo!()
    }

    fn kv_copy_pages(
        &self,
        _: &KvSpec,
        _: u32,
        _: &[(u32, u32)],
        _: &KvView<'_, wgpu::Buffer>,
    ) -> Result<()> {
        todo!()
    }
}

fn check_range(offset: u64, bytes: u64, buffer: &wgpu::Buffer) -> Result<()> {
    for (what, got) in [("offset", offset), ("length", bytes)] {
        if got % 4 != 0 {
            return Err(Error::Alignment { what, got, of: 4, unit: "bytes" });
        }
    }
    let end = offset.saturating_add(bytes);
    if end > buffer.size() {
        return Err(Error::BufferTooSmall { what: "copied range", end, size: buffer.size() });
    }
    Ok(())
}
