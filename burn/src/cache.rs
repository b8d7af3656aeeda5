//! The paged cache of a model's layers, and the attention over it.

use std::sync::{Mutex, PoisonError};

use burn::tensor::Tensor;
use wgpu_mla::gpu::Gpu;
use wgpu_mla::{
    Binding, Compiled, Device, Dtype, HeadDims, KvCopyPages, KvSpec, KvView, LayerArrays, LayerBatch,
    LayerCapacity, LayerOptions, MlaLayer, MlaLayerArgs, MlaShape, PageCopies, PagePool, RopeFrequencies,
    Selection, SeqId, SplitPolicy, Step, View, softmax_scale, wgpu,
};

use crate::arrays::{Array, Input, Output, Place};
use crate::attention::MlaAttention;
use crate::config::{CacheOptions, MlaAttentionConfig};
use crate::device::MlaDevice;
use crate::error::{Error, Result};

/// Bindings that a layer keeps: burn's allocator gives the arrays of one step the places of another's before.
const KEPT: usize = 8;

/// The paged cache of all layers of a model, its pool of pages, and the step that it is at.
///
/// Its memory is not burn's: a cache is one buffer a layer, made on the same device. Each layer keeps the bindings of the last 8 places
/// that burn's allocator gave a step's arrays, and with them those buffers of burn's.
pub struct PagedCache {
    on: MlaDevice,
    mla: Compiled<MlaLayer, Gpu>,
    step: Step<MlaLayer, Gpu>,
    copy: Compiled<KvCopyPages, Gpu>,
    copy_step: Step<KvCopyPages, Gpu>,
    arrays: LayerArrays,
    pool: PagePool,
    layers: Vec<Layer>,
    cos_sin: wgpu::Buffer,
    max_position: u32,
    softmax_scale: f32,
}

/// What a layer has on the device.
struct Layer {
    kv: wgpu::Buffer,
    kv_b_proj: wgpu::Buffer,
    k_scale: f32,
    copies: Binding<KvCopyPages, Gpu>,
    /// The last ones used come last.
    bound: Mutex<Vec<Bound>>,
}

/// Arrays of a step, and the binding of them.
struct Bound {
    places: [Place; 4],
    room: LayerCapacity,
    binding: Binding<MlaLayer, Gpu>,
}

impl std::fmt::Debug for PagedCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PagedCache")
            .field("spec", self.mla.op())
            .field("layers", &self.layers.len())
            .field("pool", &self.pool)
            .finish_non_exhaustive()
    }
}

