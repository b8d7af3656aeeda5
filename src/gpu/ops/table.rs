//! A table of words that changes with every step: staged on the host, uploaded, grown where it is too small.

use crate::base::error::{Error, Result};
use crate::gpu::Gpu;
use crate::gpu::pipelines::{groups_of_regions, part, storage};
use crate::gpu::ring::{REGIONS, Ring};
use crate::gpu::scope::scoped;

/// Word 0 is a count, the rest is the op's.
#[derive(Debug, Default)]
pub struct Table {
    staged: Vec<u32>,
    uploaded: Option<Uploaded>,
}

#[derive(Debug)]
struct Uploaded {
    buffer: wgpu::Buffer,
    /// One for each region.
    groups: Vec<wgpu::BindGroup>,
    region_bytes: u64,
    ring: Ring,
}

impl Table {
    /// What was counted in the last upload.
    pub(crate) fn count(&self) -> u32 {
        self.staged.first().copied().unwrap_or(0)
    }

    /// Uploads `count` and `words`. Commands that were recorded keep what was uploaded before.
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
        let words = words.into_iter();
        let out_of_memory = |_| Error::OutOfMemory { what: "a step's table" };
        self.staged.try_reserve(words.size_hint().0).map_err(out_of_memory)?;
        self.staged.extend(words);
        let bytes: &[u8] = bytemuck::cast_slice(&self.staged);
        let need = bytes.len() as u64;
        let kept = self.uploaded.take().filter(|uploaded| uploaded.region_bytes >= need);
        let uploaded = match kept.and_then(Uploaded::turned) {
            Some(uploaded) => uploaded,
            None => Uploaded::new(gpu, layout, need)?,
        };
        let offset = u64::from(uploaded.ring.current()) * uploaded.region_bytes;
        scoped(gpu.device(), "a step's upload", || {
            gpu.queue().write_buffer(&uploaded.buffer, offset, bytes)
        })?;
        self.uploaded = Some(uploaded);
        Ok(())
    }

    /// The words on the device, from the front of a buffer, once something was uploaded for the first time.
    pub(crate) fn buffer(&self) -> Option<&wgpu::Buffer> {
        self.uploaded.as_ref().map(|uploaded| &uploaded.buffer)
    }

    /// The bind group, for commands that are recorded now; once something was uploaded.
    pub(crate) fn group(&self) -> Option<&wgpu::BindGroup> {
        let uploaded = self.uploaded.as_ref()?;
        uploaded.groups.get(uploaded.ring.record() as usize)
    }
}

impl Uploaded {
    fn new(gpu: &Gpu, layout: &wgpu::BindGroupLayout, need: u64) -> Result<Self> {
        let limit = gpu.caps().max_binding_bytes.min(gpu.caps().max_buffer_bytes);
        if need > limit {
            let cure = "split the list over several calls";
            return Err(Error::Limit { what: "the step's table in bytes", need, limit, cure });
        }
        // A power of two, as alignments are: a batch that grows by a token a step needs few new buffers.
        let region_bytes = need.next_power_of_two().max(gpu.storage_alignment());
        // The largest tables have one region: two would exceed a buffer, or one a binding.
        let (region_bytes, regions) = if region_bytes > limit {
            (need, 1)
        } else {
            (region_bytes, (gpu.caps().max_buffer_bytes / region_bytes).clamp(1, REGIONS.into()) as u32)
        };
        let buffer = storage(gpu, "mla.step.table", region_bytes * u64::from(regions))?;
        let region = |index: u64| [part(&buffer, index * region_bytes, region_bytes)];
        let groups = groups_of_regions(gpu, "mla.step.table", layout, regions, region)?;
        Ok(Self { buffer, groups, region_bytes, ring: Ring::new(regions) })
    }

    /// Moves to a region that may be written; `None` where commands were recorded with all of them.
    fn turned(mut self) -> Option<Self> {
        self.ring.turn().then_some(self)
    }
}
