//! A model's cache, weights and activations in a device's memory, as its layers take them.

use wgpu_mla::{
    Device, Dtype, E4m3Weights, GuardCounts, GuardView, KvBProj, KvView, LayerGuard, MlaLayer, MlaLayerArgs,
    ScaleSharing, Selection, View,
};

use crate::attention::Rows;
use crate::index_arrays::IndexArrays;
use crate::{Model, Result, Setup};

pub struct Arrays<B> {
    /// For the pages that there is memory for.
    spec: MlaLayer,
    /// Pages that there may be.
    most_pages: u32,
    /// Pages of a slab.
    slab_pages: u32,
    /// Each holds `slab_pages` pages of all layers.
    kv: Vec<B>,
    /// `[T, H * (P + R) + L + R]`: a token's query, latent and rotary key together, so that a step's are one copy.
    rows: B,
    /// `[T, H, V]`.
    out: B,
    cos_sin: B,
    max_position: u32,
    softmax_scale: f32,
    layers: Vec<LayerArrays<B>>,
    /// Only for a model that attends a part of the tokens.
    pub index: Option<IndexArrays<B>>,
    /// Counters of what rounding loses, [`LayerGuard::ROWS`] rows a layer.
    pub guard: Option<B>,
}

/// What a layer has for itself.
struct LayerArrays<B> {
    kv_b_proj: B,
    /// The scales of a `kv_b_proj` in e4m3.
    kv_b_scales: Option<B>,
    k_scale: f32,
}

impl<B> Arrays<B> {
    pub fn new(device: &impl Device<Buffer = B>, model: &Model, setup: &Setup) -> Result<Self> {
        let (config, mut spec) = (&model.config, setup.spec(model));
        let (most_pages, slab_pages) = (spec.kv.num_pages, setup.slab_pages(model, device.largest_binding()));
        spec.kv.num_slabs(slab_pages)?;
        spec.kv.num_pages = slab_pages.min(most_pages);
        let uploaded = |bytes: &[u8]| -> Result<B> {
            let buffer = device.buffer(bytes.len() as u64)?;
            device.upload(&buffer, 0, bytes)?;
            Ok(buffer)
        };
        let floats = |per_token: u32| device.buffer(u64::from(setup.max_tokens()) * u64::from(per_token) * 4);
        let mut layers = Vec::new();
        for (index, kv_b) in model.kv_b.iter().enumerate() {
            let (dtype, bytes) = kv_b.bytes();
            let weights = KvBProj::new(spec.dims(), dtype, &bytes)?;
            let (weights, scales) = match spec.weight {
                Dtype::E4m3 => {
                    let E4m3Weights { codes, scales, .. } = weights.prepare_e4m3(ScaleSharing::PerHead)?;
                    (codes, Some(uploaded(&Dtype::F32.encode_all(&scales))?))
                }
                dtype => (weights.prepare(dtype)?, None),
            };
            let (kv_b_proj, k_scale) = (uploaded(&weights)?, setup.k_scale(index));
            layers.push(LayerArrays { kv_b_proj, kv_b_scales: scales, k_scale });
        }
        // A row of the table is smaller than what its token has in the cache: a device that holds the cache holds the table.
        let max_position = setup.max_position(model);
        Ok(Self {
            kv: vec![device.buffer(slab_bytes(&spec, slab_pages, config.num_layers))?],
            rows: floats(row_elems(&spec))?,
            out: device.buffer(spec.out_bytes(setup.max_tokens()))?,
            cos_sin: uploaded(&Dtype::F32.encode_all(&config.rope.cos_sin(max_position)?))?,
            max_position,
            softmax_scale: config.softmax_scale()?,
            layers,
            index: IndexArrays::new(device, model, setup, slab_pages)?,
            guard: match setup.guard {
                true => Some(device.buffer(guard_bytes(config.num_layers))?),
                false => None,
            },
            spec,
            most_pages,
            slab_pages,
        })
    }

    /// Takes memory for another slab.
    pub fn grow(&mut self, device: &impl Device<Buffer = B>) -> Result<()> {
        let slab = device.buffer(slab_bytes(&self.spec, self.slab_pages, self.layers.len()))?;
        if let Some(index) = &mut self.index {
            index.grow(device)?;
        }
        self.kv.push(slab);
        self.count_pages();
        Ok(())
    }

    /// Takes it back.
    pub fn shrink(&mut self) {
        self.kv.pop();
        if let Some(index) = &mut self.index {
            index.shrink();
        }
        self.count_pages();
    }

    fn count_pages(&mut self) {
        let pages = (self.kv.len() as u32).saturating_mul(self.slab_pages).min(self.most_pages);
        self.spec.kv.num_pages = pages;
        if let Some(index) = &mut self.index {
            index.set_pages(pages);
        }
    }

