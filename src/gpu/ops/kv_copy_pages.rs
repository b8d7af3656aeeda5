//! `kv_copy_pages`: whole pages inside one layer's pool, for a sequence that forks.

use super::args::{Slot, bind_group, layout};
use super::table::Table;
use super::{GROUP, grid, pipeline};
use crate::compose::{Const, Source, compose};
use crate::gpu::{Pipelines, window::Window};
use crate::layer::KvView;
use crate::ops::CopySpec;
use crate::{Error, Result, check_copies};

/// Copies pages of the pool bit for bit.
#[derive(Debug)]
pub struct KvCopyPages {
    spec: CopySpec,
    /// 16 bytes an invocation, where a page is a multiple of that.
    wide: Option<wgpu::ComputePipeline>,
    words: wgpu::ComputePipeline,
    step_layout: wgpu::BindGroupLayout,
    layer_layout: wgpu::BindGroupLayout,
    max_groups: u32,
}

/// A list of copies on the device. It grows as needed and serves every layer of the model.
#[derive(Debug, Default)]
pub struct CopyStep {
    table: Table,
    copies: u32,
    num_pages: u32,
}

/// One layer's cache, checked and bound.
#[derive(Debug)]
pub struct CopyBinding {
    group: wgpu::BindGroup,
    pipeline: wgpu::ComputePipeline,
    page_units: u64,
    num_pages: u32,
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

impl KvCopyPages {
    /// Compiles the copy of a spec.
    ///
    /// # Errors
    /// Those of [`CopySpec::check`], [`Error::OutOfMemory`] and [`Error::Internal`].
    pub fn new(pipelines: &Pipelines, spec: CopySpec) -> Result<Self> {
        spec.check()?;
        let device = pipelines.device();
        let step_layout = layout(device, "mla.kv_copy_pages.step", &[Slot::Read])?;
        let layer_layout = layout(device, "mla.kv_copy_pages.layer", &[Slot::Uniform, Slot::Write])?;
        // Every index is in bounds, for each table and binding, whichever pair is recorded:
        // - the table holds its count and as many pairs (`Table`, which nobody else writes), and the shader reads pairs
        //   below that count only;
        // - both pages < NUM_PAGES is asked in the shader, and `bind` found the pool's last page inside the buffer
        //   (`KvView::check`); unit < PAGE_UNITS.
        // There is no loop.
        let compile = |unit| pipeline(pipelines, &source(&spec, unit), &[&step_layout, &layer_layout]);
        let wide = if spec.page_bytes().is_multiple_of(16) { Some(compile(Unit::Wide)?) } else { None };
        let words = compile(Unit::Word)?;
        let max_groups = device.limits().max_compute_workgroups_per_dimension;
        Ok(Self { spec, wide, words, step_layout, layer_layout, max_groups })
    }

    /// What this copy is compiled for.
    pub fn spec(&self) -> &CopySpec {
        &self.spec
    }

    /// Checks copies `(from, to)` of pages and uploads them.
    ///
    /// The upload takes effect before the next submit: give each list that shares a submit a [`CopyStep`] of its own.
    ///
    /// # Errors
    /// [`Error::CopyConflict`], [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn prepare(
        &self,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        step: &mut CopyStep,
        copies: &[(u32, u32)],
    ) -> Result<()> {
        check_copies(&self.spec.kv, copies)?;
        step.copies = 0;
        step.num_pages = self.spec.kv.num_pages;
        // Each copy writes a page of its own, so there are fewer than pages.
        let count = copies.len() as u32;
        if count > 0 {
            let words = copies.iter().flat_map(|&(from, to)| [from, to]);
            step.table.upload(device, queue, &self.step_layout, count, words)?;
        }
        step.copies = count;
        Ok(())
    }

    /// Checks and binds one layer's cache.
    ///
    /// # Errors
    /// [`Error::Alignment`], [`Error::Shape`], [`Error::BufferTooSmall`], [`Error::BufferUsage`] for a buffer without
    /// `STORAGE`, [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn bind(&self, device: &wgpu::Device, view: &KvView<&wgpu::Buffer>) -> Result<CopyBinding> {
        let spec = &self.spec;
        spec.check_view(view, view.buffer.size())?;
        let bytes = spec.kv.dtype.bytes() as u64;
        let (start, end) = (view.base() * bytes, view.end(&spec.mla()) * bytes);
        let kv = Window::new(&device.limits(), "kv", view.buffer, start..end)?;
        let base = start - kv.skipped(1);
        let stride = if spec.kv.num_pages > 1 { view.block_stride * bytes } else { 0 };
        let (unit, pipeline) = match &self.wide {
            Some(wide) if base.is_multiple_of(16) && stride.is_multiple_of(16) => (Unit::Wide, wide),
            _ => (Unit::Word, &self.words),
        };
        let params = Params {
            kv_base_units: (base / unit.bytes()) as u32,
            kv_block_stride_units: (stride / unit.bytes()) as u32,
            pad: [0; 2],
        };
        let params = bytemuck::bytes_of(&params);
        let label = "mla.kv_copy_pages.layer";
        let group = bind_group(device, label, &self.layer_layout, params, [kv.resource()])?;
        let page_units = spec.page_bytes() / unit.bytes();
        Ok(CopyBinding { group, pipeline: pipeline.clone(), page_units, num_pages: spec.kv.num_pages })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &CopyStep, binding: &CopyBinding) -> Result<()> {
        if step.num_pages > binding.num_pages {
            return Err(Error::LayoutMismatch { detail: "the step was prepared for a larger pool of pages" });
        }
        Ok(())
    }

    /// Adds one dispatch to the pass. Creates nothing and cannot fail: a pair that [`KvCopyPages::check`] refuses records
    /// nothing and logs an error.
    pub fn record_in(&self, pass: &mut wgpu::ComputePass<'_>, step: &CopyStep, binding: &CopyBinding) {
        if let Err(error) = self.check(step, binding) {
            log::error!("nothing recorded: {error}");
            return;
        }
        let Some(table) = step.table.group() else { return };
        if step.copies == 0 {
            return;
        }
        let (x, y) = grid(u64::from(step.copies) * binding.page_units, self.max_groups);
        pass.set_pipeline(&binding.pipeline);
        pass.set_bind_group(0, table, &[]);
        pass.set_bind_group(1, &binding.group, &[]);
        pass.dispatch_workgroups(x, y, 1);
    }

    /// [`KvCopyPages::record_in`] in a pass of its own.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder, step: &CopyStep, binding: &CopyBinding) {
        self.record_in(&mut super::pass(encoder, "mla.kv_copy_pages"), step, binding);
    }
}

fn source(spec: &CopySpec, unit: Unit) -> Source {
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
    let spec = |dtype| CopySpec { kv: crate::KvSpec { dtype, page_size: 16, num_pages: 7 }, row_elems: 576 };
    let both = |dtype| [Unit::Wide, Unit::Word].map(|unit| source(&spec(dtype), unit));
    crate::Dtype::ALL.into_iter().flat_map(both).collect()
}

#[cfg(test)]
pub(super) fn host_layout() -> (&'static str, Vec<(&'static str, usize)>, usize) {
    use std::mem::offset_of;
    let pad = offset_of!(Params, pad);
    let fields = vec![
        ("kv_base_units", offset_of!(Params, kv_base_units)),
        ("kv_block_stride_units", offset_of!(Params, kv_block_stride_units)),
        ("pad0", pad),
        ("pad1", pad + 4),
    ];
    ("CopyParams", fields, size_of::<Params>())
}
