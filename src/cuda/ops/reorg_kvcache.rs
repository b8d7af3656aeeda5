//! `reorg_kvcache`: gathered parts of several ranks, back in the order of their tokens.

use cudarc::driver::DeviceRepr;

use super::table::Table;
use super::{Divisor, THREADS, address, checked_items, stride};
use crate::cuda::{Buffer, Cuda, Function};
use crate::ops::variants::only;
use crate::ops::{
    Choice, Kernel, OpOptions, ReorgBatch, ReorgCapacity, ReorgExtent, ReorgKvCache, ReorgKvCacheArgs,
};
use crate::{Dtype, Result};

/// `Args` of reorg_kvcache.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ReorgParams {
    gathered: u64,
    out: u64,
    table: u64,
    rank_stride: u64,
    gathered_stride: u64,
    out_stride: u64,
    max_rows: u32,
    max_local_rows: u32,
    world: u32,
    row_units: u32,
    by_row_units: Divisor,
}

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for ReorgParams {}

/// A table, and the most tokens that it has had, which grids cover.
#[derive(Debug)]
pub struct Tables {
    table: Table,
    max_tokens: u32,
}

/// One layer's arrays, held.
#[derive(Debug)]
pub struct Layer {
    args: ReorgParams,
    buffers: [Buffer; 2],
}

impl Kernel<ReorgKvCache> for Cuda {
    type Kernels = Function;
    type Step = Tables;
    type Binding = Layer;

    fn kernel_compile(&self, spec: &ReorgKvCache, options: &OpOptions) -> Result<(Function, (), Choice)> {
        Ok((self.kernel(&reorg_entry(spec.dtype))?, (), only(options)?))
    }

    fn kernel_step(&self, _: &ReorgKvCache, _: &Function, capacity: ReorgCapacity) -> Result<Tables> {
        Ok(Tables { table: Table::new(self, capacity.words.into())?, max_tokens: capacity.tokens })
    }

    fn kernel_capacity(step: &Tables) -> ReorgCapacity {
        ReorgCapacity { tokens: step.max_tokens, words: step.table.room(1) }
    }

    fn kernel_prepare(
        &self,
        spec: &ReorgKvCache,
        _: &Function,
        step: &mut Tables,
        batch: ReorgBatch<'_>,
    ) -> Result<ReorgExtent> {
        let extent = batch.extent()?;
        let (tokens, words) = batch.table()?;
        items(spec, tokens)?;
        step.table.upload(self, tokens, words)?;
        step.max_tokens = step.max_tokens.max(tokens);
        Ok(extent)
    }

    fn kernel_bind(
        &self,
        spec: &ReorgKvCache,
        _: &Function,
        args: &ReorgKvCacheArgs<&Buffer>,
        room: ReorgExtent,
    ) -> Result<Layer> {
        let (bytes, row_units) = (spec.dtype.bytes(), spec.row_elems / 4);
        let bound = ReorgParams {
            gathered: address(args.gathered.buffer, args.gathered.offset, bytes),
            out: address(args.out.buffer, args.out.offset, bytes),
            table: 0,
            rank_stride: stride(room.world, args.rank_stride, bytes),
            gathered_stride: stride(room.local_rows, args.gathered.token_stride, bytes),
            out_stride: stride(room.rows, args.out.token_stride, bytes),
            max_rows: room.rows,
            max_local_rows: room.local_rows,
            world: room.world,
            row_units,
            by_row_units: Divisor::new(row_units),
        };
        Ok(Layer { args: bound, buffers: [args.gathered.buffer.clone(), args.out.buffer.clone()] })
    }

    /// The grid covers the step's capacity: a captured launch copies what the step's table holds at the replay.
    fn kernel_record(
        &self,
        spec: &ReorgKvCache,
        kernel: &Function,
        (): &mut (),
        step: &Tables,
        layer: &Layer,
    ) -> Result<()> {
        let Some(table) = step.table.ptr() else { return Ok(()) };
        // Every address is in its buffer, for every pair of step and binding and whatever the table holds: see src/gpu/ops/reorg_kvcache.rs.
        // Of a table that was never filled the count is 0.
        let items = items(spec, step.max_tokens)?;
        let args = ReorgParams { table, ..layer.args };
        let held = layer.buffers.iter().chain(step.table.buffer());
        self.launch(kernel, items.div_ceil(THREADS), THREADS, 0, &args, held)
    }
}

/// Units (4 elements of a row) of a number of tokens.
fn items(spec: &ReorgKvCache, tokens: u32) -> Result<u32> {
    let cure = "copy the rows of fewer tokens a step";
    checked_items("items of reorg_kvcache", u64::from(tokens) * u64::from(spec.row_elems / 4), cure)
}

pub(super) fn reorg_entry(dtype: Dtype) -> String {
    format!("reorg_kvcache_{}", 4 * dtype.bytes())
}
