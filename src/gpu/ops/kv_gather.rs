//! `kv_gather`: tokens of the paged cache to rows of a contiguous workspace.

use super::e4m3_scale::Scale;
use super::table::Table;
use crate::gpu::Gpu;
use crate::gpu::buffer::{Window, stride};
use crate::gpu::kernels::compose::Source;
use crate::gpu::kernels::formats::Format;
use crate::gpu::kernels::{GROUP, unrolled};
use crate::gpu::pipelines::{Access, Pipe, dispatch, group_with_params};
use crate::ops::variants::only;
use crate::ops::{Choice, GatherBatch, Kernel, KvGather, KvGatherArgs, OpOptions};
use crate::{Dtype, Error, Result};

/// Tokens of which an invocation converts a quad each, so that enough loads are in flight.
const PLACES_PER_LANE: u32 = 8;

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
    first_slot: u32,
    num_slots: u32,
    reserved_0: u32,
}

impl Kernel<KvGather> for Gpu {
    type Kernels = Pipe;
    type Step = Table;
    /// `None` where there is room for no row.
    type Binding = Option<wgpu::BindGroup>;

    fn kernel_compile(&self, spec: &KvGather, options: &OpOptions) -> Result<(Pipe, (), Choice)> {
        let labels = ["mla.kv_gather.step", "mla.kv_gather.layer"];
        let entries = [Access::Uniform, Access::Read, Access::Write];
        // Every index is in bounds, for every pair of table and binding:
        // - the table holds its count and as many triples (`Table`, which nothing else writes), and the shader reads triples
        //   below that count only: place < count * PAGE_SIZE, which `prepare` keeps below 2^32;
        // - slot < num_slots, by a `min` in the shader, so the page is one of the slab's, whose last `check_args` found inside the
        //   buffer (`KvView::check`); a piece's tokens are of one page (`KvGather::pieces`);
        // - row < max_rows is checked in the shader: `prepare` may have been called again since `record`. `check_args` refuses an
        //   output that ends before max_rows rows, and `Window::of` binds up to there;
        // - quad < ROW_QUADS; the table of results has an entry a code, and as many as invocations.
        // All loops are unrolled.
        Ok((Pipe::new(self, labels, &entries, &source(spec))?, (), only(options)?))
    }

    fn kernel_step(&self, _: &KvGather, _: &Pipe, _: u32) -> Result<Table> {
        Ok(Table::default())
    }

    fn kernel_prepare(
        &self,
        spec: &KvGather,
        pipe: &Pipe,
        step: &mut Table,
        batch: GatherBatch<'_>,
    ) -> Result<u32> {
        let all = spec.pieces(batch)?;
        // The shader counts items in a `u32`.
        let (places, row) = (u64::from(spec.kv.page_size), u64::from(spec.shape.row_elems()));
        let (need, limit) = (all.pieces.len() as u64, u64::from(u32::MAX) / (places * row));
        if need > limit {
            let cure = "gather in several steps";
            return Err(Error::Limit { what: "pages of a gather", need, limit, cure });
        }
        self.grid(items(spec, need as u32))?;
        let words: &[u32] = bytemuck::cast_slice(&all.pieces);
        step.upload(self, &pipe.step, need as u32, words.iter().copied())?;
        Ok(all.rows)
    }

    fn kernel_bind(
        &self,
        spec: &KvGather,
        pipe: &Pipe,
        args: &KvGatherArgs<&wgpu::Buffer>,
        max_rows: u32,
    ) -> Result<Option<wgpu::BindGroup>> {
        if max_rows == 0 {
            return Ok(None);
        }
        let (row_elems, output) = (spec.shape.row_elems(), spec.output.bytes());
        let kv = Window::of_cache(self, &args.kv, &spec.kv, &spec.shape)?;
        let out = Window::of(self, "out", &args.out, [max_rows, 1, row_elems], output)?;
        let (first_slot, num_slots) = args.kv.slots(&spec.kv);
        let quad = 4 * spec.kv.dtype().bytes() as u64;
        let params = Params {
            scale: Scale::new(if spec.dequantises() { args.k_scale } else { 1.0 }),
            kv_base_quads: kv.at(args.kv.base(), 1, quad),
            kv_block_stride_quads: stride(spec.kv.num_pages, args.kv.block_stride, quad),
            out_base_quads: out.at(args.out.offset, output, 4),
            out_stride_quads: stride(max_rows, args.out.token_stride, 4),
            max_rows,
            first_slot,
            num_slots,
            reserved_0: 0,
        };
        let resources = [kv.resource(), out.resource()];
        group_with_params(self, "mla.kv_gather.layer", &pipe.layer, &params, resources).map(Some)
    }

    fn kernel_record(
        &self,
        spec: &KvGather,
        pipe: &Pipe,
        pass: &mut wgpu::ComputePass<'_>,
        step: &Table,
        binding: &Option<wgpu::BindGroup>,
    ) -> Result<()> {
        if let (Some(table), Some(layer), pieces @ 1..) = (step.group(), binding, step.count()) {
            dispatch(pass, &pipe.pipeline, &[table, layer], self.grid(items(spec, pieces))?);
        }
        Ok(())
    }
}

fn items(spec: &KvGather, pieces: u32) -> u64 {
    let places = u64::from(pieces) * u64::from(spec.kv.page_size);
    places.div_ceil(PLACES_PER_LANE.into()) * u64::from(spec.shape.row_elems() / 4)
}

fn source(spec: &KvGather) -> Source {
    let consts = [
        ("GROUP", GROUP),
        ("PAGE_SIZE", spec.kv.page_size),
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
    } else if spec.kv.dtype() == spec.output {
        [nothing, include_str!("../../../shaders/lib/convert_copy.wgsl")]
    } else {
        [nothing, include_str!("../../../shaders/lib/convert_round.wgsl")]
    };
    let files = [
        include_str!("../../../shaders/lib/grid.wgsl"),
        include_str!("../../../shaders/lib/round.wgsl"),
        Format::of(spec.kv.dtype()).element,
        Format::of(spec.output).out,
        convert[0],
        convert[1],
        include_str!("../../../shaders/kv_gather.wgsl"),
    ];
    unrolled("kv_gather", &format!("from_{}.{}", spec.kv.dtype(), spec.output), &consts, &[], &files)
}

#[cfg(test)]
pub(super) fn every_source() -> Vec<Source> {
    use crate::Op;
    let shape = crate::MlaShape { num_heads: 1, kv_lora_rank: 512, qk_rope_head_dim: 64 };
    let kv = |dtype: Dtype| crate::KvSpec { layout: dtype.into(), page_size: 48, num_pages: 7 };
    let spec = |dtype| Dtype::ALL.map(|output| KvGather { shape, kv: kv(dtype), output });
    let served = Dtype::ALL.into_iter().flat_map(spec).filter(|spec| spec.check().is_ok());
    served.map(|spec| source(&spec)).collect()
}

#[cfg(test)]
pub(super) fn host_layout() -> super::HostLayout {
    super::layout_of!("GatherParams", Params: scale, kv_base_quads, kv_block_stride_quads, out_base_quads, out_stride_quads, max_rows, first_slot, num_slots, reserved_0)
}
