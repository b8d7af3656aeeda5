//! `indexer_logits`: scores of index keys, a run of them a workgroup.

use super::single::uniform;
use super::table::Table;
use crate::base::error::{Error, Result};
use crate::cache::INDEX_DIM;
use crate::gpu::Gpu;
use crate::gpu::buffer::{Window, stride};
use crate::gpu::kernels::compose::Source;
use crate::gpu::kernels::indexer::VARIANTS;
use crate::gpu::pipelines::{Access, Layout, Pipeline, dispatch, group_with_params, layout};
use crate::ops::indexer_logits::runs::Cut;
use crate::ops::variants::{candidates, choose};
use crate::ops::{
    Candidate, Choice, INDEX_SHAPE, IndexerLogits, IndexerLogitsArgs, IndexerLogitsBatch,
    IndexerLogitsExtent, Kernel, OpOptions,
};

/// The kernels of a variant.
#[derive(Debug)]
pub struct Pipes {
    /// Best first, each with what it reads the cache by, in bytes.
    sources: Vec<(Source, u64)>,
    /// The pipeline of the first source; those of the others are compiled for the first binding that needs them.
    first: Pipeline,
    step: Layout,
    layer: Layout,
    cut: Cut,
}

/// One layer's buffers, bound.
#[derive(Debug)]
pub struct Layer {
    group: wgpu::BindGroup,
    pipeline: Pipeline,
}

uniform! {
    "IndexerLogitsParams":
    struct Params {
        q_base: u32,
        q_token_stride: u32,
        q_head_stride: u32,
        weights_base: u32,
        weights_token_stride: u32,
        weights_head_stride: u32,
        kv_base: u32,
        kv_block_stride: u32,
        first_page: u32,
        num_pages: u32,
        logits_base: u32,
        logits_row_stride: u32,
        max_tokens: u32,
        max_rows: u32,
        max_columns: u32,
        reserved_0: u32,
    }
}

impl Kernel<IndexerLogits> for Gpu {
    const SERVES_RECORDS: bool = true;
    type Kernels = Pipes;
    type Step = Table;
    /// `None` where there is room for nothing.
    type Binding = Option<Layer>;

    fn kernel_variants(&self, spec: &IndexerLogits) -> Vec<Candidate> {
        candidates(&VARIANTS, self.caps(), spec)
    }

    fn kernel_compile(&self, spec: &IndexerLogits, options: &OpOptions) -> Result<(Pipes, (), Choice)> {
        let (kernel, choice) = choose(&VARIANTS, self.caps(), spec, options.variant.as_deref())?;
        let step = layout(self, "mla.indexer_logits.step", &[Access::Read])?;
        let entries = [Access::Uniform, Access::Read, Access::Read, Access::Read, Access::Write];
        let layer = layout(self, "mla.indexer_logits.layer", &entries)?;
        // bounds: indexer_logits
        let first = self.pipeline(&kernel.sources[0].0, &[&step, &layer])?;
        Ok((Pipes { sources: kernel.sources, first, step, layer, cut: kernel.cut }, (), choice))
    }

    fn kernel_step(
        &self,
        _: &IndexerLogits,
        _: &Pipes,
        _: crate::ops::IndexerLogitsCapacity,
    ) -> Result<Table> {
        Ok(Table::default())
    }

    fn kernel_prepare(
        &self,
        spec: &IndexerLogits,
        pipes: &Pipes,
        step: &mut Table,
        batch: IndexerLogitsBatch<'_>,
    ) -> Result<IndexerLogitsExtent> {
        let all = spec.runs(&batch, pipes.cut)?;
        let (need, limit) = (all.runs.len() as u64, u64::from(self.caps().max_workgroups).pow(2));
        if need > limit {
            let cure = "score fewer query tokens a step: IndexerLogitsBatch::tokens";
            return Err(Error::Limit { what: "runs of indexer_logits", need, limit, cure });
        }
        let runs: &[u32] = bytemuck::cast_slice(&all.runs);
        let words = runs.iter().chain(&all.pages).copied();
        step.upload(self, &pipes.step, need as u32, words)?;
        Ok(all.extent)
    }

