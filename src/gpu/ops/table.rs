//! A table of words that changes with every step: staged on the host, uploaded, grown where it is too small.

use crate::gpu::scope::scoped;
use crate::{Error, Result};

/// Word 0 is a count, the rest is the op's.
#[derive(Debug, Default)]
pub(super) struct Table {
    staged: Vec<u32>,
    uploaded: Option<Uploaded>,
}

#[derive(Debug)]
struct Uploaded {
    buffer: wgpu::Buffer,
    group: wgpu::BindGroup,
}

impl Table {
    /// Uploads `count` and `words`; what an earlier call uploaded is gone.
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::OutOfMemory`] and [`Error::Internal`].
    pub(super) fn upload(
        &mut self,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
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
            _ => Uploaded::new(device, layout, need)?,
        };
        scoped(device, "a step's upload", || queue.write_buffer(&uploaded.buffer, 0, bytes))?;
        self.uploaded = Some(uploaded);
        Ok(())
    }

    /// The words on the device, once something was uploaded.
    pub(super) fn buffer(&self) -> Option<&wgpu::Buffer> {
        self.uploaded.as_ref().map(|uploaded| &uploaded.buffer)
    }

    /// The bind group, once something was uploaded.
    pub(super) fn group(&self) -> Option<&wgpu::BindGroup> {
        self.uploaded.as_ref().map(|uploaded| &uploaded.group)
    }
}

impl Uploaded {
    fn new(device: &wgpu::Device, layout: &wgpu::BindGroupLayout, need: u64) -> Result<Self> {
        let limits = device.limits();
        let limit = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
        if need > limit {
            let cure = "split the list over several calls";
            return Err(Error::Limit { what: "the step's table in bytes", need, limit, cure });
        }
        // Powers of two, so that a batch that grows by a token a step does not make a buffer a step.
        let size = need.next_power_of_two().clamp(256, limit.max(256));
        scoped(device, "a step's table", || {
            let buffer = device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("mla.step.table"),
                size,
                usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            });
            let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some("mla.step.table"),
                layout,
                entries: &[wgpu::BindGroupEntry { binding: 0, resource: buffer.as_entire_binding() }],
            });
            Self { buffer, group }
        })
    }
}
