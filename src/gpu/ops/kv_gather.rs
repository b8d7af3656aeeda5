//! `kv_gather`: tokens of the paged cache to rows of a contiguous workspace, the field's `gather_and_maybe_dequant_cache`.

use super::args::{Slot, bind_group, distinct_buffers, layout, window_of};
use super::e4m3_scale::Scale;
use super::table::Table;
use super::{GROUP, grid, pipeline};
use crate::compose::Source;
use crate::gpu::{Pipelines, window::Window};
use crate::ops::{Gather, GatherRange, GatherSpec};
use crate::tables::PageTable;
use crate::{Dtype, Error, Result};

/// Tokens of which an invocation converts a quad each, so that enough loads are in flight.
const PLACES_PER_LANE: u32 = 8;

/// Copies ranges of sequences out of the paged cache, converted to another dtype where that is asked for.
///
/// The bytes are those of the host's conversions: see [`crate::Backend::kv_gather`].
#[derive(Debug)]
pub struct KvGather {
    spec: GatherSpec,
    pipeline: wgpu::ComputePipeline,
    step_layout: wgpu::BindGroupLayout,
    layer_layout: wgpu::BindGroupLayout,
    max_groups: u32,
}

/// A step's ranges and their pages on the device. It grows as needed and serves every layer of the model.
#[derive(Debug, Default)]
pub struct GatherStep {
    table: Table,
    pieces: u32,
    rows: u32,
    num_slots: u64,
}

/// One layer's cache and workspace, checked and bound for up to a number of rows.
#[derive(Debug)]
pub struct GatherBinding {
    /// `None` where there is room for no row.
    group: Option<wgpu::BindGroup>,
    pipeline: wgpu::ComputePipeline,
    max_rows: u32,
    num_slots: u64,
}

/// `GatherParams` of the shader.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Params {
    scale: Scale,
    kv_base_quads: u32,
    kv_block_stride_quads: u32,
    out_base_quads: u32,
    out_stride_quads: u32,
    max_rows: u32,
    reserved: [u32; 3],
}

impl GatherStep {
    /// Rows that the output of the last [`KvGather::prepare`] must have: the end of the last range's.
    pub fn num_rows(&self) -> u32 {
        self.rows
    }
}

impl KvGather {
    /// Compiles the gather of a spec.
    ///
    /// # Errors
    /// Those of [`GatherSpec::check`], [`Error::OutOfMemory`] and [`Error::Internal`].
    pub fn new(pipelines: &Pipelines, spec: GatherSpec) -> Result<Self> {
        spec.check()?;
        let device = pipelines.device();
        let step_layout = layout(device, "mla.kv_gather.step", &[Slot::Read])?;
        let slots = [Slot::Uniform, Slot::Read, Slot::Write];
        let layer_layout = layout(device, "mla.kv_gather.layer", &slots)?;
        // Every index is in bounds, for each table and binding, whichever pair is recorded:
        // - the table holds its count and as many triples (`Table`, which nobody else writes), and the shader reads triples
        //   below that count only: place < count * PAGE_SIZE, which `prepare` keeps below 2^32;
        // - slot < NUM_SLOTS, by a `min` in the shader, so the page is one of the pool's, whose last `bind` found inside the
        //   buffer (`KvView::check`); a piece's tokens are of one page (`GatherSpec::pieces`), and of another pool's table
        //   the `min` keeps them in this one;
        // - row < max_rows is asked in the shader: `prepare` may have been called again since `record`. `bind` refuses an
        //   output that ends before max_rows rows (`Gather::check`), and `window_of` binds up to there;
        // - quad < ROW_QUADS; the table of results has an entry a code, and as many as invocations.
        // All loops are unrolled.
        let pipeline = pipeline(pipelines, &source(&spec), &[&step_layout, &layer_layout])?;
        let max_groups = device.limits().max_compute_workgroups_per_dimension;
        Ok(Self { spec, pipeline, step_layout, layer_layout, max_groups })
    }

    /// What this gather is compiled for.
    pub fn spec(&self) -> &GatherSpec {
        &self.spec
    }