    fn kernel_bind(
        &self,
        spec: &IndexerLogits,
        pipes: &Pipes,
        args: &IndexerLogitsArgs<&wgpu::Buffer>,
        room: IndexerLogitsExtent,
    ) -> Result<Option<Layer>> {
        let IndexerLogitsExtent { tokens, rows, columns } = room;
        if tokens == 0 || rows == 0 || columns == 0 {
            return Ok(None);
        }
        let (heads, bytes, pool) = (spec.num_heads, spec.query.bytes(), spec.index.kv());
        let q = Window::of(self, "q", &args.q, [tokens, heads, INDEX_DIM], bytes)?;
        let weights = Window::of(self, "weights", &args.weights, [tokens, heads, 1], 4)?;
        let kv = Window::of_cache(self, &args.cache, &pool, &INDEX_SHAPE)?;
        let logits = Window::of(self, "logits", &args.logits, [rows, 1, columns], 4)?;
        let held = args.cache.pages(&pool);
        let block_stride = if held.len() > 1 { args.cache.block_stride } else { 0 };
        let places = [args.cache.base(), block_stride];
        let divides = |(_, unit): &&(Source, u64)| places.iter().all(|place| place.is_multiple_of(*unit));
        // The last unit is what every place is a multiple of.
        let at = pipes.sources.iter().position(|source| divides(&source)).unwrap_or(pipes.sources.len() - 1);
        let (source, unit) = &pipes.sources[at];
        let pipeline = match at {
            0 => pipes.first.clone(),
            // bounds: indexer_logits
            _ => self.pipeline(source, &[&pipes.step, &pipes.layer])?,
        };
        let params = Params {
            q_base: q.at(args.q.offset, bytes, 8),
            q_token_stride: stride(tokens, args.q.token_stride, 8),
            q_head_stride: stride(heads, args.q.head_stride, 8),
            weights_base: weights.at(args.weights.offset, 4, 1),
            weights_token_stride: stride(tokens, args.weights.token_stride, 1),
            weights_head_stride: stride(heads, args.weights.head_stride, 1),
            kv_base: kv.at(args.cache.base(), 1, *unit),
            kv_block_stride: (block_stride / unit) as u32,
            first_page: held.start,
            num_pages: held.len() as u32,
            logits_base: logits.at(args.logits.offset, 4, 1),
            logits_row_stride: stride(rows, args.logits.token_stride, 1),
            max_tokens: tokens,
            max_rows: rows,
            max_columns: columns,
            reserved_0: 0,
        };
        let resources = [q, weights, kv, logits].map(|window| window.resource());
        let group = group_with_params(self, "mla.indexer_logits.layer", &pipes.layer, &params, resources)?;
        Ok(Some(Layer { group, pipeline }))
    }

    fn kernel_record(
        &self,
        _: &IndexerLogits,
        _: &Pipes,
        pass: &mut wgpu::ComputePass<'_>,
        step: &Table,
        binding: &Option<Layer>,
    ) -> Result<()> {
        if let (Some(table), Some(layer), runs @ 1..) = (step.group(), binding, step.count()) {
            let x = runs.min(self.caps().max_workgroups);
            dispatch(pass, &layer.pipeline, &[table, &layer.group], [x, runs.div_ceil(x)]);
        }
        Ok(())
    }
}

#[cfg(test)]
impl super::Shaders for IndexerLogits {
    fn every_source(samples: &[Self]) -> Vec<Source> {
        crate::gpu::kernels::indexer::every_source(samples)
    }

    fn layouts() -> Vec<super::HostLayout> {
        super::layouts_of::<Params>()
    }
}