impl PagedCache {
    /// A cache for layers of these dims. Copies each layer's `kv_b_proj`, transposed, as the kernels read it.
    ///
    /// # Errors
    /// [`Error::Dtype`] for weights of another dtype than f32, f16 or bf16; the errors of wgpu-mla for dims that it does not serve, and for
    /// memory that there is not.
    pub fn new<'a>(
        on: &MlaDevice,
        config: &MlaAttentionConfig,
        layers: impl IntoIterator<Item = &'a MlaAttention>,
        options: &CacheOptions,
    ) -> Result<Self> {
        Self::with_weights(on, config, layers.into_iter().map(|layer| layer.kv_b_proj.weight.val()), options)
    }

    /// The same from the layers' `kv_b_proj`, `[L, H * (P + V)]`, one after the other: of a model whose layers are not
    /// [`MlaAttention`]s, or that drops each weight after it was copied.
    ///
    /// # Errors
    /// The errors of [`PagedCache::new`].
    pub fn with_weights(
        on: &MlaDevice,
        config: &MlaAttentionConfig,
        weights: impl IntoIterator<Item = Tensor<2>>,
        options: &CacheOptions,
    ) -> Result<Self> {
        let mut weights = weights.into_iter().peekable();
        let dtype = match weights.peek() {
            Some(weight) => Input::new("kv_b_proj", weight.clone())?.dtype(),
            None => return Err(Error::Order("a cache needs at least one layer")),
        };
        let spec = spec(config, options, dtype)?;
        let gpu = on.gpu();
        let capacity = LayerCapacity {
            tokens: options.max_tokens,
            decode_tokens: options.max_decodes.min(options.max_tokens),
            ..LayerCapacity::default()
        };
        let mla = gpu.compile_with(spec, &LayerOptions { capacity, ..LayerOptions::default() })?;
        let copy = gpu.compile(KvCopyPages { shape: spec.shape, kv: spec.kv })?;
        let frequencies = match &options.rope {
            Some(frequencies) => frequencies.clone(),
            None => RopeFrequencies::plain(spec.shape.qk_rope_head_dim, config.rope_theta)?,
        };
        let table = match &options.cos_sin {
            Some(table) => Dtype::F32.encode_all(table),
            None => Dtype::F32.encode_all(&frequencies.cos_sin(options.max_position)?),
        };
        if table.len() as u64 != u64::from(options.max_position) * u64::from(spec.shape.qk_rope_head_dim) * 4
        {
            return Err(Error::Order("CacheOptions::cos_sin is [max_position, R]"));
        }
        let cos_sin = gpu.buffer(table.len() as u64)?;
        gpu.upload(&cos_sin, 0, &table)?;
        let layer = |(index, weight): (usize, _)| {
            let kv = gpu.buffer(spec.mla().cache_bytes())?;
            let copies = copy.bind(&KvView::dense(&kv, &spec.mla()), ())?;
            let kv_b_proj = prepared(on, weight, &spec)?;
            let k_scale = options.k_scales.get(index).copied().unwrap_or(options.k_scale);
            Ok(Layer { kv, kv_b_proj, k_scale, copies, bound: Mutex::default() })
        };
        let layers = weights.enumerate().map(layer).collect::<Result<_>>()?;
        let scale = options.softmax_scale.map_or_else(
            || softmax_scale(spec.qk_nope_head_dim, spec.shape.qk_rope_head_dim, 1.0, 1.0),
            Ok,
        )?;
        Ok(Self {
            on: on.clone(),
            step: mla.step(Default::default())?,
            copy_step: copy.step(0)?,
            mla,
            copy,
            arrays: LayerArrays::default(),
            pool: PagePool::new(spec.kv)?,
            layers,
            cos_sin,
            max_position: options.max_position,
            softmax_scale: scale,
        })
    }

    /// The pool: sequences are added, forked, cut and freed there. Tokens come by [`PagedCache::begin`].
    pub fn pool(&mut self) -> &mut PagePool {
        &mut self.pool
    }

    /// The layer as it was compiled: which kernels, and why.
    #[must_use]
    pub fn mla(&self) -> &Compiled<MlaLayer, Gpu> {
        &self.mla
    }

    /// Begins a step: sequences and their numbers of new tokens, which get pages. Sorts them as the rows of the step's tensors must be:
    /// decodes, of one new token, come first. Then [`MlaAttention::forward`] is called once for each layer.
    ///
    /// # Errors
    /// The errors of [`PagePool::layer_step`](wgpu_mla::PagePool::layer_step), such as a pool without pages, and of a step that is larger
    /// than the options say. The sequences may have grown then.
    pub fn begin(&mut self, requests: &mut [(SeqId, u32)]) -> Result<()> {
        self.mla.op().decodes_first(requests);
        let copies = self.pool.layer_step_into(requests, &mut self.arrays)?;
        self.copy.prepare(&mut self.copy_step, &copies)?;
        Ok(self.mla.prepare(&mut self.step, (&self.arrays.batch(), SplitPolicy::Auto))?)
    }

    /// Begins a step of a pool that is the host's own, of pages of this size and no more of them: the arrays that its
    /// [`PagePool::layer_step_into`] made, and the copies of pages that it asked for. Where [`CacheOptions::max_decodes`] is less than
    /// [`CacheOptions::max_tokens`], decodes come first in it.
    ///
    /// # Errors
    /// The errors of a batch that is larger than the options say, and of one that names pages that there are not.
    pub fn begin_batch(&mut self, batch: &LayerBatch<'_>, copies: &PageCopies) -> Result<()> {
        self.copy.prepare(&mut self.copy_step, copies)?;
        Ok(self.mla.prepare(&mut self.step, (batch, SplitPolicy::Auto))?)
    }

    /// The attention of a layer between its projections: `q`, `[T, H * (P + R)]`, not rotated; `kv_c`, `[T, L]`, normed; and `kv_a`,
    /// `[T, L + R]`, whose last `R` columns are the rotary key, not rotated. Gives `[T, H * V]`.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Dtype`], [`Error::Order`] for a layer that there is not; the errors of wgpu-mla.
    pub fn attend(&self, layer: usize, q: Tensor<2>, kv_c: Tensor<2>, kv_a: Tensor<2>) -> Result<Tensor<2>> {
        let spec = self.mla.op();
        let layer =
            self.layers.get(layer).ok_or(Error::Order("the cache has fewer layers: make it with all"))?;
        let (tokens, heads) = (self.step.used().tokens as usize, spec.shape.num_heads as usize);
        let (latent, rope) = (spec.shape.kv_lora_rank as usize, spec.shape.qk_rope_head_dim as usize);
        let key = spec.qk_nope_head_dim as usize + rope;
        let q = Input::new("q", q)?.checked(spec.dtype, &[tokens, heads * key])?;
        let kv_c = Input::new("kv_c", kv_c)?.checked(spec.dtype, &[tokens, latent])?;
        let kv_a = Input::new("kv_a", kv_a)?.checked(spec.dtype, &[tokens, latent + rope])?;
        let out = Output::new([tokens, heads * spec.v_head_dim as usize], spec.dtype);
        let [out] = self.on.on_buffers([q, kv_c, kv_a], [out], |[q, kv_c, kv_a], [out]| {
            self.run(layer, [q, kv_c, kv_a, out])
        })?;
        Ok(out.tensor())
    }

    /// Records and submits a layer on its arrays, with a binding of before if these were bound before.
    fn run(&self, layer: &Layer, arrays: [&Array; 4]) -> Result<()> {
        // Positions are those of the table, and grow with every step.
        let LayerCapacity { tokens, decode_tokens, .. } = self.step.used();
        let room = LayerCapacity { tokens, decode_tokens, ..LayerCapacity::default() };
        let places = arrays.map(Array::place);
        let mut bound = layer.bound.lock().unwrap_or_else(PoisonError::into_inner);
        let one = match bound.iter().position(|it| it.places == places && it.room == room) {
            Some(at) => bound.remove(at),
            None => Bound { places, room, binding: self.bind(layer, arrays, room)? },
        };
        self.on.gpu().submit(|mut pass| {
            self.copy.record_on(&mut pass, &self.copy_step, &layer.copies)?;
            self.mla.record_on(&mut pass, &self.step, &one.binding)
        })?;
        if bound.len() == KEPT {
            bound.remove(0);
        }
        bound.push(one);
        Ok(())
    }

    fn bind(
        &self,
        layer: &Layer,
        [q, kv_c, kv_a, out]: [&Array; 4],
        room: LayerCapacity,
    ) -> Result<Binding<MlaLayer, Gpu>> {
        let spec = self.mla.op();
        let (nope, rope, latent) =
            (spec.qk_nope_head_dim, spec.shape.qk_rope_head_dim, spec.shape.kv_lora_rank);
        let q: View<_> = q.view(nope + rope);
        let args = MlaLayerArgs {
            q_nope: q.columns(0..nope)?,
            q_pe: q.columns(nope..nope + rope)?,
            kv_c: kv_c.view(latent),
            k_pe: kv_a.view(latent + rope).columns(latent..latent + rope)?,
            kv: KvView::dense(&layer.kv, &spec.mla()),
            kv_b_proj: &layer.kv_b_proj,
            kv_b_scales: None,
            cos_sin: &self.cos_sin,
            max_position: self.max_position,
            out: out.view(spec.v_head_dim),
            softmax_scale: self.softmax_scale,
            q_scale: 1.0,
            k_scale: layer.k_scale,
            out_scale: 1.0,
            expanded: None,
            selection: Selection::All,
            guard: None,
        };
        Ok(self.mla.bind(&args, room)?)
    }
}

