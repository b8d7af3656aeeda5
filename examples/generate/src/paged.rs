//! Attention by `wgpu_mla::MlaLayer`, on any backend: what a model does between its projections and `o_proj`.

use wgpu_mla::any::{AnyBackend, Buffer};
use wgpu_mla::ops::HeadDims;
use wgpu_mla::{
    Backend, Dtype, KvBProj, KvSpec, KvView, LayerArgs, LayerBatch, MlaLayer, MlaLayerSpec, MlaSpec, Policy,
    RopeLayout, SeqId, View,
};

use crate::attention::{Attention, Rows};
use crate::backend::{self, Where};
use crate::layer::values;
use crate::{CosSin, Error, Model, Pages, Result};

/// What is asked of a cache and of who attends it.
#[derive(Debug, Clone)]
pub struct Setup {
    pub backend: Where,
    /// Dtype of the cache.
    pub kv: Dtype,
    pub page_size: u32,
    /// Tokens that the cache has room for; each sequence may fill its last page only in part.
    pub tokens: u32,
    /// Sequences at a time.
    pub sequences: u32,
    /// Tokens of a step: a longer prompt is computed in pieces.
    pub step_tokens: u32,
    /// Bytes that the keys and values of a prompt may take at a time.
    pub workspace_bytes: u64,
    /// Takes the best row of the decode that rounds no softmax weights, as rows on tensor cores do.
    pub exact: bool,
    /// `k_scale` of each layer of an e4m3 cache; where there is none it is 1.
    pub k_scales: Vec<f32>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            backend: Where::Auto,
            kv: Dtype::F16,
            page_size: 64,
            tokens: 1024,
            sequences: 1,
            step_tokens: 256,
            workspace_bytes: 64 << 20,
            exact: false,
            k_scales: Vec::new(),
        }
    }
}

impl Setup {
    fn spec(&self, model: &Model) -> MlaLayerSpec {
        let num_pages = self.tokens.div_ceil(self.page_size.max(1)).saturating_add(self.sequences);
        let config = &model.config;
        MlaLayerSpec {
            shape: config.shape,
            qk_nope_head_dim: config.qk_nope_head_dim as u32,
            v_head_dim: config.v_head_dim as u32,
            kv: KvSpec { dtype: self.kv, page_size: self.page_size, num_pages },
            // Nothing beyond the cache is rounded.
            dtype: Dtype::F32,
            weight: Dtype::F32,
            rope: if config.rope.interleaved { RopeLayout::Interleaved } else { RopeLayout::HalfSplit },
            decode_threshold: 1,
            workspace_bytes: self.workspace_bytes,
        }
    }
}

/// An attention for a model.
///
/// # Errors
/// Those of the backend; [`wgpu_mla::Error::OutOfMemory`] for a cache that is too large.
pub fn paged(model: &Model, setup: &Setup) -> Result<Box<dyn Attention>> {
    let backend = backend::open(setup.backend, &setup.spec(model).mla())?;
    Ok(Box::new(Paged::new(backend, model, setup)?))
}

struct Paged {
    backend: AnyBackend,
    layer: MlaLayer<AnyBackend>,
    buffers: Buffers,
    /// `kv_b_proj` and `k_scale` of each layer.
    layers: Vec<(Buffer, f32)>,
    softmax_scale: f32,
    max_position: usize,
    pages: Pages,
    max_tokens: usize,
}

struct Buffers {
    kv: Buffer,
    q: Buffer,
    kv_c: Buffer,
    k_pe: Buffer,
    out: Buffer,
    cos_sin: Buffer,
}

impl Paged {
    fn new(backend: AnyBackend, model: &Model, setup: &Setup) -> Result<Self> {
        let (config, spec) = (&model.config, setup.spec(model));
        let variant = if setup.exact { exact_row(&backend, &spec.mla())? } else { None };
        let layer = MlaLayer::with_variant(&backend, &spec, variant)?;
        let max_tokens = setup.step_tokens.max(setup.sequences).max(1);
        let CosSin { table, rope_dim, .. } =
            config.rope.cos_sin(spec.shape.qk_rope_head_dim as usize, config.max_position_embeddings);
        let floats = |per_token: u32| backend.buffer(u64::from(max_tokens) * u64::from(per_token) * 4);
        let heads = spec.shape.num_heads;
        let buffers = Buffers {
            kv: backend
                .buffer(layer_stride(&spec) * config.num_layers as u64 * spec.kv.dtype.bytes() as u64)?,
            q: floats(heads * (spec.qk_nope_head_dim + spec.shape.qk_rope_head_dim))?,
            kv_c: floats(spec.shape.kv_lora_rank)?,
            k_pe: floats(spec.shape.qk_rope_head_dim)?,
            out: floats(heads * spec.v_head_dim)?,
            cos_sin: uploaded(&backend, &Dtype::F32.encode_all(&table))?,
        };
        let dims = HeadDims {
            num_heads: heads,
            kv_lora_rank: spec.shape.kv_lora_rank,
            qk_nope_head_dim: spec.qk_nope_head_dim,
            v_head_dim: spec.v_head_dim,
        };
        let mut layers = Vec::new();
        for (index, kv_b) in model.kv_b.iter().enumerate() {
            let weights = Dtype::F32.encode_all(&values(kv_b)?);
            let weights = KvBProj::new(dims, Dtype::F32, &weights)?.prepare(spec.weight)?;
            let k_scale = match spec.kv.dtype {
                Dtype::E4m3 => setup.k_scales.get(index).copied().unwrap_or(1.0),
                _ => 1.0,
            };
            layers.push((uploaded(&backend, &weights)?, k_scale));
        }
        Ok(Self {
            backend,
            layer,
            buffers,
            layers,
            softmax_scale: config.softmax_scale(),
            max_position: table.len() / rope_dim,
            pages: Pages::new(spec.kv)?,
            max_tokens: max_tokens as usize,
        })
    }

