//! A step on wgpu: what a server does, with the host's device, queue and encoder.

use wgpu_mla::gpu::ops::{AppendBinding, AppendStep, CopyBinding, CopySpec, CopyStep, KvAppend, KvCopyPages};
use wgpu_mla::gpu::{Gpu, LayerBinding, MlaDecode, Options, Step};
use wgpu_mla::wgpu::{Buffer, PollType};
use wgpu_mla::{AppendLayer, Backend, Capacity, KvView, Layer, Tiling, View};

use crate::model::Model;
use crate::{Result, Runner, Work};

pub struct GpuRunner<'a> {
    gpu: Gpu,
    model: &'a Model,
    // Compiled once.
    copy: KvCopyPages,
    append: KvAppend,
    mla: MlaDecode,
    // Filled at each step, and read by every layer.
    copy_step: CopyStep,
    append_step: AppendStep,
    step: Step,
    layers: Vec<LayerState>,
}

/// A layer of the model: its activations, and its bindings, checked and made once.
struct LayerState {
    q: Buffer,
    kv_c: Buffer,
    k_pe: Buffer,
    out: Buffer,
    lse: Buffer,
    copies: CopyBinding,
    rows: AppendBinding,
    attention: LayerBinding,
}

impl<'a> GpuRunner<'a> {
    pub fn new(gpu: Gpu, model: &'a Model) -> Result<Self> {
        let (spec, pipelines) = (&model.spec, &gpu.pipelines);
        let row_elems = spec.shape.row_elems();
        let copy = KvCopyPages::new(pipelines, CopySpec { kv: spec.kv, row_elems })?;
        let append = KvAppend::new(pipelines, model.append_spec())?;
        let mla = MlaDecode::new(pipelines, spec, &Options::default())?;
        // One buffer for the caches of all layers. `Gpu::buffer` is a buffer of STORAGE | COPY_DST | COPY_SRC.
        let kv = gpu.buffer(model.layer_stride() * model.layers as u64 * spec.kv.dtype.bytes() as u64)?;
        let mut layers = Vec::new();
        for layer in 0..model.layers {
            layers.push(LayerState::new(&gpu, model, (&copy, &append, &mla), &kv, layer)?);
        }
        let step = mla.step(Capacity::default())?;
        let (copy_step, append_step) = Default::default();
        Ok(Self { gpu, model, copy, append, mla, copy_step, append_step, step, layers })
    }
}

impl LayerState {
    fn new(
        gpu: &Gpu,
        model: &Model,
        (copy, append, mla): (&KvCopyPages, &KvAppend, &MlaDecode),
        kv: &Buffer,
        layer: usize,
    ) -> Result<Self> {
        let (spec, tokens) = (&model.spec, model.max_tokens);
        let (heads, latent) = (spec.shape.num_heads, spec.shape.kv_lora_rank);
        let (rope, elem) = (spec.shape.qk_rope_head_dim, spec.query.bytes());
        let buffer = |row: u32, elem: usize| gpu.buffer(u64::from(tokens) * u64::from(row) * elem as u64);
        let q = buffer(heads * (latent + rope), elem)?;
        let (kv_c, k_pe) = (buffer(latent, elem)?, buffer(rope, elem)?);
        let (out, lse) = (buffer(heads * latent, spec.out.bytes())?, buffer(heads, 4)?);

        let dense = KvView::dense(kv, spec);
        let kv = KvView { layer_stride: model.layer_stride(), layer: layer as u32, ..dense };
        let copies = copy.bind(&gpu.device, &kv)?;
        let new_rows = AppendLayer {
            kv_c: View::dense(&kv_c, 1, latent),
            k_pe: View::dense(&k_pe, 1, rope),
            kv,
            k_scale: 1.0,
        };
        let rows = append.bind(&gpu.device, &new_rows, tokens)?;
        let dense = Layer::dense(spec, &q, kv.buffer, &out, &lse, model.softmax_scale);
        let attention = mla.bind(tokens, &Layer { kv, ..dense })?;
        Ok(Self { q, kv_c, k_pe, out, lse, copies, rows, attention })
    }
}

impl Runner for GpuRunner<'_> {
    fn describe(&self) -> String {
        format!("{}, {}", self.gpu.describe(), self.mla.why())
    }

    fn rounds_weights(&self) -> bool {
        self.mla.rounds_weights()
    }

    fn tiling(&self) -> Tiling {
        self.mla.tiling()
    }

    fn step(&mut self, work: &Work<'_>) -> Result<()> {
        let (device, queue) = (&self.gpu.device, &self.gpu.queue);
        // Tables, once for all layers. Everything the step says is checked here.
        self.copy.prepare(device, queue, &mut self.copy_step, work.copies)?;
        self.append.prepare(device, queue, &mut self.append_step, work.slot_mapping)?;
        self.mla.prepare(queue, &mut self.step, work.plan, work.pages)?;

        let mut encoder = device.create_command_encoder(&Default::default());
        for (layer, data) in self.layers.iter().zip(work.layers) {
            // A real model computes these on the device, in the same encoder.
            queue.write_buffer(&layer.q, 0, &data.q);
            queue.write_buffer(&layer.kv_c, 0, &data.kv_c);
            queue.write_buffer(&layer.k_pe, 0, &data.k_pe);
            // In this order: pages that are about to be written are copied, rows are written, then attended.
            self.copy.record(&mut encoder, &self.copy_step, &layer.copies);
            self.append.record(&mut encoder, &self.append_step, &layer.rows);
            self.mla.record(&mut encoder, &self.step, &layer.attention);
        }
        queue.submit([encoder.finish()]);
        // A sampler waits for the logits; so does this.
        device.poll(PollType::wait_indefinitely())?;
        Ok(self.gpu.check_lost()?)
    }

    fn read(&self, layer: usize, tokens: usize) -> Result<[Vec<u8>; 2]> {
        let (spec, layer) = (&self.model.spec, &self.layers[layer]);
        let rows = (tokens * spec.shape.num_heads as usize) as u64;
        let out = rows * u64::from(spec.shape.kv_lora_rank) * spec.out.bytes() as u64;
        Ok([self.gpu.download(&layer.out, out)?, self.gpu.download(&layer.lse, rows * 4)?])
    }
}
