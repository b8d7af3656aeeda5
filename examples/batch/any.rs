//! A step through the verbs that all backends share: on the host's memory, or on an NVIDIA card by CUDA.

use wgpu_mla::any::{AnyBackend, Binding, Buffer, Decode, Step};
use wgpu_mla::{AppendLayer, Backend, Capacity, KvView, Layer, Tiling, View};

use crate::model::Model;
use crate::{Result, Runner, Work};

pub struct AnyRunner<'a> {
    backend: AnyBackend,
    model: &'a Model,
    mla: Decode,
    step: Step,
    kv: Buffer,
    layers: Vec<LayerBuffers>,
}

struct LayerBuffers {
    q: Buffer,
    kv_c: Buffer,
    k_pe: Buffer,
    out: Buffer,
    lse: Buffer,
    binding: Binding,
}

impl<'a> AnyRunner<'a> {
    pub fn new(backend: AnyBackend, model: &'a Model) -> Result<Self> {
        let spec = &model.spec;
        let mla = backend.decode(spec, None)?;
        let step = backend.step(&mla, Capacity::default())?;
        // One buffer for the caches of all layers.
        let kv = backend.buffer(model.layer_stride() * model.layers as u64 * spec.kv.dtype.bytes() as u64)?;
        let rows = u64::from(model.max_tokens);
        let (heads, latent) = (u64::from(spec.shape.num_heads), u64::from(spec.shape.kv_lora_rank));
        let (rope, elem) = (u64::from(spec.shape.qk_rope_head_dim), spec.query.bytes() as u64);
        let mut layers = Vec::new();
        for layer in 0..model.layers {
            let q = backend.buffer(rows * heads * (latent + rope) * elem)?;
            let (kv_c, k_pe) = (backend.buffer(rows * latent * elem)?, backend.buffer(rows * rope * elem)?);
            let out = backend.buffer(rows * heads * latent * spec.out.bytes() as u64)?;
            let lse = backend.buffer(rows * heads * 4)?;
            let dense = Layer::dense(spec, &q, &kv, &out, &lse, model.softmax_scale);
            let args = Layer { kv: view(model, &kv, layer), ..dense };
            let binding = backend.bind(&mla, model.max_tokens, &args)?;
            layers.push(LayerBuffers { q, kv_c, k_pe, out, lse, binding });
        }
        Ok(Self { backend, model, mla, step, kv, layers })
    }
}

/// One layer's part of the caches.
fn view<'b>(model: &Model, kv: &'b Buffer, layer: usize) -> KvView<&'b Buffer> {
    KvView { layer_stride: model.layer_stride(), layer: layer as u32, ..KvView::dense(kv, &model.spec) }
}

impl Runner for AnyRunner<'_> {
    fn describe(&self) -> String {
        format!("{}, row {}", self.backend.name(), self.mla.variant())
    }

    fn rounds_weights(&self) -> bool {
        self.backend.rounds_weights(&self.mla)
    }

    fn tiling(&self) -> Tiling {
        self.backend.tiling(&self.mla)
    }

    fn step(&mut self, work: &Work<'_>) -> Result<()> {
        let (backend, spec) = (&self.backend, &self.model.spec);
        backend.prepare(&self.mla, &mut self.step, work.plan, work.pages)?;
        for (at, (layer, data)) in self.layers.iter().zip(work.layers).enumerate() {
            for (buffer, bytes) in [(&layer.q, &data.q), (&layer.kv_c, &data.kv_c), (&layer.k_pe, &data.k_pe)]
            {
                backend.upload(buffer, 0, bytes)?;
            }
            let kv = view(self.model, &self.kv, at);
            backend.kv_copy_pages(&spec.kv, spec.shape.row_elems(), work.copies, &kv)?;
            let append = AppendLayer {
                kv_c: View::dense(&layer.kv_c, 1, spec.shape.kv_lora_rank),
                k_pe: View::dense(&layer.k_pe, 1, spec.shape.qk_rope_head_dim),
                kv,
                k_scale: 1.0,
            };
            backend.kv_append(&self.model.append_spec(), work.slot_mapping, &append)?;
            backend.run(&self.mla, &self.step, &layer.binding)?;
        }
        // A download waits for what comes before it.
        if let Some(layer) = self.layers.last() {
            backend.download(&layer.lse, 4)?;
        }
        Ok(())
    }

    fn read(&self, layer: usize, tokens: usize) -> Result<[Vec<u8>; 2]> {
        let (spec, layer) = (&self.model.spec, &self.layers[layer]);
        let rows = (tokens * spec.shape.num_heads as usize) as u64;
        let out = rows * u64::from(spec.shape.kv_lora_rank) * spec.out.bytes() as u64;
        Ok([self.backend.download(&layer.out, out)?, self.backend.download(&layer.lse, rows * 4)?])
    }
}
