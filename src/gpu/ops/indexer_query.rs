//! `indexer_query`: index queries, rotated and quantised, and their scales in the heads' weights.

use super::index_row::{Index, PARTS, POSITIONS_FOLLOW, checked_tokens, source};
use super::single::{Kernels, Layer, SingleOp, uniform};
use super::table::Table;
use crate::base::error::Result;
use crate::cache::INDEX_DIM;
use crate::gpu::Gpu;
use crate::gpu::buffer::{Window, stride};
use crate::gpu::kernels::compose::Source;
use crate::gpu::pipelines::Access::{self, Read, Write};
use crate::ops::step_table::{StepTable, TableOp};
use crate::ops::{INDEX_ROPE_DIM, IndexerQuery, IndexerQueryArgs, IndexerQueryBatch, RopeAppendExtent};

uniform! {
    "IndexQueryParams":
    pub struct Params {
        index: Index,
        weight_scale: f32,
        num_heads: u32,
        max_tokens: u32,
        q_base_quads: u32,
        q_token_stride_quads: u32,
        q_head_stride_quads: u32,
        out_base_quads: u32,
        out_token_stride_quads: u32,
        out_head_stride_quads: u32,
        weights_base: u32,
        weights_token_stride: u32,
        weights_head_stride: u32,
        weights_out_base: u32,
        weights_out_token_stride: u32,
        weights_out_head_stride: u32,
        reserved_0: u32,
    }
}

impl SingleOp for IndexerQuery {
    type Params = Params;
    const LABELS: [&'static str; 2] = ["mla.indexer_query.step", "mla.indexer_query.layer"];
    const BUFFERS: &'static [Access] = &[Read, Read, Read, Read, Write, Write];

    fn sources(&self) -> Vec<Source> {
        // bounds: indexer_query
        let files = [include_str!("../../../shaders/indexer_query.wgsl")];
        vec![source("indexer_query", self.input, self.format.dtype, &files)]
    }

    fn check_count(&self, tokens: u64) -> Result<()> {
        checked_tokens(tokens, self.num_heads.into())
    }

    fn items(&self, count: u32, _: Option<&Params>) -> u64 {
        u64::from(count & !POSITIONS_FOLLOW) * u64::from(self.num_heads) * PARTS
    }

    fn upload(
        &self,
        gpu: &Gpu,
        layout: &wgpu::BindGroupLayout,
        table: &mut Table,
        batch: IndexerQueryBatch<'_>,
    ) -> Result<RopeAppendExtent> {
        let positions = batch.positions.unwrap_or(&[]);
        let StepTable { count, words, extent } = self.table(batch, |count| self.check_table(gpu, count))?;
        let follow = if positions.is_empty() { 0 } else { POSITIONS_FOLLOW };
        let words = words.into_iter().chain(positions.iter().map(|&position| position as u32));
        table.upload(gpu, layout, count | follow, words)?;
        Ok(extent)
    }

    fn bind(
        &self,
        gpu: &Gpu,
        kernels: &Kernels,
        args: &IndexerQueryArgs<&wgpu::Buffer>,
        RopeAppendExtent { tokens: max_tokens, .. }: RopeAppendExtent,
    ) -> Result<Option<Layer<Params>>> {
        self.check_count(max_tokens.into())?;
        if max_tokens == 0 {
            return Ok(None);
        }
        let (heads, output) = (self.num_heads, self.format.dtype);
        let rows = [max_tokens, heads, INDEX_DIM];
        let q = Window::of(gpu, "q", &args.q, rows, self.input.bytes())?;
        let q_out = Window::of(gpu, "q_out", &args.q_out, rows, output.bytes())?;
        let weights = Window::of(gpu, "weights", &args.weights, [max_tokens, heads, 1], 4)?;
        let weights_out = Window::of(gpu, "weights_out", &args.weights_out, [max_tokens, heads, 1], 4)?;
        // Without RoPE the shader reads neither positions nor angles, and the queries stand in for them.
        let (mut positions, mut cos_sin) = (q, q);
        if self.format.rope.is_some() {
            let angles = u64::from(args.max_position) * u64::from(INDEX_ROPE_DIM) * 4;
            positions = Window::new(gpu, "positions", args.positions, 0..u64::from(max_tokens) * 4)?;
            cos_sin = Window::new(gpu, "cos_sin", args.cos_sin, 0..angles)?;
        }
        let params = Params {
            index: Index::new(&self.format, args.max_position),
            weight_scale: args.weight_scale,
            num_heads: heads,
            max_tokens,
            q_base_quads: q.at(args.q.offset, self.input.bytes(), 4),
            q_token_stride_quads: stride(max_tokens, args.q.token_stride, 4),
            q_head_stride_quads: stride(heads, args.q.head_stride, 4),
            out_base_quads: q_out.at(args.q_out.offset, output.bytes(), 4),
            out_token_stride_quads: stride(max_tokens, args.q_out.token_stride, 4),
            out_head_stride_quads: stride(heads, args.q_out.head_stride, 4),
            weights_base: weights.at(args.weights.offset, 4, 1),
            weights_token_stride: stride(max_tokens, args.weights.token_stride, 1),
            weights_head_stride: stride(heads, args.weights.head_stride, 1),
            weights_out_base: weights_out.at(args.weights_out.offset, 4, 1),
            weights_out_token_stride: stride(max_tokens, args.weights_out.token_stride, 1),
            weights_out_head_stride: stride(heads, args.weights_out.head_stride, 1),
            ..Params::default()
        };
        kernels.layer(gpu, params, [positions, cos_sin, q, weights, q_out, weights_out].map(Some), 0)
    }
}
