//! A step of a layer: its arrays, rotated past the L2, and its batch.

use wgpu_mla::{
    Dtype, HeadDims, KvSpec, KvView, LayerBatch, LayerCapacity, MlaLayer, MlaLayerArgs, MlaShape, PageTable,
    RopeFrequencies, RopeLayout, View, softmax_scale,
};

use crate::support::Result;
use crate::support::device::Timed;
use crate::support::paint::Paint;

pub const DTYPE: Dtype = Dtype::Bf16;
const PAGE_SIZE: u32 = 64;
/// Layers of DeepSeek-V3.
const MODEL_LAYERS: usize = 61;
/// P and V.
const HEAD_DIM: u32 = 128;
/// Least bytes of all layers' caches together.
const ROTATED_BYTES: u64 = 600_000_000;

#[derive(Clone, Copy)]
pub struct Shape {
    heads: u32,
    pub sequences: u32,
    /// Tokens of each sequence after the step.
    pub len: u32,
    /// New tokens of each sequence.
    pub q_len: u32,
    /// Dtypes of the cache and of the absorbed queries.
    pub cache: Dtype,
    pub query: Dtype,
    /// The dtype of `kv_b_proj`.
    pub weight: Dtype,
}

impl Shape {
    /// One new token of each sequence.
    pub fn decode(heads: u32, sequences: u32, len: u32) -> Self {
        Self { heads, sequences, len, q_len: 1, cache: DTYPE, query: DTYPE, weight: DTYPE }
    }

    /// A sequence whose tokens are all new.
    pub fn prompt(heads: u32, len: u32) -> Self {
        Self { heads, sequences: 1, len, q_len: len, cache: DTYPE, query: DTYPE, weight: DTYPE }
    }

    /// Over an e4m3 cache, with queries and weights of dtypes.
    pub fn over_codes(self, query: Dtype, weight: Dtype) -> Self {
        Self { cache: Dtype::E4m3, query, weight, ..self }
    }

    /// Painted values fit codes with a scale of 1.
    pub const fn scale(dtype: Dtype) -> f32 {
        if dtype.is_fp8() { 1.0 / 16.0 } else { 1.0 }
    }

    /// Layers of a step: the model's, of a prompt one.
    pub fn layers(&self) -> usize {
        if self.is_prompt() { 1 } else { MODEL_LAYERS }
    }

    pub fn is_prompt(&self) -> bool {
        self.q_len > 1
    }

    pub fn name(&self) -> String {
        let Self { heads, sequences, len, cache, query, weight, .. } = self;
        let dtypes = if *cache == DTYPE {
            String::new()
        } else {
            format!(" {cache} cache, {query} query, {weight} weights")
        };
        if self.is_prompt() {
            format!("H{heads} prompt {len}{dtypes}")
        } else {
            format!("H{heads} decode b{sequences}x{len}{dtypes}")
        }
    }

    /// Query tokens of the step.
    pub fn tokens(&self) -> u32 {
        self.sequences * self.q_len
    }
}

pub struct Problem<B> {
    pub shape: Shape,
    pub spec: MlaLayer,
    /// Layers that are rotated.
    pub copies: u32,
    pub cos_sin: B,
    pub out: B,
    pub batch: HostBatch,
    q_nope: B,
    q_pe: B,
    kv_c: B,
    k_pe: B,
    cache: B,
    weights: Vec<B>,
    /// Scales of codes: each is 1.
    scales: B,
}

/// What the host knows of a step.
pub struct HostBatch {
    pub seq_lens: Vec<i32>,
    pub slot_mapping: Vec<i64>,
    pub positions: Vec<i32>,
    block_table: Vec<i32>,
    query_start_loc: Vec<i32>,
    max_pages: u32,
}

impl HostBatch {
    /// The batch of a shape. Other turns have other pages, and decodes shorter sequences.
    pub fn new(shape: &Shape, turn: u32) -> Self {
        let Shape { sequences, len, q_len, .. } = *shape;
        let max_pages = len.div_ceil(PAGE_SIZE);
        let num_pages = sequences * max_pages;
        let len = if shape.is_prompt() { len } else { len - turn % PAGE_SIZE.min(len) };
        // Consecutive pages of a sequence are not adjacent: 7919 is a prime, and divides no number of pages here.
        let page = |index: u32| (u64::from(index + turn) * 7919 % u64::from(num_pages)) as i32;
        let block_table: Vec<i32> = (0..num_pages).map(page).collect();
        let new = len - q_len..len;
        let slot = |(sequence, token): (u32, u32)| {
            let page = block_table[(sequence * max_pages + token / PAGE_SIZE) as usize];
            i64::from(page) * i64::from(PAGE_SIZE) + i64::from(token % PAGE_SIZE)
        };
        let tokens = (0..sequences).flat_map(|sequence| new.clone().map(move |token| (sequence, token)));
        Self {
            seq_lens: vec![len as i32; sequences as usize],
            slot_mapping: tokens.map(slot).collect(),
            positions: (0..sequences).flat_map(|_| new.clone()).map(|token| token as i32).collect(),
            query_start_loc: (0..=sequences).map(|i| (i * q_len) as i32).collect(),
            block_table,
            max_pages,
        }
    }

    pub fn pages(&self) -> PageTable<'_> {
        PageTable::Dense { block_table: &self.block_table, max_pages: self.max_pages }
    }

    pub fn of_layer(&self) -> LayerBatch<'_> {
        LayerBatch {
            seq_lens: &self.seq_lens,
            query_start_loc: &self.query_start_loc,
            slot_mapping: &self.slot_mapping,
            pages: self.pages(),
            shared_prefixes: &[],
            expanded: &[],
        }
    }

    pub fn query_start_loc(&self) -> &[i32] {
        &self.query_start_loc
    }
}

