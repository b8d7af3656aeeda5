//! The arrays of a model of sparse attention, and the single ops that its list is compared with.

use crate::paint::Rng;
use crate::reference::cache_values;
use wgpu_mla::{
    Backend, Compiled, Dtype, IndexerAppend, IndexerAppendArgs, IndexerLogits, IndexerLogitsArgs,
    IndexerLogitsBatch, IndexerLogitsExtent, IndexerQuery, IndexerQueryArgs, IndexerQueryBatch, KvView,
    LayerArrays, Mask, MlaLayer, MlaLayerArgs, OwnSelection, Result, RopeAppendBatch, RopeAppendExtent,
    Selection, TopK, TopKArgs, TopKBatch, TopKExtent, TopKPages, TopKSlots, View,
};

use super::layer_rig::{draw, uploaded};
use super::selecting::{INDEX_DIM, INDEX_HEADS, LIST_STRIDE, MAX_POSITION, MAX_TOKENS, Sparse, TOPK, table};

/// What memory holds that nothing wrote: NaN in every dtype.
const POISON: u8 = 0xFF;

/// The inputs and the output of a layer, and its cache, in one buffer or slabs.
pub struct LayerBuffers<B: Backend> {
    q: B::Buffer,
    kv_c: B::Buffer,
    k_pe: B::Buffer,
    out: B::Buffer,
    kv: Vec<B::Buffer>,
}

fn poisoned<B: Backend>(backend: &B, bytes: u64) -> Result<B::Buffer> {
    uploaded(backend, &vec![POISON; bytes as usize])
}

fn slabs<B: Backend>(backend: &B, sparse: &Sparse, page_bytes: u64) -> Result<Vec<B::Buffer>> {
    let count = sparse.layer.kv.num_slabs(sparse.slab_pages)?;
    (0..count).map(|_| poisoned(backend, u64::from(sparse.slab_pages) * page_bytes)).collect()
}

impl<B: Backend> LayerBuffers<B> {
    pub fn new(backend: &B, sparse: &Sparse) -> Result<Self> {
        let spec = sparse.layer;
        let input = |elems: u32| {
            poisoned(backend, u64::from(MAX_TOKENS) * u64::from(elems) * spec.dtype.bytes() as u64)
        };
        Ok(Self {
            q: input(spec.q_bytes(1) as u32 / spec.dtype.bytes() as u32)?,
            kv_c: input(spec.shape.kv_lora_rank)?,
            k_pe: input(spec.shape.qk_rope_head_dim)?,
            out: input(spec.shape.num_heads * spec.v_head_dim)?,
            kv: slabs(backend, sparse, spec.kv.page_bytes(&spec.shape))?,
        })
    }

    pub fn cache(&self, sparse: &Sparse) -> Result<KvView<&B::Buffer>> {
        KvView::in_slabs(&self.kv.iter().collect::<Vec<_>>(), &sparse.layer.mla(), sparse.slab_pages, 0)
    }

    /// All but the scales, and with nothing chosen.
    pub fn args<'a>(
        &'a self,
        sparse: &Sparse,
        kv_b_proj: &'a B::Buffer,
        cos_sin: &'a B::Buffer,
    ) -> Result<MlaLayerArgs<&'a B::Buffer>> {
        let spec = sparse.layer;
        let (heads, nope, rope) = (spec.shape.num_heads, spec.qk_nope_head_dim, spec.shape.qk_rope_head_dim);
        let q_nope = View::dense(&self.q, heads, nope + rope);
        Ok(MlaLayerArgs {
            q_nope,
            q_pe: View { offset: nope.into(), ..q_nope },
            kv_c: View::dense(&self.kv_c, 1, spec.shape.kv_lora_rank),
            k_pe: View::dense(&self.k_pe, 1, rope),
            kv: self.cache(sparse)?,
            kv_b_proj,
            kv_b_scales: None,
            cos_sin,
            max_position: MAX_POSITION,
            out: View::dense(&self.out, heads, spec.v_head_dim),
            softmax_scale: 1.0,
            q_scale: 1.0,
            k_scale: 1.0,
            out_scale: 1.0,
            expanded: None,
            selection: Selection::All,
            guard: None,
        })
    }

    /// Other inputs for all tokens that there may be, and no output. The queries are returned.
    pub fn refill(&self, backend: &B, spec: &MlaLayer, rng: &mut Rng) -> Result<Vec<f64>> {
        let mut fill = |buffer: &B::Buffer, elems: u64, scale| {
            let (values, bytes) = draw(rng, spec.dtype, elems as usize * MAX_TOKENS as usize, scale);
            backend.upload(buffer, 0, &bytes).map(|()| values)
        };
        fill(&self.kv_c, spec.shape.kv_lora_rank.into(), 0.2)?;
        fill(&self.k_pe, spec.shape.qk_rope_head_dim.into(), 0.5)?;
        backend.upload(&self.out, 0, &vec![POISON; self.out_bytes(spec) as usize])?;
        fill(&self.q, spec.q_bytes(1) / spec.dtype.bytes() as u64, 0.7)
    }

    fn out_bytes(&self, spec: &MlaLayer) -> u64 {
        spec.out_bytes(MAX_TOKENS)
    }

    pub fn read_out(&self, backend: &B, spec: &MlaLayer) -> Result<Vec<u8>> {
        backend.download(&self.out, self.out_bytes(spec))
    }

    /// `[slots, L + R]`, without `k_scale`.
    pub fn read_cache(&self, backend: &B, sparse: &Sparse) -> Result<Vec<f32>> {
        let spec = sparse.layer;
        let bytes = u64::from(sparse.slab_pages) * spec.kv.page_bytes(&spec.shape);
        let slabs = self.kv.iter().map(|slab| backend.download(slab, bytes.next_multiple_of(4)));
        Ok(cache_values(&spec.kv, &spec.shape, &slabs.collect::<Result<Vec<_>>>()?.concat()))
    }
}

