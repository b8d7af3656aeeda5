//! `top_k`: the positions of the largest logits of each row.

use super::single::uniform;
use super::table::Table;
use crate::base::error::Result;
use crate::gpu::Gpu;
use crate::gpu::buffer::{Window, stride};
use crate::gpu::kernels::GROUP;
use crate::gpu::kernels::top_k::{VARIANTS, most_slices, slices, work_words};
use crate::gpu::pipelines::{
    Access::{Read, Uniform, Write},
    Layout, Pipeline, dispatch, group_with_params, layout, storage,
};
use crate::ops::step_table::TableOp;
use crate::ops::variants::{candidates, choose};
use crate::ops::{Candidate, Choice, Kernel, OpOptions, TopK, TopKArgs, TopKBatch, TopKCapacity, TopKExtent};

/// The variant `plain` has a workgroup a row. `slices` cuts few long rows among several, in four dispatches, and has a workgroup a row for
/// others; a software device, where a dispatch and a pipeline cost more than they gain, takes `plain`.
#[derive(Debug)]
pub struct Pipes {
    plain: Pipeline,
    /// The four dispatches of rows that are cut, if it has them, and the layout with their workspace.
    slices: Option<(Vec<Pipeline>, Layout)>,
    step: Layout,
    layer: Layout,
    /// A buffer that is bound in place of values that are not wanted.
    unwanted: wgpu::Buffer,
}

/// One layer's buffers.
#[derive(Debug)]
pub struct Layer {
    plain: wgpu::BindGroup,
    /// The same with a workspace, where rows are cut.
    slices: Option<wgpu::BindGroup>,
    most_slices: u32,
}

uniform! {
    "TopKParams":
    struct Params {
        logits_base: u32,
        logits_stride: u32,
        indices_base: u32,
        indices_stride: u32,
        values_base: u32,
        values_stride: u32,
        columns: u32,
        max_rows: u32,
        out_rows: u32,
        writes_values: u32,
        most_slices: u32,
        k: u32,
        page_size: u32,
        reserved_0: u32,
        reserved_1: u32,
        reserved_2: u32,
    }
}

const LABEL: &str = "mla.top_k.layer";

impl Kernel<TopK> for Gpu {
    type Kernels = Pipes;
    type Step = Table;
    /// `None` where there is room for nothing.
    type Binding = Option<Layer>;

    fn kernel_variants(&self, spec: &TopK) -> Vec<Candidate> {
        candidates(&VARIANTS, self.caps(), spec)
    }

    fn kernel_compile(&self, spec: &TopK, options: &OpOptions) -> Result<(Pipes, (), Choice)> {
        let (kernel, choice) = choose(&VARIANTS, self.caps(), spec, options.variant.as_deref())?;
        let step = layout(self, "mla.top_k.step", &[Read])?;
        let entries = [Uniform, Read, Read, Write, Write, Write];
        let layer = layout(self, LABEL, &entries[..5])?;
        // bounds: top_k
        let plain = self.pipeline(&kernel.plain, &[&step, &layer])?;
        let slices = if kernel.slices.is_empty() {
            None
        } else {
            let layer = layout(self, LABEL, &entries)?;
            let pipelines = kernel.slices.iter().map(|source| self.pipeline(source, &[&step, &layer]));
            Some((pipelines.collect::<Result<_>>()?, layer))
        };
        let unwanted = storage(self, LABEL, 16)?;
        Ok((Pipes { plain, slices, step, layer, unwanted }, (), choice))
    }

    fn kernel_step(&self, _: &TopK, _: &Pipes, _: TopKCapacity) -> Result<Table> {
        Ok(Table::default())
    }

    fn kernel_prepare(
        &self,
        spec: &TopK,
        pipes: &Pipes,
        step: &mut Table,
        batch: TopKBatch<'_>,
    ) -> Result<TopKExtent> {
        let check = |rows: u64| self.grid(rows * u64::from(GROUP)).map(drop);
        let words = spec.table(batch, check)?;
        step.upload(self, &pipes.step, words.count, words.words)?;
        Ok(words.extent)
    }