impl<B> Problem<B> {
    pub fn new<D: Timed<Buffer = B>>(gpu: &D, shape: Shape) -> Result<Self> {
        let mla = MlaShape { num_heads: shape.heads, kv_lora_rank: 512, qk_rope_head_dim: 64 };
        let max_pages = shape.len.div_ceil(PAGE_SIZE);
        let num_pages = shape.sequences * max_pages;
        let kv = KvSpec { layout: shape.cache.into(), page_size: PAGE_SIZE, num_pages };
        let spec = MlaLayer {
            shape: mla,
            qk_nope_head_dim: HEAD_DIM,
            v_head_dim: HEAD_DIM,
            kv,
            dtype: DTYPE,
            query: shape.query,
            weight: shape.weight,
            out: DTYPE,
            rope: RopeLayout::Interleaved,
            decode_threshold: 1,
            workspace_bytes: 0,
        };
        // Room for all keys of a prompt at once; decodes need the least there is.
        let rows = if shape.is_prompt() { kv.num_slots() } else { PAGE_SIZE.into() };
        let spec = MlaLayer { workspace_bytes: rows * spec.workspace_row_bytes(), ..spec };
        let layer_elems = kv.num_slots() * u64::from(mla.row_elems());
        let layer_bytes = layer_elems * shape.cache.bytes() as u64;
        let wanted = ROTATED_BYTES.div_ceil(layer_bytes).clamp(2, MODEL_LAYERS as u64);
        let fits = (gpu.largest_buffer() / layer_bytes).max(1);
        let copies = if gpu.is_small() || shape.is_prompt() { 1 } else { wanted.min(fits) as u32 };

        let paint = Paint::new(DTYPE);
        let weights = Paint::new(shape.weight);
        let ones = vec![1.0f32; 2 * shape.heads as usize];
        let scales = gpu.buffer(ones.len() as u64 * 4)?;
        gpu.upload(&scales, 0, bytemuck::cast_slice(&ones))?;
        let painted = |elems: u64| gpu.painted(&paint, elems);
        let count = u64::from(shape.tokens());
        let per_head = |dim: u32| count * u64::from(shape.heads) * u64::from(dim);
        let angles = RopeFrequencies::plain(mla.qk_rope_head_dim, 1e4)?.cos_sin(shape.len)?;
        let cos_sin = gpu.buffer(angles.len() as u64 * 4)?;
        gpu.upload(&cos_sin, 0, bytemuck::cast_slice(&angles))?;
        let weight = u64::from(shape.heads) * u64::from(2 * HEAD_DIM) * u64::from(mla.kv_lora_rank);
        Ok(Self {
            shape,
            spec,
            copies,
            cos_sin,
            out: gpu.buffer(per_head(HEAD_DIM) * DTYPE.bytes() as u64)?,
            batch: HostBatch::new(&shape, 0),
            q_nope: painted(per_head(HEAD_DIM))?,
            q_pe: painted(per_head(mla.qk_rope_head_dim))?,
            kv_c: painted(count * u64::from(mla.kv_lora_rank))?,
            k_pe: painted(count * u64::from(mla.qk_rope_head_dim))?,
            cache: gpu.painted(&Paint::new(shape.cache), u64::from(copies) * layer_elems)?,
            weights: (0..copies).map(|_| gpu.painted(&weights, weight)).collect::<Result<_>>()?,
            scales,
        })
    }

    pub fn capacity(&self) -> LayerCapacity {
        let tokens = self.shape.tokens();
        let decode_tokens = if self.shape.is_prompt() { 0 } else { tokens };
        LayerCapacity { tokens, decode_tokens, ..LayerCapacity::default() }
    }

    pub fn dims(&self) -> HeadDims {
        HeadDims {
            num_heads: self.shape.heads,
            kv_lora_rank: self.spec.shape.kv_lora_rank,
            qk_nope_head_dim: HEAD_DIM,
            v_head_dim: HEAD_DIM,
        }
    }

    /// Layer `copy` of those that are rotated.
    pub fn args(&self, copy: u32) -> MlaLayerArgs<&B> {
        let MlaShape { num_heads: heads, kv_lora_rank: latent, qk_rope_head_dim: rope } = self.spec.shape;
        MlaLayerArgs {
            q_nope: View::dense(&self.q_nope, heads, HEAD_DIM),
            q_pe: View::dense(&self.q_pe, heads, rope),
            kv_c: View::dense(&self.kv_c, 1, latent),
            k_pe: View::dense(&self.k_pe, 1, rope),
            kv: KvView::of_layer(&self.cache, &self.spec.mla(), copy),
            kv_b_proj: &self.weights[copy as usize],
            kv_b_scales: self.shape.weight.is_fp8().then_some(&self.scales),
            cos_sin: &self.cos_sin,
            max_position: self.shape.len,
            out: View::dense(&self.out, heads, HEAD_DIM),
            softmax_scale: softmax_scale(HEAD_DIM, rope, 1.0, 0.0).expect("a model's"),
            q_scale: Shape::scale(self.shape.query),
            k_scale: 1.0,
            out_scale: 1.0,
            expanded: None,
            selection: wgpu_mla::Selection::All,
            guard: None,
        }
    }

    pub fn out_bytes(&self) -> u64 {
        u64::from(self.shape.tokens())
            * u64::from(self.shape.heads)
            * u64::from(HEAD_DIM)
            * DTYPE.bytes() as u64
    }

    pub fn is_finite(&self, out: &[u8]) -> bool {
        DTYPE.decode_all(out).iter().all(|x| x.is_finite())
    }
}
