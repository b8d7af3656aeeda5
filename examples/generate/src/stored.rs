//! What the cache holds of its sequences, for who looks into it.

use wgpu_mla::{
    Backend, Binding, Compiled, Dtype, GatherBatch, GatherRange, KvGather, KvGatherArgs, LayerBatch, Step,
    View,
};

use crate::attention::Attention;
use crate::{Paged, Result};

/// Gathers tokens of a step's sequences out of the pages, with the values as they are stored, in f32.
pub struct Stored<D: Backend> {
    gather: Compiled<KvGather, D>,
    step: Step<KvGather, D>,
    layers: Vec<Binding<KvGather, D>>,
    /// Slabs of the cache that they are bound to.
    num_slabs: usize,
    /// `[tokens, layers, L + R]`.
    rows: D::Buffer,
    row_elems: u32,
    max_tokens: u32,
}

impl<D: Backend> Stored<D> {
    /// For at most so many tokens at a time.
    ///
    /// # Errors
    /// The errors of the backend.
    pub fn new(device: &D, paged: &Paged<D>, max_tokens: u32) -> Result<Self> {
        let (row_elems, layers) = (paged.arrays.spec().shape.row_elems(), paged.arrays.num_layers() as u32);
        let rows = device.buffer(u64::from(max_tokens * layers * row_elems) * 4)?;
        Self::bound(device, paged, rows, max_tokens)
    }

    fn bound(device: &D, paged: &Paged<D>, rows: D::Buffer, max_tokens: u32) -> Result<Self> {
        let (spec, arrays) = (paged.arrays.spec(), &paged.arrays);
        let (row_elems, layers) = (spec.shape.row_elems(), arrays.num_layers() as u32);
        let gather = device.compile(KvGather { shape: spec.shape, kv: spec.kv, output: Dtype::F32 })?;
        let bind = |layer: u32| {
            let out = View {
                buffer: &rows,
                offset: (layer * row_elems).into(),
                token_stride: (layers * row_elems).into(),
                head_stride: row_elems.into(),
            };
            let (kv, k_scale) = (arrays.kv(layer as usize)?, arrays.k_scale(layer as usize));
            gather.bind(&KvGatherArgs { kv, k_scale, out }, max_tokens)
        };
        let layers = (0..layers).map(bind).collect::<wgpu_mla::Result<_>>()?;
        let (step, num_slabs) = (gather.step(0)?, paged.num_slabs());
        Ok(Self { step, layers, num_slabs, rows, gather, row_elems, max_tokens })
    }

    /// Tokens at a time.
    pub fn max_tokens(&self) -> u32 {
        self.max_tokens
    }

    /// Gathers `tokens` tokens of the first sequence from `begin` on, of every layer, and says where they will be,
    /// `[tokens, layers, L + R]`, and their bytes.
    ///
    /// # Errors
    /// [`wgpu_mla::Error::GatherRange`] for tokens that the sequence does not have; those of the backend.
    pub fn submit(&mut self, paged: &Paged<D>, begin: u32, tokens: u32) -> Result<(&D::Buffer, u64)> {
        let bytes = self.prepare(paged, &[GatherRange { sequence: 0, begin, tokens, out_row: 0 }])?;
        self.gather.device().submit(|mut recorder| self.record_on(&mut recorder))?;
        Ok((&self.rows, bytes))
    }

    /// Prepares to gather the new tokens of the step that was begun last, all sequences' in its order, for a host that records it behind
    /// the step's last layer. Gives the bytes that [`Stored::rows`] will have.
    ///
    /// # Errors
    /// [`wgpu_mla::Error::GatherRange`] for a step of more than [`Stored::max_tokens`] tokens; those of the backend.
    pub fn prepare_new(&mut self, paged: &Paged<D>) -> Result<u64> {
        let batch = paged.pages().batch();
        let ends = batch.query_start_loc.windows(2).zip(batch.seq_lens).enumerate();
        let range = |(sequence, (query, &len)): (usize, (&[i32], &i32))| {
            let tokens = (query[1] - query[0]) as u32;
            GatherRange {
                sequence: sequence as u32,
                begin: len as u32 - tokens,
                tokens,
                out_row: query[0] as u32,
            }
        };
        let ranges: Vec<GatherRange> = ends.map(range).collect();
        self.prepare(paged, &ranges)
    }

    /// Records what was prepared into the host's commands.
    ///
    /// # Errors
    /// [`wgpu_mla::Error::LayoutMismatch`] where nothing was prepared; those of the backend.
    pub fn record_on(&self, recorder: &mut D::Recorder<'_>) -> wgpu_mla::Result<()> {
        self.layers.iter().try_for_each(|layer| self.gather.record_on(recorder, &self.step, layer))
    }

    /// Where the gathered tokens are once it is done, `[tokens, layers, L + R]`.
    pub fn rows(&self) -> &D::Buffer {
        &self.rows
    }

    fn prepare(&mut self, paged: &Paged<D>, ranges: &[GatherRange]) -> Result<u64> {
        if self.num_slabs != paged.num_slabs() {
            let device = self.gather.device().clone();
            *self = Self::bound(&device, paged, self.rows.clone(), self.max_tokens)?;
        }
        let LayerBatch { pages, seq_lens, .. } = paged.pages().batch();
        self.gather.prepare(&mut self.step, GatherBatch { pages, seq_lens, ranges })?;
        let tokens: u64 = ranges.iter().map(|range| u64::from(range.tokens)).sum();
        Ok(tokens * u64::from(self.row_elems) * self.layers.len() as u64 * 4)
    }
}
