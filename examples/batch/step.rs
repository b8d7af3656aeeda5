//! A step on any backend: what a server does, in one submit.

use wgpu_mla::{
    Backend, Binding, Capacity, Compiled, KvAppend, KvAppendArgs, KvCopyPages, KvView, MlaDecode,
    MlaDecodeArgs, Step, Tiling, View,
};

use crate::model::Model;
use crate::{Result, Work};

/// Runs the model's steps on a device.
pub struct Runner<'a, D: Backend> {
    device: D,
    model: &'a Model,
    // Compiled once.
    copy: Compiled<KvCopyPages, D>,
    append: Compiled<KvAppend, D>,
    mla: Compiled<MlaDecode, D>,
    // Filled at each step, and read by every layer.
    copy_step: Step<KvCopyPages, D>,
    append_step: Step<KvAppend, D>,
    mla_step: Step<MlaDecode, D>,
    layers: Vec<LayerState<D>>,
}

/// A layer of the model: its activations, and its bindings, checked and made once.
struct LayerState<D: Backend> {
    q: D::Buffer,
    kv_c: D::Buffer,
    k_pe: D::Buffer,
    out: D::Buffer,
    lse: D::Buffer,
    copies: Binding<KvCopyPages, D>,
    rows: Binding<KvAppend, D>,
    attention: Binding<MlaDecode, D>,
}

impl<'a, D: Backend> Runner<'a, D> {
    pub fn new(device: D, model: &'a Model) -> Result<Self> {
        let spec = model.spec;
        let copy = device.compile(KvCopyPages { shape: spec.shape, kv: spec.kv })?;
        let append = device.compile(model.append_spec())?;
        let mla = device.compile(spec)?;
        let (copy_step, append_step) = (copy.step(0)?, append.step(model.max_tokens)?);
        let mla_step = mla.step(Capacity::default())?;
        let mut runner =
            Self { device, model, copy, append, mla, copy_step, append_step, mla_step, layers: Vec::new() };
        // One buffer for the caches of all layers.
        let kv = runner.device.buffer(model.layer_stride() * model.layers as u64)?;
        for layer in 0..model.layers {
            runner.layers.push(runner.layer(&kv, layer)?);
        }
        Ok(runner)
    }

    fn layer(&self, kv: &D::Buffer, layer: usize) -> Result<LayerState<D>> {
        let (model, spec, tokens) = (self.model, &self.model.spec, self.model.max_tokens);
        let (heads, latent) = (spec.shape.num_heads, spec.shape.kv_lora_rank);
        let (rope, elem) = (spec.shape.qk_rope_head_dim, spec.query.bytes());
        let buffer =
            |row: u32, elem: usize| self.device.buffer(u64::from(tokens) * u64::from(row) * elem as u64);
        let q = buffer(heads * (latent + rope), elem)?;
        let (kv_c, k_pe) = (buffer(latent, elem)?, buffer(rope, elem)?);
        let (out, lse) = (buffer(heads * latent, spec.out.bytes())?, buffer(heads, 4)?);

        let dense = KvView::dense(kv, spec);
        let kv = KvView { layer_stride: model.layer_stride(), layer: layer as u32, ..dense };
        let copies = self.copy.bind(&kv, ())?;
        let new_rows = KvAppendArgs {
            kv_c: View::dense(&kv_c, 1, latent),
            k_pe: View::dense(&k_pe, 1, rope),
            kv: kv.clone(),
            k_scale: 1.0,
            guard: None,
        };
        let rows = self.append.bind(&new_rows, tokens)?;
        let dense = MlaDecodeArgs::dense(spec, &q, kv.buffer, &out, &lse, model.softmax_scale);
        let attention = self.mla.bind(&MlaDecodeArgs { kv, ..dense }, tokens)?;
        Ok(LayerState { q, kv_c, k_pe, out, lse, copies, rows, attention })
    }

    /// For a person.
    pub fn describe(&self) -> String {
        format!("{}, variant {}", self.device.name(), self.mla.why())
    }

    /// Whether it rounds the softmax weights: the check then allows a larger error.
    pub fn rounds_weights(&self) -> bool {
        self.mla.rounds_weights()
    }

    /// How the planner is to cut work.
    pub fn tiling(&self) -> Tiling {
        self.mla.tiling()
    }

    /// Runs a step, all layers, and waits for it as a sampler would.
    pub fn step(&mut self, work: &Work<'_>) -> Result<()> {
        // Tables, once for all layers. Everything the step says is checked here.
        self.copy.prepare(&mut self.copy_step, work.copies)?;
        self.append.prepare(&mut self.append_step, work.slot_mapping)?;
        self.mla.prepare(&mut self.mla_step, (work.plan, work.pages))?;
        // A real model computes these on the device, between the layers.
        for (layer, data) in self.layers.iter().zip(work.layers) {
            for (buffer, bytes) in [(&layer.q, &data.q), (&layer.kv_c, &data.kv_c), (&layer.k_pe, &data.k_pe)]
            {
                self.device.upload(buffer, 0, bytes)?;
            }
        }
        // A host of wgpu records into its own encoder or pass instead, with the model's own work, and submits it.
        self.device.submit(|mut recorder| {
            self.layers.iter().try_for_each(|layer| {
                // In this order: pages that are about to be written are copied, rows are written, then attended.
                self.copy.record_on(&mut recorder, &self.copy_step, &layer.copies)?;
                self.append.record_on(&mut recorder, &self.append_step, &layer.rows)?;
                self.mla.record_on(&mut recorder, &self.mla_step, &layer.attention)
            })
        })?;
        // Waits as a sampler waits for logits: a download waits for all earlier commands.
        if let Some(layer) = self.layers.last() {
            self.device.download(&layer.lse, 4)?;
        }
        Ok(())
    }

    /// `out` and `lse` of the first `tokens` query tokens of the last step, as bytes.
    pub fn read(&self, layer: usize, tokens: usize) -> Result<[Vec<u8>; 2]> {
        let (spec, layer) = (&self.model.spec, &self.layers[layer]);
        let rows = (tokens * spec.shape.num_heads as usize) as u64;
        let out = rows * u64::from(spec.shape.kv_lora_rank) * spec.out.bytes() as u64;
        Ok([self.device.download(&layer.out, out)?, self.device.download(&layer.lse, rows * 4)?])
    }
}
