//! Attention on wgpu-mla's verbs, on any backend: rope, absorb and `v_up` on the host; append, decode and merge on the backend.

use candle_core::{Device, Tensor};
use wgpu_mla::any::{AnyBackend, Binding, Buffer, Decode, Step};
use wgpu_mla::{
    AppendLayer, AppendSpec, Backend, Batch, Capacity, Dtype, KvSpec, KvView, Layer, MlaSpec, Plan, Policy,
    Query, SeqId, View,
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
            k_scales: Vec::new(),
        }
    }
}

impl Setup {
    fn spec(&self, model: &Model) -> MlaSpec {
        let num_pages = self.tokens.div_ceil(self.page_size.max(1)).saturating_add(self.sequences);
        MlaSpec {
            shape: model.config.shape,
            kv: KvSpec { dtype: self.kv, page_size: self.page_size, num_pages },
            // Nothing beyond the cache is rounded.
            query: Dtype::F32,
            out: Dtype::F32,
        }
    }
}

/// An attention for a model.
///
/// # Errors
/// Those of the backend; [`wgpu_mla::Error::OutOfMemory`] for a cache that is too large.
pub fn paged(model: &Model, setup: &Setup) -> Result<Box<dyn Attention>> {
    let backend = backend::open(setup.backend, &setup.spec(model))?;
    Ok(Box::new(Paged::new(backend, model, setup)?))
}

struct Paged {
    backend: AnyBackend,
    spec: MlaSpec,
    decode: Decode,
    step: Step,
    plan: Plan,
    buffers: Buffers,
    layers: Vec<LayerPart>,
    cos_sin: CosSin,
    dims: Dims,
    pages: Pages,
    max_tokens: usize,
}

struct Dims {
    heads: usize,
    latent: usize,
    rope: usize,
    nope: usize,
    value: usize,
}

struct Buffers {
    kv: Buffer,
    q_nope: Buffer,
    q_pe: Buffer,
    kv_c: Buffer,
    k_pe: Buffer,
    out: Buffer,
}

struct LayerPart {
    /// `[H, P, L]`.
    w_uk: Tensor,
    /// `[H, L, V]`.
    w_uv: Tensor,
    k_scale: f32,
    binding: Binding,
}

impl Paged {
    fn new(backend: AnyBackend, model: &Model, setup: &Setup) -> Result<Self> {
        let (config, spec) = (&model.config, setup.spec(model));
        let dims = Dims {
            heads: spec.shape.num_heads as usize,
            latent: spec.shape.kv_lora_rank as usize,
            rope: spec.shape.qk_rope_head_dim as usize,
            nope: config.qk_nope_head_dim,
            value: config.v_head_dim,
        };
        let pages = Pages::new(spec.kv)?;
        let max_tokens = setup.step_tokens.max(setup.sequences).max(1);
        let decode = backend.decode(&spec, None)?;
        let step = backend.step(&decode, Capacity::default())?;
        let floats = |per_token: usize| backend.buffer(u64::from(max_tokens) * per_token as u64 * 4);
        let layers = config.num_layers as u64;
        let buffers = Buffers {
            kv: backend.buffer(layer_stride(&spec) * layers * spec.kv.dtype.bytes() as u64)?,
            q_nope: floats(dims.heads * dims.latent)?,
            q_pe: floats(dims.heads * dims.rope)?,
            kv_c: floats(dims.latent)?,
            k_pe: floats(dims.rope)?,
            out: floats(dims.heads * dims.latent)?,
        };
        let lse = floats(dims.heads)?;
        let mut parts = Vec::new();
        for (index, kv_b) in model.kv_b.iter().enumerate() {
            let k_scale = match spec.kv.dtype {
                Dtype::E4m3 => setup.k_scales.get(index).copied().unwrap_or(1.0),
                _ => 1.0,
            };
            let heads = spec.shape.num_heads;
            let scale = config.softmax_scale();
            let query = Query::Split {
                q_nope: View::dense(&buffers.q_nope, heads, spec.shape.kv_lora_rank),
                q_pe: View::dense(&buffers.q_pe, heads, spec.shape.qk_rope_head_dim),
            };
            let dense = Layer::dense(&spec, &buffers.q_nope, &buffers.kv, &buffers.out, &lse, scale);
            let args = Layer { query, kv: kv_view(&spec, &buffers.kv, index), k_scale, ..dense };
            parts.push(LayerPart {
                w_uk: kv_b.narrow(1, 0, dims.nope)?.contiguous()?,
                w_uv: kv_b.narrow(1, dims.nope, dims.value)?.transpose(1, 2)?.contiguous()?,
                k_scale,
                binding: backend.bind(&decode, max_tokens, &args)?,
            });
        }
        let cos_sin = config.rope.cos_sin(dims.rope, config.max_position_embeddings);
        let (plan, max_tokens) = (Plan::default(), max_tokens as usize);
        Ok(Self {
            backend,
            spec,
            decode,
            step,
            plan,
            buffers,
            layers: parts,
            cos_sin,
            dims,
            pages,
            max_tokens,
        })
    }

