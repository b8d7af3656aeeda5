//! `indexer_append`: index keys of new tokens into the index cache.

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
use crate::ops::{
    INDEX_ROPE_DIM, INDEX_SHAPE, IndexerAppend, IndexerAppendArgs, RopeAppendBatch, RopeAppendExtent,
};

uniform! {
    "IndexAppendParams":
    pub struct Params {
        index: Index,
        norm_eps: f32,
        k_base_quads: u32,
        k_stride_quads: u32,
        kv_base_quads: u32,
        kv_block_stride_quads: u32,
        page_size: u32,
        max_tokens: u32,
        first_slot: u32,
        num_slots: u32,
        reserved_0: u32,
        reserved_1: u32,
        reserved_2: u32,
    }
}

impl SingleOp for IndexerAppend {
    type Params = Params;
    const LABELS: [&'static str; 2] = ["mla.indexer_append.step", "mla.indexer_append.layer"];
    const BUFFERS: &'static [Access] = &[Read, Read, Read, Read, Read, Write];
    const SERVES_RECORDS: bool = true;

    fn sources(&self) -> Vec<Source> {
        // bounds: indexer_append
        let scale = if self.index.format.dtype.is_fp8() {
            include_str!("../../../shaders/lib/index_scale.wgsl")
        } else {
            include_str!("../../../shaders/lib/index_no_scale.wgsl")
        };
        let files = [scale, include_str!("../../../shaders/indexer_append.wgsl")];
        vec![source("indexer_append", self.input, self.index.format.dtype, &files)]
    }

    fn check_count(&self, tokens: u64) -> Result<()> {
        checked_tokens(tokens, 1)
    }

    fn items(&self, count: u32, _: Option<&Params>) -> u64 {
        u64::from(count & !POSITIONS_FOLLOW) * PARTS
    }

    fn upload(
        &self,
        gpu: &Gpu,
        layout: &wgpu::BindGroupLayout,
        table: &mut Table,
        batch: RopeAppendBatch<'_>,
    ) -> Result<RopeAppendExtent> {
        let StepTable { count, words, extent } = self.table(batch, |count| self.check_table(gpu, count))?;
        let positions = batch.positions.unwrap_or(&[]);
        let follow = if positions.is_empty() { 0 } else { POSITIONS_FOLLOW };
        let words = words.into_iter().chain(positions.iter().map(|&position| position as u32));
        table.upload(gpu, layout, count | follow, words)?;
        Ok(extent)
    }

    fn bind(
        &self,
        gpu: &Gpu,
        kernels: &Kernels,
        args: &IndexerAppendArgs<&wgpu::Buffer>,
        RopeAppendExtent { tokens: max_tokens, .. }: RopeAppendExtent,
    ) -> Result<Option<Layer<Params>>> {
        self.check_count(max_tokens.into())?;
        if max_tokens == 0 {
            return Ok(None);
        }
        let (spec, format, bytes) = (self.index.kv(), &self.index.format, self.input.bytes());
        let k = Window::of(gpu, "k", &args.k, [max_tokens, 1, INDEX_DIM], bytes)?;
        let norm = u64::from(INDEX_DIM) * 4;
        let weight = Window::new(gpu, "norm_weight", args.norm_weight, 0..norm)?;
        let bias = Window::new(gpu, "norm_bias", args.norm_bias, 0..norm)?;
        let kv = Window::of_cache(gpu, &args.cache, &spec, &INDEX_SHAPE)?;
        // Without RoPE the shader reads neither positions nor angles, and other arrays stand in for them.
        let (mut positions, mut cos_sin) = (k, weight);
        if format.rope.is_some() {
            let angles = u64::from(args.max_position) * u64::from(INDEX_ROPE_DIM) * 4;
            positions = Window::new(gpu, "positions", args.positions, 0..u64::from(max_tokens) * 4)?;
            cos_sin = Window::new(gpu, "cos_sin", args.cos_sin, 0..angles)?;
        }
        let (first_slot, num_slots) = args.cache.slots(&spec);
        let quad = 4 * format.dtype.bytes() as u64;
        let params = Params {
            index: Index::new(format, args.max_position),
            norm_eps: args.norm_eps,
            k_base_quads: k.at(args.k.offset, bytes, 4),
            k_stride_quads: stride(max_tokens, args.k.token_stride, 4),
            kv_base_quads: kv.at(args.cache.base(), 1, quad),
            kv_block_stride_quads: stride(spec.num_pages, args.cache.block_stride, quad),
            page_size: spec.page_size,
            max_tokens,
            first_slot,
            num_slots,
            ..Params::default()
        };
        kernels.layer(gpu, params, [positions, cos_sin, k, weight, bias, kv].map(Some), 0)
    }
}
