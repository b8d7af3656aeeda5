//! Attention on a wgpu device: every layer is bound once, and costs one copy in, one submit and one wait.

use std::sync::mpsc::channel;

use wgpu_mla::gpu::ops::{CopyBinding, CopySpec, CopyStep, KvCopyPages};
use wgpu_mla::gpu::{Gpu, LayerCapacity, MlaLayer, MlaLayerBinding, MlaLayerStep};
use wgpu_mla::{Backend, Dtype, Error, Policy, SeqId, wgpu};

use crate::arrays::Arrays;
use crate::attention::{Attention, Rows};
use crate::paged::variant;
use crate::{Model, Pages, Result, Setup};

pub struct Recorded {
    gpu: Gpu,
    mla: MlaLayer,
    step: MlaLayerStep,
    copy: KvCopyPages,
    copy_step: CopyStep,
    layers: Vec<(CopyBinding, MlaLayerBinding)>,
    arrays: Arrays<wgpu::Buffer>,
    /// What the host reads `arrays.out()` from.
    staging: wgpu::Buffer,
    pages: Pages,
}

impl Recorded {
    pub fn new(gpu: Gpu, model: &Model, setup: &Setup) -> Result<Self> {
        let (spec, max_tokens) = (setup.spec(model), setup.max_tokens());
        let variant = variant(&gpu, &spec.mla(), setup.exact)?;
        // A prompt's last piece may be one token: that is decoded, wherever it stands in a batch.
        let capacity = LayerCapacity { tokens: max_tokens, decode_tokens: max_tokens, prefix_rows: 0 };
        let mla = MlaLayer::with_variant(&gpu.pipelines, &spec, capacity, variant)?;
        let copy = CopySpec { kv: spec.kv, row_elems: spec.shape.row_elems() };
        let copy = KvCopyPages::new(&gpu.pipelines, copy)?;
        let arrays = Arrays::new(&gpu, model, setup)?;
        let bind = |layer| Ok((copy.bind(&gpu.device, &arrays.kv(layer))?, mla.bind(&arrays.args(layer))?));
        Ok(Self {
            layers: (0..arrays.num_layers()).map(bind).collect::<Result<_>>()?,
            staging: gpu.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("generate.out"),
                size: arrays.out().size(),
                usage: wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::MAP_READ,
                mapped_at_creation: false,
            }),
            step: mla.step()?,
            copy_step: CopyStep::default(),
            pages: Pages::new(spec.kv, model.config.max_position_embeddings, max_tokens)?,
            arrays,
            copy,
            mla,
            gpu,
        })
    }

    /// Waits for the submit and reads the first bytes of `staging`.
    fn read(&self, submitted: wgpu::SubmissionIndex, bytes: u64) -> Result<Vec<f32>> {
        let lost = |detail: String| Error::DeviceLost { detail };
        let (tell, told) = channel();
        self.staging.map_async(wgpu::MapMode::Read, ..bytes, move |result| {
            let _ = tell.send(result);
        });
        let wait = wgpu::PollType::Wait { submission_index: Some(submitted), timeout: None };
        self.gpu.device.poll(wait).map_err(|error| lost(error.to_string()))?;
        let mapped = told.recv().map_err(|error| lost(error.to_string()))?;
        mapped.map_err(|error| lost(error.to_string()))?;
        let view = self.staging.get_mapped_range(..bytes).map_err(|error| lost(error.to_string()))?;
        let values = Dtype::F32.decode_all(&view);
        drop(view);
        self.staging.unmap();
        Ok(values)
    }
}

impl Attention for Recorded {
    fn describe(&self) -> String {
        format!("{}, row {}", self.gpu.name(), self.mla.decode().variant())
    }

    fn pages(&self) -> &Pages {
        &self.pages
    }

    fn pages_mut(&mut self) -> &mut Pages {
        &mut self.pages
    }

    fn begin(&mut self, batch: &[(SeqId, u32)]) -> Result<()> {
        self.pages.begin(batch)?;
        let Gpu { device, queue, .. } = &self.gpu;
        self.copy.prepare(device, queue, &mut self.copy_step, &self.pages.append.copies)?;
        Ok(self.mla.prepare(queue, &mut self.step, &self.pages.batch(), Policy::Auto)?)
    }

    fn attend(&mut self, layer: usize, rows: &Rows) -> Result<Vec<f32>> {
        let (Gpu { device, queue, .. }, arrays) = (&self.gpu, &self.arrays);
        let bytes = arrays.out_bytes(self.pages.positions.len());
        if bytes == 0 {
            return Ok(Vec::new());
        }
        self.gpu.check_lost()?;
        queue.write_buffer(arrays.rows(), 0, &arrays.packed(rows));
        let (copies, binding) = &self.layers[layer];
        let mut encoder = device.create_command_encoder(&Default::default());
        if !self.pages.append.copies.is_empty() {
            self.copy.record(&mut encoder, &self.copy_step, copies);
        }
        self.mla.record(&mut encoder, &self.step, binding);
        encoder.copy_buffer_to_buffer(arrays.out(), 0, &self.staging, 0, bytes);
        self.read(queue.submit([encoder.finish()]), bytes)
    }
}
