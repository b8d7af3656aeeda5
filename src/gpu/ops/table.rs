//! A table of words that changes with every step: staged on the host, uploaded, grown where it is too small.

use crate::gpu::Gpu;
use crate::gpu::pipelines::{group, storage};
use crate::gpu::scope::scoped;
use crate::{Error, Result};

/// Word 0 is a count, the rest is the op's.
#[derive(Debug, Default)]
pub struct Table {
    staged: Vec<u32>,
    uploaded: Option<Uploaded>,
}

#[derive(Debug)]
struct Uploaded {
    buffer: wgpu::Buffer,
    group: wgpu::BindGroup,
}

impl Table {
    /// What was counted in the last upload.
    pub(crate) fn count(&self) -> u32 {
        self.staged.first().copied().unwrap_or(0)
    }

    /// Uploads `count` and `words`; what an earlier call uploaded is gone.
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::OutOfMemory`] and [`Error::Internal`].
    pub(crate) fn upload(
        &mut self,
        gpu: &Gpu,
        layout: &wgpu::BindGroupLayout,
        count: u32,
        words: impl IntoIterator<Item = u32>,
    ) -> Result<()> {
        self.staged.clear();
        self.staged.push(count);
        self.staged.extend(words);
        let bytes: &[u8] = bytemuck::cast_slice(&self.staged);
        let need = bytes.len() as u64;
        let uploaded = match self.uploaded.take() {
            Some(uploaded) if uploaded.buffer.size() >= need => uploaded,
            _ => Uploaded::new(gpu, layout, need)?,
        };
        scoped(gpu.device(), "a step's upload", || gpu.queue().write_buffer(&uploaded.buffer, 0, bytes))?;
        self.uploaded = Some(uploaded);
        Ok(())
    }

    /// The words on the device, once something was uploaded.
    pub(crate) fn buffer(&self) -> Option<&wgpu::Buffer> {
        self.uploaded.as_ref().map(|uploaded| &uploaded.buffer)
    }

    /// The bind group, once something was uploaded.
    pub(crate) fn group(&self) -> Option<&wgpu::BindGroup> {
        self.uploaded.as_ref().map(|uploaded| &uploaded.group)
    }
}

impl Uploaded {
    fn new(gpu: &Gpu, layout: &wgpu::BindGroupLayout, need: u64) -> Result<Self> {
        let limit = gpu.caps().max_binding_bytes.min(gpu.caps().max_buffer_bytes);
        if need > limit {
            let cure = "split the list over several calls";
            return Err(Error::Limit { what: "the step's table in bytes", need, limit, cure });
        }
        // Powers of two, so that a batch that grows by a token a step does not make a buffer a step.
        let buffer = storage(gpu, "mla.step.table", need.next_power_of_two().clamp(256, limit.max(256)))?;
        let group = group(gpu, "mla.step.table", layout, [buffer.as_entire_binding()])?;
        Ok(Self { buffer, group })
    }
}