/// What the indexer reads and writes. The twins are what the single ops write.
pub struct IndexBuffers<B: Backend> {
    k: B::Buffer,
    q: B::Buffer,
    weights: B::Buffer,
    norm_weight: B::Buffer,
    norm_bias: B::Buffer,
    cos_sin: B::Buffer,
    pub cache: Vec<B::Buffer>,
    pub twin: Vec<B::Buffer>,
    pub list: B::Buffer,
    pub twin_list: B::Buffer,
}

/// Bytes of all lists.
pub const LIST_BYTES: u64 = MAX_TOKENS as u64 * LIST_STRIDE * 4;

pub fn list<B>(buffer: &B) -> View<&B> {
    View { buffer, offset: 0, token_stride: LIST_STRIDE, head_stride: 1 }
}

impl<B: Backend> IndexBuffers<B> {
    pub fn new(backend: &B, sparse: &Sparse, rng: &mut Rng) -> Result<Self> {
        let bytes = sparse.layer.dtype.bytes() as u64;
        let tokens = u64::from(MAX_TOKENS);
        let mut norm = |middle: f32| {
            let values: Vec<f32> = (0..INDEX_DIM).map(|_| middle + 0.1 * rng.randn()).collect();
            uploaded(backend, &Dtype::F32.encode_all(&values))
        };
        Ok(Self {
            norm_weight: norm(1.0)?,
            norm_bias: norm(0.0)?,
            k: poisoned(backend, tokens * u64::from(INDEX_DIM) * bytes)?,
            q: poisoned(backend, tokens * u64::from(INDEX_HEADS * INDEX_DIM) * bytes)?,
            weights: poisoned(backend, tokens * u64::from(INDEX_HEADS) * 4)?,
            cos_sin: uploaded(backend, &Dtype::F32.encode_all(&table(64)))?,
            cache: slabs(backend, sparse, sparse.index().page_bytes())?,
            twin: slabs(backend, sparse, sparse.index().page_bytes())?,
            list: poisoned(backend, LIST_BYTES)?,
            twin_list: poisoned(backend, LIST_BYTES)?,
        })
    }

    /// Other inputs for all tokens that there may be, and no lists.
    pub fn refill(&self, backend: &B, sparse: &Sparse, rng: &mut Rng) -> Result<()> {
        let mut fill = |buffer: &B::Buffer, dtype, elems: u32| {
            let (_, bytes) = draw(rng, dtype, (MAX_TOKENS * elems) as usize, 1.0);
            backend.upload(buffer, 0, &bytes)
        };
        fill(&self.k, sparse.layer.dtype, INDEX_DIM)?;
        fill(&self.q, sparse.layer.dtype, INDEX_HEADS * INDEX_DIM)?;
        fill(&self.weights, Dtype::F32, INDEX_HEADS)?;
        for list in [&self.list, &self.twin_list] {
            backend.upload(list, 0, &vec![POISON; LIST_BYTES as usize])?;
        }
        Ok(())
    }

    pub fn view<'a>(&self, sparse: &Sparse, cache: &'a [B::Buffer]) -> Result<KvView<&'a B::Buffer>> {
        sparse.index().view_in_slabs(&cache.iter().collect::<Vec<_>>(), sparse.slab_pages, 0)
    }

    pub fn own(&self, sparse: &Sparse) -> Result<OwnSelection<&B::Buffer>> {
        Ok(OwnSelection {
            k: View::dense(&self.k, 1, INDEX_DIM),
            q: View::dense(&self.q, INDEX_HEADS, INDEX_DIM),
            weights: View::dense(&self.weights, INDEX_HEADS, 1),
            norm_weight: &self.norm_weight,
            norm_bias: &self.norm_bias,
            norm_eps: 1e-6,
            cos_sin: &self.cos_sin,
            max_position: MAX_POSITION,
            cache: self.view(sparse, &self.cache)?,
            weight_scale: ((INDEX_HEADS * INDEX_DIM) as f32).sqrt().recip(),
            indices: list(&self.list),
        })
    }
}