    /// Checks a step's ranges and the page ids that they need, and uploads them.
    ///
    /// The upload takes effect before the next submit: give each step that shares a submit a [`GatherStep`] of its own.
    ///
    /// # Errors
    /// [`Error::GatherRange`] for a range outside of its sequence, [`Error::GatherOverlap`], [`Error::PageOutOfRange`],
    /// [`Error::SeqLen`], [`Error::Length`], [`Error::LayoutMismatch`] for [`PageTable::Device`], [`Error::Limit`],
    /// [`Error::OutOfMemory`].
    pub fn prepare(
        &self,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        step: &mut GatherStep,
        pages: PageTable<'_>,
        seq_lens: &[i32],
        ranges: &[GatherRange],
    ) -> Result<()> {
        let all = self.spec.pieces(pages, seq_lens, ranges)?;
        // The shader numbers its items in a `u32`.
        let (places, row) = (u64::from(self.spec.kv.page_size), u64::from(self.spec.shape.row_elems()));
        let (need, limit) = (all.pieces.len() as u64, u64::from(u32::MAX) / (places * row));
        if need > limit {
            let cure = "gather in several steps";
            return Err(Error::Limit { what: "pages of a gather", need, limit, cure });
        }
        (step.pieces, step.rows) = (0, 0);
        step.num_slots = self.spec.kv.num_slots();
        let pieces = need as u32;
        if pieces > 0 {
            let words: &[u32] = bytemuck::cast_slice(&all.pieces);
            step.table.upload(device, queue, &self.step_layout, pieces, words.iter().copied())?;
        }
        (step.pieces, step.rows) = (pieces, all.rows);
        Ok(())
    }

    /// Checks and binds one layer for steps of at most `max_rows` rows of output ([`GatherStep::num_rows`]).
    ///
    /// # Errors
    /// [`Error::Scale`], [`Error::Alignment`], [`Error::Shape`], [`Error::BufferTooSmall`], [`Error::BufferUsage`] for a buffer
    /// without `STORAGE`, [`Error::Aliased`] where the output is the cache's buffer, [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn bind(
        &self,
        device: &wgpu::Device,
        args: &Gather<&wgpu::Buffer>,
        max_rows: u32,
    ) -> Result<GatherBinding> {
        args.check(&self.spec, max_rows, wgpu::Buffer::size)?;
        let group = if max_rows == 0 { None } else { Some(self.group(device, args, max_rows)?) };
        let (pipeline, num_slots) = (self.pipeline.clone(), self.spec.kv.num_slots());
        Ok(GatherBinding { group, pipeline, max_rows, num_slots })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &GatherStep, binding: &GatherBinding) -> Result<()> {
        if step.rows > binding.max_rows {
            let detail = "the step gathers to rows past the binding's max_rows";
            return Err(Error::LayoutMismatch { detail });
        }
        if step.num_slots > binding.num_slots {
            return Err(Error::LayoutMismatch { detail: "the step was prepared for a larger pool of pages" });
        }
        Ok(())
    }

    /// Adds one dispatch to the pass. Creates nothing and cannot fail: a pair that [`KvGather::check`] refuses records nothing
    /// and logs an error.
    pub fn record_in(&self, pass: &mut wgpu::ComputePass<'_>, step: &GatherStep, binding: &GatherBinding) {
        if let Err(error) = self.check(step, binding) {
            log::error!("nothing recorded: {error}");
            return;
        }
        let (Some(table), Some(layer)) = (step.table.group(), &binding.group) else { return };
        if step.pieces == 0 {
            return;
        }
        let spec = &self.spec;
        let places = u64::from(step.pieces) * u64::from(spec.kv.page_size);
        let items = places.div_ceil(PLACES_PER_LANE.into()) * u64::from(spec.shape.row_elems() / 4);
        let (x, y) = grid(items, self.max_groups);
        pass.set_pipeline(&binding.pipeline);
        pass.set_bind_group(0, table, &[]);
        pass.set_bind_group(1, layer, &[]);
        pass.dispatch_workgroups(x, y, 1);
    }

    /// [`KvGather::record_in`] in a pass of its own.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder, step: &GatherStep, binding: &GatherBinding) {
        self.record_in(&mut super::pass(encoder, "mla.kv_gather"), step, binding);
    }

    fn group(
        &self,
        device: &wgpu::Device,
        args: &Gather<&wgpu::Buffer>,
        max_rows: u32,
    ) -> Result<wgpu::BindGroup> {
        let (spec, limits) = (&self.spec, device.limits());
        let (cache, output) = (spec.kv.dtype.bytes(), spec.output.bytes());
        let (start, end) = (args.kv.base() * cache as u64, args.kv.end(&spec.mla()) * cache as u64);
        let kv = Window::new(&limits, "kv", args.kv.buffer, start..end)?;
        let out = window_of(&limits, "out", &args.out, [max_rows, 1, spec.shape.row_elems()], output)?;
        distinct_buffers(("out", args.out.buffer), &[("kv", args.kv.buffer)])?;

        let params = Params {
            scale: Scale::new(if spec.dequantises() { args.k_scale } else { 1.0 }),
            kv_base_quads: ((args.kv.base() - kv.skipped(cache)) / 4) as u32,
            kv_block_stride_quads: if spec.kv.num_pages > 1 { (args.kv.block_stride / 4) as u32 } else { 0 },
            out_base_quads: ((args.out.offset - out.skipped(output)) / 4) as u32,
            // With one row the stride is unused and may be anything.
            out_stride_quads: if max_rows > 1 { (args.out.token_stride / 4) as u32 } else { 0 },
            max_rows,
            reserved: [0; 3],
        };
        let params = bytemuck::bytes_of(&params);
        let resources = [kv.resource(), out.resource()];
        bind_group(device, "mla.kv_gather.layer", &self.layer_layout, params, resources)
    }
}