/// What the layers are compiled for.
fn spec(config: &MlaAttentionConfig, options: &CacheOptions, dtype: Dtype) -> Result<MlaLayer> {
    let dim = |dim: usize| u32::try_from(dim).unwrap_or(u32::MAX);
    let shape = MlaShape {
        num_heads: dim(config.num_attention_heads),
        kv_lora_rank: dim(config.kv_lora_rank),
        qk_rope_head_dim: dim(config.qk_rope_head_dim),
    };
    let layout = options.kv.unwrap_or(dtype).into();
    let spec = MlaLayer {
        shape,
        qk_nope_head_dim: dim(config.qk_nope_head_dim),
        v_head_dim: dim(config.v_head_dim),
        kv: KvSpec { layout, page_size: options.page_size, num_pages: options.num_pages },
        dtype,
        query: dtype,
        weight: dtype,
        out: dtype,
        rope: options.rope_layout,
        decode_threshold: 1,
        workspace_bytes: options.workspace_bytes,
    };
    spec.check()?;
    Ok(spec)
}

/// A layer's `kv_b_proj` in a buffer of its own, `[H, P + V, L]`.
fn prepared(on: &MlaDevice, weight: Tensor<2>, spec: &MlaLayer) -> Result<wgpu::Buffer> {
    let dims: HeadDims = spec.dims();
    let (rows, columns) = (dims.elements() as usize / dims.kv_lora_rank as usize, dims.kv_lora_rank as usize);
    let weight =
        Input::new("kv_b_proj, transposed", weight.transpose())?.checked(spec.dtype, &[rows, columns])?;
    let bytes = dims.elements() * spec.dtype.bytes() as u64;
    let buffer = on.gpu().buffer(bytes)?;
    let [] = on.on_buffers([weight.dense()], [], |[weight], []| {
        let mut encoder =
            on.gpu().device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(weight.buffer(), weight.offset(), &buffer, 0, bytes);
        on.gpu().queue().submit([encoder.finish()]);
        Ok(())
    })?;
    Ok(buffer)
}
