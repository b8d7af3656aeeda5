//! `kv_copy_pages`: whole pages inside one layer's pool, for a sequence that forks.

use super::table::Table;
use crate::Result;
use crate::gpu::Gpu;
use crate::gpu::buffer::Window;
use crate::gpu::kernels::GROUP;
use crate::gpu::kernels::compose::{Const, Source, compose};
use crate::gpu::pipelines::{Access, Pipe, dispatch, group_with_params};
use crate::ops::variants::only;
use crate::ops::{Choice, Kernel, KvCopyPages, OpOptions, check_copies};
use crate::view::KvView;

/// The same copy by units of 16 bytes and of a word.
#[derive(Debug)]
pub struct Pipes {
    /// `None` where a page is not a multiple of 16 bytes.
    wide: Option<Pipe>,
    words: Pipe,
}

/// A layer's cache, and the unit that its alignment allows.
#[derive(Debug)]
pub struct Layer {
    group: wgpu::BindGroup,
    pipeline: wgpu::ComputePipeline,
    page_units: u64,
}

/// `CopyParams` of the shader.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Params {
    kv_base_units: u32,
    kv_block_stride_units: u32,
    pad: [u32; 2],
}

/// What an invocation moves.
#[derive(Debug, Clone, Copy)]
enum Unit {
    Wide,
    Word,
}

impl Unit {
    const fn bytes(self) -> u64 {
        match self {
            Self::Wide => 16,
            Self::Word => 4,
        }
    }
}

impl Kernel<KvCopyPages> for Gpu {
    type Kernels = Pipes;
    type Step = Table;
    type Binding = Layer;

    fn kernel_compile(&self, spec: &KvCopyPages, options: &OpOptions) -> Result<(Pipes, (), Choice)> {
        let labels = ["mla.kv_copy_pages.step", "mla.kv_copy_pages.layer"];
        let entries = [Access::Uniform, Access::Write];
        // Every index is in bounds, for every pair of table and binding:
        // - the table holds its count and as many pairs (`Table`, which nothing else writes), and the shader reads pairs
        //   below that count only;
        // - both pages < NUM_PAGES is checked in the shader, and `check_args` found the pool's last page inside the buffer
        //   (`KvView::check`); unit < PAGE_UNITS.
        // There is no loop.
        let compile = |unit| Pipe::new(self, labels, &entries, &source(spec, unit));
        let wide = if spec.page_bytes().is_multiple_of(16) { Some(compile(Unit::Wide)?) } else { None };
        Ok((Pipes { wide, words: compile(Unit::Word)? }, (), only(options)?))
    }

    fn kernel_step(&self, _: &KvCopyPages, _: &Pipes, _: u32) -> Result<Table> {
        Ok(Table::default())
    }

    fn kernel_prepare(
        &self,
        spec: &KvCopyPages,
        pipes: &Pipes,
        step: &mut Table,
        copies: &[(u32, u32)],
    ) -> Result<()> {
        check_copies(&spec.kv, copies)?;
        // Each copy writes a page of its own, so there are fewer than pages.
        let words = copies.iter().flat_map(|&(from, to)| [from, to]);
        step.upload(self, &pipes.words.step, copies.len() as u32, words)
    }

    fn kernel_bind(
        &self,
        spec: &KvCopyPages,
        pipes: &Pipes,
        view: &KvView<&wgpu::Buffer>,
        (): (),
    ) -> Result<Layer> {
        let window = Window::of_cache(self, view, &spec.kv, spec.row_elems)?;
        let bytes = spec.kv.dtype.bytes() as u64;
        let base = u64::from(window.at(view.base() * bytes, 1, 1));
        let stride = if spec.kv.num_pages > 1 { view.block_stride * bytes } else { 0 };
        let (unit, pipe) = match &pipes.wide {
            Some(wide) if (base | stride).is_multiple_of(16) => (Unit::Wide, wide),
            _ => (Unit::Word, &pipes.words),
        };
        let params = Params {
            kv_base_units: (base / unit.bytes()) as u32,
            kv_block_stride_units: (stride / unit.bytes()) as u32,
            pad: [0; 2],
        };
        let label = "mla.kv_copy_pages.layer";
        let group = group_with_params(self, label, &pipe.layer, &params, [window.resource()])?;
        let page_units = spec.page_bytes() / unit.bytes();
        Ok(Layer { group, pipeline: pipe.pipeline.clone(), page_units })
    }

    fn kernel_record(
        &self,
        _: &KvCopyPages,
        _: &Pipes,
        pass: &mut wgpu::ComputePass<'_>,
        step: &Table,
        layer: &Layer,
    ) -> Result<()> {
        if let (Some(table), copies @ 1..) = (step.group(), step.count()) {
            let grid = self.grid(u64::from(copies) * layer.page_units);
            dispatch(pass, &layer.pipeline, &[table, &layer.group], grid);
        }
        Ok(())
    }
}

fn source(spec: &KvCopyPages, unit: Unit) -> Source {
    let (variant, ty) = match unit {
        Unit::Wide => ("wide", "vec4<u32>"),
        Unit::Word => ("words", "u32"),
    };
    let consts = [
        ("GROUP", Const::U32(GROUP)),
        ("NUM_PAGES", Const::U32(spec.kv.num_pages)),
        ("PAGE_UNITS", Const::U32((spec.page_bytes() / unit.bytes()) as u32)),
        ("Unit", Const::Alias(ty)),
    ];
    let files =
        [include_str!("../../../shaders/lib/grid.wgsl"), include_str!("../../../shaders/kv_copy_pages.wgsl")];
    compose("kv_copy_pages", &format!("{variant}.{}", spec.kv.dtype), &consts, &files)
}

#[cfg(test)]
pub(super) fn every_source() -> Vec<Source> {
    let spec =
        |dtype| KvCopyPages { kv: crate::KvSpec { dtype, page_size: 16, num_pages: 7 }, row_elems: 576 };
    let both = |dtype| [Unit::Wide, Unit::Word].map(|unit| source(&spec(dtype), unit));
    crate::Dtype::ALL.into_iter().flat_map(both).collect()
}

#[cfg(test)]
pub(super) fn host_layout() -> super::HostLayout {
    super::layout_of!("CopyParams", Params: kv_base_units, kv_block_stride_units; pad: pad0, pad1)
}
