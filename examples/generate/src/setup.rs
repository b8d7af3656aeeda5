//! The options of a cache and its attention.

use wgpu_mla::{Dtype, KvLayout, KvSpec, LayerIndexer, MlaLayer, RopeLayout};

use crate::backend::Where;
use crate::{Config, Model};

#[derive(Debug, Clone)]
pub struct Setup {
    pub backend: Where,
    /// Layout of the cache: a dtype, or records.
    pub kv: KvLayout,
    /// Dtype of the absorbed queries of decodes: f32, or e4m3 with a scale of 1.
    pub query: Dtype,
    /// Dtype of each layer's `kv_b_proj`, which is prepared from the checkpoint's.
    pub weight: Dtype,
    /// Dtype of all weights on a device, by an engine that has them there; `None`: the best one that it has.
    pub device_weight: Option<Dtype>,
    /// Dtype of the attention's output: f32, or e4m3 with a scale of 1, for which every step is decoded.
    pub out: Dtype,
    /// Dtype of index caches and of index queries, in a model that has an indexer.
    pub index: Dtype,
    pub page_size: u32,
    /// Tokens that the cache may grow to; each sequence may fill its last page only in part.
    pub tokens: u32,
    /// Tokens that are certain to come, those of the prompts: without memory for them nothing begins.
    pub prompt_tokens: u32,
    /// Bytes that the cache of all layers grows by, in slabs: an eighth of what [`Setup::tokens`] take where that is more, and what a
    /// binding of the device holds where that is less.
    pub slab_bytes: u64,
    /// Sequences at a time.
    pub sequences: u32,
    /// Positions that a sequence may reach. The RoPE table has so many rows, and no more than the model or the cache have.
    pub positions: u32,
    /// Tokens of a step: a longer prompt is computed in pieces.
    pub step_tokens: u32,
    /// A sequence with at most so many new tokens in a step is decoded, one with more is prefilled.
    pub decode_threshold: u32,
    /// Bytes that the keys and values of a prompt may take at a time.
    pub workspace_bytes: u64,
    /// Takes the best variant of the decode that rounds no softmax weights, as those on tensor cores do.
    pub exact: bool,
    /// Counts what rounding loses: see [`crate::attention::Attention::losses`].
    pub guard: bool,
    /// `k_scale` of each layer of an e4m3 cache; where there is none it is 1.
    pub k_scales: Vec<f32>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            backend: Where::Auto,
            kv: Dtype::F16.into(),
            // Nothing beyond the cache is rounded.
            query: Dtype::F32,
            weight: Dtype::F32,
            device_weight: None,
            out: Dtype::F32,
            // The models with an indexer were released so.
            index: Dtype::E4m3,
            page_size: 64,
            tokens: 1024,
            prompt_tokens: u32::MAX,
            slab_bytes: 256 << 20,
            sequences: 1,
            positions: u32::MAX,
            step_tokens: 512,
            decode_threshold: 1,
            workspace_bytes: 64 << 20,
            exact: false,
            guard: false,
            k_scales: Vec::new(),
        }
    }
}

impl Setup {
    /// The layer that is compiled.
    pub fn spec(&self, model: &Model) -> MlaLayer {
        let num_pages = self.tokens.div_ceil(self.page_size.max(1)).saturating_add(self.sequences);
        let decodes_all = self.out.is_fp8();
        let Config { shape, qk_nope_head_dim, v_head_dim, ref rope, .. } = model.config;
        MlaLayer {
            shape,
            qk_nope_head_dim: qk_nope_head_dim as u32,
            v_head_dim: v_head_dim as u32,
            kv: KvSpec { layout: self.kv, page_size: self.page_size, num_pages },
            dtype: Dtype::F32,
            query: self.query,
            weight: self.weight,
            out: self.out,
            rope: if rope.interleaved { RopeLayout::Interleaved } else { RopeLayout::HalfSplit },
            decode_threshold: if decodes_all { self.max_tokens() } else { self.decode_threshold.max(1) },
            // Prefills write f32.
            workspace_bytes: if decodes_all { 0 } else { self.workspace_bytes },
        }
    }

    /// Whether a sequence may have more tokens than the model attends: then its layers choose, and else they attend all.
    pub fn is_sparse(&self, model: &Model) -> bool {
        model.config.indexer.as_ref().is_some_and(|indexer| self.max_position(model) > indexer.topk)
    }

    /// The indexer of such a model.
    pub(crate) fn indexer(&self, model: &Model) -> Option<LayerIndexer> {
        let indexer = model.config.indexer.as_ref().filter(|_| self.is_sparse(model))?;
        Some(LayerIndexer {
            format: indexer.format(self.index),
            num_heads: indexer.num_heads,
            input: Dtype::F32,
            max_seq_len: self.max_position(model),
            logits_bytes: 0,
        })
    }

    /// Bytes of the caches of all layers, once they hold [`Setup::tokens`].
    #[must_use]
    pub fn cache_bytes(&self, model: &Model) -> u64 {
        self.bytes_of(model, self.tokens)
    }

    /// Bytes of the slabs that so many tokens need, where bindings may be as large as they are.
    pub(crate) fn bytes_of(&self, model: &Model, tokens: u32) -> u64 {
        let all = self.spec(model).kv.num_pages;
        let pages = tokens.div_ceil(self.page_size.max(1)).saturating_add(self.sequences).min(all);
        let pages = u64::from(pages).next_multiple_of(self.slab_pages(model, u64::MAX).into());
        let bytes = |page: u64| page.saturating_mul(pages);
        self.page_bytes(model).into_iter().map(bytes).fold(0, u64::saturating_add)
    }

    /// Bytes of a page in the caches of all layers, and in their index caches.
    pub(crate) fn page_bytes(&self, model: &Model) -> [u64; 2] {
        let spec = self.spec(model);
        let page = spec.mla().slab_bytes(1).saturating_mul(model.config.num_layers as u64);
        let index = self.indexer(model).map_or(0, |indexer| {
            let layers = model.index_norms.iter().flatten().count() as u64;
            indexer.index(&spec).page_bytes().saturating_mul(layers)
        });
        [page, index]
    }

    /// Pages of a slab of the cache, where a binding has at most so many bytes.
    pub(crate) fn slab_pages(&self, model: &Model, largest_binding: u64) -> u32 {
        let pages = self.spec(model).kv.num_pages.max(1);
        let page = self.page_bytes(model).into_iter().fold(1, u64::max);
        let fit = |bytes: u64| (bytes / page).clamp(1, pages.into()) as u32;
        let most = fit(self.slab_bytes).max(pages.div_ceil(8)).min(fit(largest_binding));
        // All slabs have about as many.
        pages.div_ceil(pages.div_ceil(most))
    }

    /// Rows of the RoPE table.
    pub fn max_position(&self, model: &Model) -> u32 {
        let kv = self.spec(model).kv;
        let most = kv.num_slots().min(model.config.max_position_embeddings as u64).min(self.positions.into());
        u32::try_from(most).unwrap_or(u32::MAX).max(1)
    }

    /// Tokens of a step; a decode has one of each sequence.
    pub(crate) fn max_tokens(&self) -> u32 {
        self.step_tokens.max(self.sequences).max(1)
    }

    /// The factor of a layer's cache.
    pub fn k_scale(&self, layer: usize) -> f32 {
        if self.kv == Dtype::E4m3.into() { self.k_scales.get(layer).copied().unwrap_or(1.0) } else { 1.0 }
    }
}
