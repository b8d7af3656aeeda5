//! What a model's indexers have in a device's memory: index caches, norms, a step's rows, and the list of tokens that layers attend.

use wgpu_mla::{Device, Dtype, IndexSpec, KvView, OwnSelection, Selection, View};

use crate::attention::IndexRows;
use crate::index_projections::IndexNorm;
use crate::indexer::INDEX_DIM;
use crate::{IndexerConfig, Model, Result, Setup};

pub struct IndexArrays<B> {
    /// For the pages that there is memory for.
    spec: IndexSpec,
    slab_pages: u32,
    config: IndexerConfig,
    /// Each holds `slab_pages` pages of the index caches of the layers that have an indexer.
    cache: Vec<B>,
    /// Such layers.
    caches: u32,
    /// `[T, Hi * 128 + 128 + Hi]`: a token's index queries, index key and weights together, in as many elements as [`row_elems`] says.
    rows: B,
    /// i32 `[T, topk]`: the slots that a layer with an indexer chose, for those without that come after it.
    list: B,
    /// For each layer that has an indexer: the place of its cache, and weight and bias of its norm, f32 `[128]`.
    layers: Vec<Option<(u32, B, B)>>,
}

impl<B> IndexArrays<B> {
    /// `None` where no sequence has more tokens than the model attends.
    pub fn new(
        device: &impl Device<Buffer = B>,
        model: &Model,
        setup: &Setup,
        slab_pages: u32,
    ) -> Result<Option<Self>> {
        let (Some(config), Some(indexer)) = (&model.config.indexer, setup.indexer(model)) else {
            return Ok(None);
        };
        let mut spec = indexer.index(&setup.spec(model));
        spec.num_pages = slab_pages.min(spec.num_pages);
        let uploaded = |values: &[f32]| -> Result<B> {
            let bytes = Dtype::F32.encode_all(values);
            let buffer = device.buffer(bytes.len() as u64)?;
            device.upload(&buffer, 0, &bytes)?;
            Ok(buffer)
        };
        let (mut layers, mut caches) = (Vec::new(), 0);
        for norm in &model.index_norms {
            let Some(IndexNorm { weight, bias }) = norm else {
                layers.push(None);
                continue;
            };
            layers.push(Some((caches, uploaded(weight)?, uploaded(bias)?)));
            caches += 1;
        }
        let words = |each: u32| device.buffer(u64::from(setup.max_tokens()) * u64::from(each) * 4);
        Ok(Some(Self {
            cache: vec![device.buffer(slab_bytes(&spec, slab_pages, caches))?],
            caches,
            slab_pages,
            rows: words(row_elems(config.num_heads))?,
            list: words(config.topk)?,
            config: config.clone(),
            layers,
            spec,
        }))
    }

    /// Takes memory for another slab.
    pub fn grow(&mut self, device: &impl Device<Buffer = B>) -> Result<()> {
        self.cache.push(device.buffer(self.slab_bytes())?);
        Ok(())
    }

    /// Takes it back.
    pub fn shrink(&mut self) {
        self.cache.pop();
    }

    /// So many pages have memory.
    pub fn set_pages(&mut self, pages: u32) {
        self.spec.num_pages = pages;
    }

    /// Bytes of a slab of all index caches.
    pub fn slab_bytes(&self) -> u64 {
        slab_bytes(&self.spec, self.slab_pages, self.caches)
    }

    /// The index cache of one layer.
    pub fn spec(&self) -> &IndexSpec {
        &self.spec
    }

    /// What an indexer reads of a step.
    pub fn rows(&self) -> &B {
        &self.rows
    }

    /// The list that was made last.
    pub fn list(&self) -> View<&B> {
        View::dense(&self.list, self.config.topk, 1)
    }

    /// A step's rows as they lie in `rows`.
    pub fn packed(&self, rows: &IndexRows) -> Vec<u8> {
        let (heads, each) = (self.config.num_heads as usize, row_elems(self.config.num_heads) as usize);
        let mut packed = Vec::with_capacity(rows.k.len() / INDEX_DIM * each * 4);
        let parts = rows.q.chunks_exact(heads * INDEX_DIM).zip(rows.k.chunks_exact(INDEX_DIM));
        for ((q, k), weights) in parts.zip(rows.weights.chunks_exact(heads)) {
            let padding = each - q.len() - k.len() - weights.len();
            for part in [q, k, weights, &[0.0; 8][..padding]] {
                packed.extend(part.iter().flat_map(|x| x.to_le_bytes()));
            }
        }
        packed
    }

    /// A layer's index cache, if it has one.
    ///
    /// # Errors
    /// The errors of [`IndexSpec::view_in_slabs`].
    pub fn cache(&self, layer: usize) -> wgpu_mla::Result<Option<KvView<&B>>> {
        let Some((at, ..)) = &self.layers[layer] else { return Ok(None) };
        let slabs: Vec<&B> = self.cache.iter().collect();
        self.spec.view_in_slabs(&slabs, self.slab_pages, *at).map(Some)
    }

    /// What a layer attends. `cos_sin` and `max_position`: the table of the model, which serves index keys too, as so many of their
    /// elements rotate.
    ///
    /// # Errors
    /// The errors of [`IndexArrays::cache`].
    pub fn selection<'a>(
        &'a self,
        layer: usize,
        cos_sin: &'a B,
        max_position: u32,
    ) -> wgpu_mla::Result<Selection<&'a B>> {
        let (Some(cache), Some((_, norm_weight, norm_bias))) = (self.cache(layer)?, &self.layers[layer])
        else {
            return Ok(Selection::Shared(self.list()));
        };
        let (heads, dim) = (self.config.num_heads, INDEX_DIM as u32);
        let part = |offset: u32, head_stride: u32| View {
            buffer: &self.rows,
            offset: offset.into(),
            token_stride: row_elems(heads).into(),
            head_stride: head_stride.into(),
        };
        Ok(Selection::Own(OwnSelection {
            q: part(0, dim),
            k: part(heads * dim, dim),
            weights: part((heads + 1) * dim, 1),
            norm_weight,
            norm_bias,
            norm_eps: IndexNorm::EPS,
            cos_sin,
            max_position,
            cache,
            weight_scale: self.config.weight_scale(),
            indices: self.list(),
        }))
    }
}

/// Bytes of a slab of so many index caches.
fn slab_bytes(spec: &IndexSpec, slab_pages: u32, caches: u32) -> u64 {
    spec.page_bytes().saturating_mul(slab_pages.into()).saturating_mul(caches.into())
}

/// Elements of a token's row: a multiple of 8, as ops ask of strides.
fn row_elems(heads: u32) -> u32 {
    ((heads + 1) * INDEX_DIM as u32 + heads).next_multiple_of(8)
}