/// The single ops of an indexer, and the arrays between them.
pub struct Single<B: Backend> {
    append: Compiled<IndexerAppend, B>,
    query: Compiled<IndexerQuery, B>,
    logits: Compiled<IndexerLogits, B>,
    top_k: Compiled<TopK, B>,
    q: B::Buffer,
    weights: B::Buffer,
    scores: B::Buffer,
    unread: B::Buffer,
}

impl<B: Backend> Single<B> {
    pub fn new(backend: &B, sparse: &Sparse) -> Result<Self> {
        let (index, format, input) = (sparse.index(), sparse.format, sparse.layer.dtype);
        let num_heads = INDEX_HEADS;
        let slots = Some(TopKSlots { page_size: index.page_size, num_pages: index.num_pages });
        let tokens = u64::from(MAX_TOKENS);
        let q = u64::from(INDEX_HEADS * INDEX_DIM) * format.dtype.bytes() as u64;
        Ok(Self {
            append: backend.compile(IndexerAppend { index, input })?,
            query: backend.compile(IndexerQuery { format, num_heads, input })?,
            logits: backend.compile(IndexerLogits { index, num_heads, query: format.dtype })?,
            top_k: backend.compile(TopK { k: TOPK, slots })?,
            q: backend.buffer(tokens * q)?,
            weights: backend.buffer(tokens * u64::from(INDEX_HEADS) * 4)?,
            scores: backend.buffer(tokens * u64::from(MAX_POSITION) * 4)?,
            unread: backend.buffer(tokens * 4)?,
        })
    }

    /// One after the other, for all tokens of the batch in one round, into the twins.
    pub fn run(&self, sparse: &Sparse, index: &IndexBuffers<B>, arrays: &LayerArrays) -> Result<()> {
        let batch = arrays.batch();
        let positions: Vec<i32> =
            arrays.tokens().iter().flat_map(|(_, range)| range.clone().map(|at| at as i32)).collect();
        let (tokens, own) = (arrays.num_tokens() as u32, index.own(sparse)?);
        let room = RopeAppendExtent::of(MAX_TOKENS);
        let (cos_sin, max_position, twin) = (own.cos_sin, own.max_position, index.view(sparse, &index.twin)?);

        let mut step = self.append.step(0)?;
        let slots = RopeAppendBatch { slot_mapping: batch.slot_mapping, positions: Some(&positions) };
        self.append.prepare(&mut step, slots)?;
        let args = IndexerAppendArgs {
            k: own.k,
            norm_weight: own.norm_weight,
            norm_bias: own.norm_bias,
            norm_eps: own.norm_eps,
            positions: &self.unread,
            cos_sin,
            max_position,
            cache: twin.clone(),
        };
        self.append.run(&step, &self.append.bind(&args, room)?)?;

        let mut step = self.query.step(0)?;
        self.query
            .prepare(&mut step, IndexerQueryBatch { tokens: 0..tokens, positions: Some(&positions) })?;
        let [q, weights] = [(&self.q, INDEX_DIM), (&self.weights, 1)]
            .map(|(buffer, dim)| View::dense(buffer, INDEX_HEADS, dim));
        let args = IndexerQueryArgs {
            q: own.q,
            weights: own.weights,
            q_out: q,
            weights_out: weights,
            positions: &self.unread,
            cos_sin,
            max_position,
            weight_scale: own.weight_scale,
        };
        self.query.run(&step, &self.query.bind(&args, room)?)?;

        let logits = View::dense(&self.scores, 1, MAX_POSITION);
        let mut step = self.logits.step(Default::default())?;
        let scores = IndexerLogitsBatch {
            pages: batch.pages,
            seq_lens: batch.seq_lens,
            query_start_loc: batch.query_start_loc,
            mask: Mask::Causal,
            tokens: 0..tokens,
            fill: 0,
        };
        self.logits.prepare(&mut step, scores)?;
        let args = IndexerLogitsArgs { q, weights, cache: twin, logits };
        let room = IndexerLogitsExtent { tokens: MAX_TOKENS, rows: MAX_TOKENS, columns: MAX_POSITION };
        self.logits.run(&step, &self.logits.bind(&args, room)?)?;

        let mut step = self.top_k.step(Default::default())?;
        let lengths: Vec<i32> = positions.iter().map(|position| position + 1).collect();
        let pages = TopKPages { pages: batch.pages, query_start_loc: batch.query_start_loc, first_token: 0 };
        let rows = TopKBatch { pages: Some(pages), ..TopKBatch::of(&lengths) };
        self.top_k.prepare(&mut step, rows)?;
        let args = TopKArgs {
            logits,
            columns: MAX_POSITION,
            lengths: &self.unread,
            indices: list(&index.twin_list),
            values: None,
        };
        let room = TopKExtent { rows: MAX_TOKENS, columns: MAX_POSITION, out_rows: MAX_TOKENS };
        self.top_k.run(&step, &self.top_k.bind(&args, room)?)
    }
}