    /// Every position has a row of cosines and sines.
    fn check_positions(&self) -> Result<()> {
        let most = self.cos_sin.table.len() / self.cos_sin.rope_dim;
        if let Some(position) = self.pages.positions.iter().find(|&&position| position as usize >= most) {
            return Err(Error::Input(format!(
                "position {position}: the model has {most}; end the sequence before it"
            )));
        }
        Ok(())
    }

    /// `q_nope . W_UK`, and the rotated `q_pe`: `[T, H, L]` and `[T, H, R]`.
    fn queries(&self, layer: usize, q: &[f32]) -> Result<[Vec<f32>; 2]> {
        let Dims { heads, latent, rope, nope, .. } = self.dims;
        let tokens = self.pages.positions.len();
        let (mut q_nope, mut q_pe) = (Vec::new(), Vec::new());
        for (row, head) in q.chunks_exact(nope + rope).enumerate() {
            q_nope.extend_from_slice(&head[..nope]);
            q_pe.extend_from_slice(&head[nope..]);
            let begin = q_pe.len() - rope;
            self.cos_sin.rotate(&mut q_pe[begin..], self.position(row / heads));
        }
        let q_nope = Tensor::from_vec(q_nope, (tokens, heads, nope), &Device::Cpu)?;
        let absorbed = q_nope.transpose(0, 1)?.contiguous()?.matmul(&self.layers[layer].w_uk)?;
        debug_assert_eq!(absorbed.dims(), [heads, tokens, latent]);
        Ok([values(&absorbed.transpose(0, 1)?)?, q_pe])
    }

    fn position(&self, token: usize) -> usize {
        self.pages.positions[token] as usize
    }

    fn append(&self, layer: usize, rows: &Rows) -> Result<()> {
        let rope = self.dims.rope;
        let mut k_pe = rows.k_pe.clone();
        for (token, row) in k_pe.chunks_exact_mut(rope).enumerate() {
            self.cos_sin.rotate(row, self.position(token));
        }
        self.upload(&self.buffers.kv_c, &rows.kv_c)?;
        self.upload(&self.buffers.k_pe, &k_pe)?;
        let kv = kv_view(&self.spec, &self.buffers.kv, layer);
        let copies = &self.pages.append.copies;
        if !copies.is_empty() {
            self.backend.kv_copy_pages(&self.spec.kv, self.spec.shape.row_elems(), copies, &kv)?;
        }
        let spec = AppendSpec { shape: self.spec.shape, kv: self.spec.kv, input: Dtype::F32 };
        let args = AppendLayer {
            kv_c: View::dense(&self.buffers.kv_c, 1, self.spec.shape.kv_lora_rank),
            k_pe: View::dense(&self.buffers.k_pe, 1, self.spec.shape.qk_rope_head_dim),
            kv,
            k_scale: self.layers[layer].k_scale,
        };
        Ok(self.backend.kv_append(&spec, &self.pages.slot_mapping, &args)?)
    }

    fn upload(&self, buffer: &Buffer, xs: &[f32]) -> Result<()> {
        Ok(self.backend.upload(buffer, 0, &Dtype::F32.encode_all(xs))?)
    }
}

/// Elements from one layer's cache to the next.
fn layer_stride(spec: &MlaSpec) -> u64 {
    spec.kv.num_slots() * u64::from(spec.shape.row_elems())
}

fn kv_view<'b>(spec: &MlaSpec, kv: &'b Buffer, layer: usize) -> KvView<'b, Buffer> {
    KvView { layer_stride: layer_stride(spec), layer: layer as u32, ..KvView::dense(kv, spec) }
}

impl Attention for Paged {
    fn describe(&self) -> String {
        format!("{}, row {}", self.backend.name(), self.decode.variant())
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
        let batch = Batch::new(&self.pages.seq_lens, &self.pages.query_start_loc);
        self.plan.update(&self.spec, &self.backend.tiling(&self.decode), &batch, Policy::Auto)?;
        let table = self.pages.table.page_table();
        Ok(self.backend.prepare(&self.decode, &mut self.step, &self.plan, table)?)
    }

    fn attend(&mut self, layer: usize, rows: &Rows) -> Result<Vec<f32>> {
        self.append(layer, rows)?;
        let [q_nope, q_pe] = self.queries(layer, &rows.q)?;
        self.upload(&self.buffers.q_nope, &q_nope)?;
        self.upload(&self.buffers.q_pe, &q_pe)?;
        self.backend.run(&self.decode, &self.step, &self.layers[layer].binding)?;

        let Dims { heads, latent, .. } = self.dims;
        let tokens = self.pages.positions.len();
        let bytes = self.backend.download(&self.buffers.out, (tokens * heads * latent * 4) as u64)?;
        let out = Tensor::from_vec(Dtype::F32.decode_all(&bytes), (tokens, heads, latent), &Device::Cpu)?;
        let values_up = out.transpose(0, 1)?.contiguous()?.matmul(&self.layers[layer].w_uv)?;
        values(&values_up.transpose(0, 1)?)
    }
}