    fn kernel_bind(
        &self,
        spec: &TopK,
        pipes: &Pipes,
        args: &TopKArgs<&wgpu::Buffer>,
        TopKExtent { rows, out_rows, .. }: TopKExtent,
    ) -> Result<Option<Layer>> {
        if rows == 0 || out_rows == 0 {
            return Ok(None);
        }
        let columns = args.columns;
        let logits = Window::of(self, "logits", &args.logits, [rows, 1, columns], 4)?;
        let lengths = Window::new(self, "lengths", args.lengths, 0..u64::from(rows) * 4)?;
        let indices = Window::of(self, "indices", &args.indices, [out_rows, 1, spec.k], 4)?;
        let values = args.values.map(|view| {
            let window = Window::of(self, "values", &view, [out_rows, 1, spec.k], 4)?;
            Ok((window, window.at(view.offset, 4, 1), stride(out_rows, view.token_stride, 1)))
        });
        let values = values.transpose()?;
        let (values_base, values_stride) = values.map_or((0, 0), |(_, base, stride)| (base, stride));
        let most_slices = most_slices(columns);
        let params = Params {
            logits_base: logits.at(args.logits.offset, 4, 1),
            logits_stride: stride(rows, args.logits.token_stride, 1),
            indices_base: indices.at(args.indices.offset, 4, 1),
            indices_stride: stride(out_rows, args.indices.token_stride, 1),
            values_base,
            values_stride,
            columns,
            max_rows: rows,
            out_rows,
            writes_values: args.values.is_some().into(),
            most_slices,
            k: spec.k,
            page_size: spec.slots.map_or(1, |slots| slots.page_size),
            ..Params::default()
        };
        let values = match &values {
            Some((window, ..)) => window.resource(),
            None => pipes.unwanted.as_entire_binding().into(),
        };
        let resources = [logits.resource(), lengths.resource(), indices.resource(), values];
        let slices = match &pipes.slices {
            Some((_, layout)) if work_words(rows, most_slices) > 0 => {
                // Zeroed, as the first dispatch of a step finds it.
                let work = storage(self, "mla.top_k.work", work_words(rows, most_slices) * 4)?;
                let resources = resources.iter().cloned().chain([work.as_entire_binding().into()]);
                Some(group_with_params(self, LABEL, layout, &params, resources)?)
            }
            _ => None,
        };
        let plain = group_with_params(self, LABEL, &pipes.layer, &params, resources)?;
        Ok(Some(Layer { plain, slices, most_slices }))
    }

    fn kernel_record(
        &self,
        _: &TopK,
        pipes: &Pipes,
        pass: &mut wgpu::ComputePass<'_>,
        step: &Table,
        layer: &Option<Layer>,
    ) -> Result<()> {
        let (Some(table), Some(layer), rows @ 1..) = (step.group(), layer, step.count()) else {
            return Ok(());
        };
        let grid = |groups: u64| self.grid(groups * u64::from(GROUP));
        let slices = slices(rows, layer.most_slices);
        match (&pipes.slices, &layer.slices) {
            (Some((pipelines, _)), Some(group)) if slices >= 2 => {
                let grid = grid(u64::from(rows) * u64::from(slices))?;
                pipelines.iter().for_each(|pipeline| dispatch(pass, pipeline, &[table, group], grid));
            }
            _ => dispatch(pass, &pipes.plain, &[table, &layer.plain], grid(rows.into())?),
        }
        Ok(())
    }
}

#[cfg(test)]
impl super::Shaders for TopK {
    fn every_source(samples: &[Self]) -> Vec<crate::gpu::kernels::compose::Source> {
        crate::gpu::kernels::top_k::every_source(samples)
    }

    fn layouts() -> Vec<super::HostLayout> {
        super::layouts_of::<Params>()
    }
}