fn source(spec: &GatherSpec) -> Source {
    let consts = [
        ("GROUP", GROUP),
        ("PAGE_SIZE", spec.kv.page_size),
        ("NUM_SLOTS", spec.kv.num_slots() as u32),
        ("ROW_QUADS", spec.shape.row_elems() / 4),
        ("PLACES_PER_LANE", PLACES_PER_LANE),
    ];
    let nothing = include_str!("../../../shaders/lib/convert_begin_nothing.wgsl");
    let convert = if spec.dequantises() {
        let pack = match spec.output {
            Dtype::F32 => include_str!("../../../shaders/lib/pack_words.wgsl"),
            _ => include_str!("../../../shaders/lib/pack_halves.wgsl"),
        };
        [pack, include_str!("../../../shaders/lib/convert_table.wgsl")]
    } else if spec.kv.dtype == spec.output {
        [nothing, include_str!("../../../shaders/lib/convert_copy.wgsl")]
    } else {
        [nothing, include_str!("../../../shaders/lib/convert_round.wgsl")]
    };
    let files = [
        include_str!("../../../shaders/lib/grid.wgsl"),
        include_str!("../../../shaders/lib/round.wgsl"),
        lib_cache(spec.kv.dtype),
        super::lib_out(spec.output),
        convert[0],
        convert[1],
        include_str!("../../../shaders/kv_gather.wgsl"),
    ];
    super::unrolled("kv_gather", &format!("from_{}.{}", spec.kv.dtype, spec.output), &consts, &files)
}

/// How an element of the cache is read.
fn lib_cache(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::E4m3 => include_str!("../../../shaders/lib/in_e4m3.wgsl"),
        wide => super::lib_in(wide),
    }
}

#[cfg(test)]
pub(super) fn every_source() -> Vec<Source> {
    let shape = crate::MlaShape { num_heads: 1, kv_lora_rank: 512, qk_rope_head_dim: 64 };
    let kv = |dtype| crate::KvSpec { dtype, page_size: 48, num_pages: 7 };
    let spec = |dtype| Dtype::ALL.map(|output| GatherSpec { shape, kv: kv(dtype), output });
    let served = Dtype::ALL.into_iter().flat_map(spec).filter(|spec| spec.check().is_ok());
    served.map(|spec| source(&spec)).collect()
}

#[cfg(test)]
pub(super) fn host_layout() -> (&'static str, Vec<(&'static str, usize)>, usize) {
    use std::mem::offset_of;
    let reserved = offset_of!(Params, reserved);
    let fields = vec![
        ("scale", offset_of!(Params, scale)),
        ("kv_base_quads", offset_of!(Params, kv_base_quads)),
        ("kv_block_stride_quads", offset_of!(Params, kv_block_stride_quads)),
        ("out_base_quads", offset_of!(Params, out_base_quads)),
        ("out_stride_quads", offset_of!(Params, out_stride_quads)),
        ("max_rows", offset_of!(Params, max_rows)),
        ("reserved_0", reserved),
        ("reserved_1", reserved + 4),
        ("reserved_2", reserved + 8),
    ];
    ("GatherParams", fields, size_of::<Params>())
}
