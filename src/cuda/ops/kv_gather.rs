//! `kv_gather`: tokens of the paged cache to rows of a contiguous workspace.

use cudarc::driver::DeviceRepr;

use super::table::Table;
use super::{Divisor, MAX_ITEMS, THREADS, address, stride};
use crate::cuda::{Buffer, Cuda, Function};
use crate::ops::variants::only;
use crate::ops::{Choice, GatherBatch, Kernel, KvGather, KvGatherArgs, OpOptions};
use crate::{Error, Result};

/// `PLACES_PER_THREAD` of kv_gather.cu.
const PLACES_PER_THREAD: u32 = 8;

/// `Args` of kv_gather.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct GatherParams {
    kv: u64,
    out: u64,
    table: u64,
    block_stride: u64,
    out_stride: u64,
    max_rows: u32,
    max_pieces: u32,
    num_slots: u32,
    first_slot: u32,
    reserved_0: u32,
    page_size: u32,
    row_quads: u32,
    k_scale: f32,
    by_row_quads: Divisor,
    by_page_size: Divisor,
}

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for GatherParams {}

/// One layer's cache and workspace, held.
#[derive(Debug)]
pub struct Layer {
    args: GatherParams,
    buffers: [Buffer; 2],
}

impl Kernel<KvGather> for Cuda {
    type Kernels = Function;
    type Step = Table;
    type Binding = Layer;

    fn kernel_compile(&self, spec: &KvGather, options: &OpOptions) -> Result<(Function, (), Choice)> {
        let kernel = self.kernel(&gather_entry(spec))?;
        Ok((kernel, (), only(options)?))
    }

    fn kernel_step(&self, _: &KvGather, _: &Function, max_pages: u32) -> Result<Table> {
        Table::new(self, u64::from(max_pages) * 3)
    }

    fn kernel_capacity(step: &Table) -> u32 {
        step.room(3)
    }

    fn kernel_prepare(
        &self,
        spec: &KvGather,
        _: &Function,
        step: &mut Table,
        batch: GatherBatch<'_>,
    ) -> Result<u32> {
        let all = spec.pieces(batch)?;
        let (need, limit) = (all.pieces.len() as u64, max_pieces(spec).into());
        if need > limit {
            let cure = "gather in several steps";
            return Err(Error::Limit { what: "pages of a gather", need, limit, cure });
        }
        let words: &[u32] = bytemuck::cast_slice(&all.pieces);
        step.upload(self, need as u32, words.iter().copied())?;
        Ok(all.rows)
    }

    fn kernel_bind(
        &self,
        spec: &KvGather,
        _: &Function,
        args: &KvGatherArgs<&Buffer>,
        max_rows: u32,
    ) -> Result<Layer> {
        let (output, row_quads) = (spec.output.bytes(), spec.shape.row_elems() / 4);
        let (first_slot, num_slots) = args.kv.slots(&spec.kv);
        let bound = GatherParams {
            kv: address(args.kv.buffer, args.kv.base(), 1),
            out: address(args.out.buffer, args.out.offset, output),
            table: 0,
            block_stride: stride(spec.kv.num_pages, args.kv.block_stride, 1),
            out_stride: stride(max_rows, args.out.token_stride, output),
            max_rows,
            max_pieces: 0,
            num_slots,
            first_slot,
            reserved_0: 0,
            page_size: spec.kv.page_size,
            row_quads,
            k_scale: args.k_scale,
            by_row_quads: Divisor::new(row_quads),
            by_page_size: Divisor::new(spec.kv.page_size),
        };
        Ok(Layer { args: bound, buffers: [args.kv.buffer.clone(), args.out.buffer.clone()] })
    }

    /// The grid covers the step's capacity: a captured launch gathers what the step's table holds at the replay.
    fn kernel_record(
        &self,
        spec: &KvGather,
        kernel: &Function,
        (): &mut (),
        step: &Table,
        layer: &Layer,
    ) -> Result<()> {
        // A table may have room for more pieces than a grid has items; `prepare` refuses those.
        let max_pieces = step.room(3).min(max_pieces(spec));
        let Some(table) = step.ptr() else { return Ok(()) };
        // Every address is in its buffer, for every pair of step and binding and whatever the table holds:
        // - the kernel reads triples below max_pieces, for which the table has room, and takes those below the table's count;
        // - it reads slots below num_slots only, of pages whose last one's end `check_args` found inside;
        // - it writes rows below max_rows only, whose last one's end `check_args` found inside.
        let blocks = (max_pieces * spec.kv.page_size).div_ceil(PLACES_PER_THREAD);
        let items = blocks * (spec.shape.row_elems() / 4);
        let args = GatherParams { table, max_pieces, ..layer.args };
        self.launch(
            kernel,
            items.div_ceil(THREADS),
            THREADS,
            0,
            &args,
            layer.buffers.iter().chain(step.buffer()),
        )
    }
}

/// An item is a quad (4 consecutive elements) of PLACES_PER_THREAD tokens. The kernel divides item and place numbers.
fn max_pieces(spec: &KvGather) -> u32 {
    let blocks = MAX_ITEMS / (spec.shape.row_elems() / 4);
    let places = blocks.saturating_mul(PLACES_PER_THREAD).min(MAX_ITEMS);
    places / spec.kv.page_size
}

pub(super) fn gather_entry(spec: &KvGather) -> String {
    format!("kv_gather_{}_{}", spec.kv.dtype(), spec.output)
}