    /// Pages of a slab.
    pub fn slab_pages(&self) -> u32 {
        self.slab_pages
    }

    /// Slabs that there is memory for.
    pub fn num_slabs(&self) -> usize {
        self.kv.len()
    }

    /// Bytes of a slab of all caches.
    pub fn slab_bytes(&self) -> u64 {
        let index = self.index.as_ref().map_or(0, IndexArrays::slab_bytes);
        slab_bytes(&self.spec, self.slab_pages, self.layers.len()).saturating_add(index)
    }

    /// Bytes that the caches have.
    pub fn cache_bytes(&self) -> u64 {
        self.slab_bytes().saturating_mul(self.kv.len() as u64)
    }

    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// What the attention reads.
    pub fn rows(&self) -> &B {
        &self.rows
    }

    /// What it writes.
    pub fn out(&self) -> &B {
        &self.out
    }

    /// Its dims and dtypes.
    pub fn spec(&self) -> &MlaLayer {
        &self.spec
    }

    /// `k_scale` of a layer.
    pub fn k_scale(&self, layer: usize) -> f32 {
        self.layers[layer].k_scale
    }

    /// Bytes of `out` that so many tokens have.
    pub fn out_bytes(&self, tokens: usize) -> u64 {
        self.spec.out_bytes(tokens as u32)
    }

    /// A step's rows as they lie in `rows`.
    pub fn packed(&self, rows: &Rows) -> Vec<u8> {
        let (shape, each) = (self.spec.shape, row_elems(&self.spec));
        let (latent, rope) = (shape.kv_lora_rank as usize, shape.qk_rope_head_dim as usize);
        let query = each as usize - latent - rope;
        let mut packed = Vec::with_capacity((rows.q.len() + rows.kv_c.len() + rows.k_pe.len()) * 4);
        let keys = rows.kv_c.chunks_exact(latent).zip(rows.k_pe.chunks_exact(rope));
        for (q, (kv_c, k_pe)) in rows.q.chunks_exact(query).zip(keys) {
            for part in [q, kv_c, k_pe] {
                packed.extend(part.iter().flat_map(|x| x.to_le_bytes()));
            }
        }
        packed
    }

    /// One layer's cache.
    pub fn kv(&self, layer: usize) -> wgpu_mla::Result<KvView<&B>> {
        let slabs: Vec<&B> = self.kv.iter().collect();
        KvView::in_slabs(&slabs, &self.spec.mla(), self.slab_pages, layer as u32)
    }

    /// One layer.
    pub fn args(&self, layer: usize) -> wgpu_mla::Result<MlaLayerArgs<&B>> {
        let (spec, each) = (&self.spec, row_elems(&self.spec));
        let (latent, rope) = (spec.shape.kv_lora_rank, spec.shape.qk_rope_head_dim);
        let part = |offset: u32, head_stride: u32| View {
            buffer: &self.rows,
            offset: offset.into(),
            token_stride: each.into(),
            head_stride: head_stride.into(),
        };
        let head = spec.qk_nope_head_dim + rope;
        let LayerArrays { kv_b_proj, kv_b_scales, k_scale } = &self.layers[layer];
        Ok(MlaLayerArgs {
            q_nope: part(0, head),
            q_pe: part(spec.qk_nope_head_dim, head),
            kv_c: part(each - rope - latent, latent),
            k_pe: part(each - rope, rope),
            kv: self.kv(layer)?,
            kv_b_proj,
            kv_b_scales: kv_b_scales.as_ref(),
            cos_sin: &self.cos_sin,
            max_position: self.max_position,
            out: View::dense(&self.out, spec.shape.num_heads, spec.v_head_dim),
            softmax_scale: self.softmax_scale,
            q_scale: 1.0,
            k_scale: *k_scale,
            out_scale: 1.0,
            expanded: None,
            selection: match &self.index {
                Some(index) => index.selection(layer, &self.cos_sin, self.max_position)?,
                None => Selection::All,
            },
            guard: self.guard.as_ref().map(|counters| {
                let row = LayerGuard::ROWS * layer as u32;
                GuardView { counters, row }
            }),
        })
    }
}

/// Bytes of the counters of so many layers.
pub fn guard_bytes(layers: usize) -> u64 {
    layers as u64 * u64::from(LayerGuard::ROWS) * GuardCounts::BYTES
}

/// Elements of a token's row of activations.
fn row_elems(spec: &MlaLayer) -> u32 {
    let rope = spec.shape.qk_rope_head_dim;
    spec.shape.num_heads * (spec.qk_nope_head_dim + rope) + spec.shape.kv_lora_rank + rope
}

/// Bytes of a slab of all layers.
fn slab_bytes(spec: &MlaLayer, slab_pages: u32, layers: usize) -> u64 {
    spec.mla().slab_bytes(slab_pages).saturating_mul(layers as u64)
}