    /// Every position has a row of cosines and sines.
    fn check_positions(&self) -> Result<()> {
        let most = self.max_position;
        if let Some(position) = self.pages.positions.iter().find(|&&position| position as usize >= most) {
            return Err(Error::Input(format!(
                "position {position}: the model has {most}; end the sequence before it"
            )));
        }
        Ok(())
    }

    fn kv(&self, layer: usize) -> KvView<'_, Buffer> {
        let spec = self.layer.spec();
        let dense = KvView::dense(&self.buffers.kv, &spec.mla());
        KvView { layer_stride: layer_stride(spec), layer: layer as u32, ..dense }
    }
}

/// The best row that rounds no softmax weights.
fn exact_row(backend: &AnyBackend, spec: &MlaSpec) -> Result<Option<&'static str>> {
    for row in backend.variants(spec) {
        if !backend.rounds_weights(&backend.decode(spec, Some(row))?) {
            return Ok(Some(row));
        }
    }
    Ok(None)
}

fn uploaded(backend: &AnyBackend, bytes: &[u8]) -> Result<Buffer> {
    let buffer = backend.buffer(bytes.len() as u64)?;
    backend.upload(&buffer, 0, bytes)?;
    Ok(buffer)
}

/// Elements from one layer's cache to the next.
fn layer_stride(spec: &MlaLayerSpec) -> u64 {
    spec.kv.num_slots() * u64::from(spec.shape.row_elems())
}

impl Attention for Paged {
    fn describe(&self) -> String {
        format!("{}, row {}", self.backend.name(), self.layer.decode().variant())
    }

    fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    fn pages(&self) -> &Pages {
        &self.pages
    }

    fn pages_mut(&mut self) -> &mut Pages {
        &mut self.pages
    }

    fn begin(&mut self, batch: &[(SeqId, u32)]) -> Result<()> {
        self.pages.begin(batch)?;
        self.check_positions()?;
        let batch = LayerBatch {
            seq_lens: &self.pages.seq_lens,
            query_start_loc: &self.pages.query_start_loc,
            slot_mapping: &self.pages.slot_mapping,
            pages: self.pages.table.page_table(),
            shared_prefixes: &[],
            expanded: &[],
        };
        Ok(self.layer.prepare(&self.backend, &batch, Policy::Auto)?)
    }

    fn attend(&mut self, layer: usize, rows: &Rows) -> Result<Vec<f32>> {
        let (backend, spec, buffers) = (&self.backend, self.layer.spec(), &self.buffers);
        for (buffer, values) in
            [(&buffers.q, &rows.q), (&buffers.kv_c, &rows.kv_c), (&buffers.k_pe, &rows.k_pe)]
        {
            backend.upload(buffer, 0, &Dtype::F32.encode_all(values))?;
        }
        let copies = &self.pages.append.copies;
        if !copies.is_empty() {
            backend.kv_copy_pages(&spec.kv, spec.shape.row_elems(), copies, &self.kv(layer))?;
        }
        let (nope, rope) = (spec.qk_nope_head_dim, spec.shape.qk_rope_head_dim);
        let q = View::dense(&buffers.q, spec.shape.num_heads, nope + rope);
        let (kv_b_proj, k_scale) = &self.layers[layer];
        self.layer.run(
            backend,
            &LayerArgs {
                q_nope: q,
                q_pe: View { offset: nope.into(), ..q },
                kv_c: View::dense(&buffers.kv_c, 1, spec.shape.kv_lora_rank),
                k_pe: View::dense(&buffers.k_pe, 1, rope),
                kv: self.kv(layer),
                kv_b_proj,
                cos_sin: &buffers.cos_sin,
                max_position: self.max_position as u32,
                out: View::dense(&buffers.out, spec.shape.num_heads, spec.v_head_dim),
                softmax_scale: self.softmax_scale,
                k_scale: *k_scale,
                expanded: None,
            },
        )?;
        let values = self.pages.positions.len() as u64 * u64::from(spec.shape.num_heads * spec.v_head_dim);
        Ok(Dtype::F32.decode_all(&backend.download(&buffers.out, values * 4)?))
    }
}
