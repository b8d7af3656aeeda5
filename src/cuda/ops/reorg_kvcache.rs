//! `reorg_kvcache`: gathered parts of several ranks, back in the order of their tokens.

use super::single::{SingleOp, kernel_args};
use super::table::Table;
use super::{Divisor, address, checked_items, stride};
use crate::base::error::Result;
use crate::cuda::{Buffer, Cuda};
use crate::ops::{ReorgCapacity, ReorgExtent, ReorgKvCache, ReorgKvCacheArgs};

kernel_args! {
    /// `Args` of reorg_kvcache.cu.
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
}

impl SingleOp for ReorgKvCache {
    type Params = ReorgParams;

    fn entries(&self) -> Vec<String> {
        vec![format!("reorg_kvcache_{}", 4 * self.dtype.bytes())]
    }

    fn new_table(cuda: &Cuda, capacity: ReorgCapacity) -> Result<Table> {
        Table::new(cuda, capacity.words.into(), capacity.tokens)
    }

    fn capacity(table: &Table) -> ReorgCapacity {
        ReorgCapacity { tokens: table.most(), words: table.room(1) }
    }

    fn check_count(&self, tokens: u64) -> Result<()> {
        items(self, tokens).map(drop)
    }

    fn params(&self, args: &ReorgKvCacheArgs<&Buffer>, room: ReorgExtent) -> Result<ReorgParams> {
        let (bytes, row_units) = (self.dtype.bytes(), self.row_elems / 4);
        Ok(ReorgParams {
            gathered: address(args.gathered.buffer, args.gathered.offset, bytes),
            out: address(args.out.buffer, args.out.offset, bytes),
            rank_stride: stride(room.world, args.rank_stride, bytes),
            gathered_stride: stride(room.local_rows, args.gathered.token_stride, bytes),
            out_stride: stride(room.rows, args.out.token_stride, bytes),
            max_rows: room.rows,
            max_local_rows: room.local_rows,
            world: room.world,
            row_units,
            by_row_units: Divisor::new(row_units),
            ..ReorgParams::default()
        })
    }

    fn launch(&self, params: ReorgParams, table: &Table) -> Result<(ReorgParams, u64)> {
        // bounds: reorg_kvcache
        let items = items(self, table.most().into())?;
        Ok((ReorgParams { table: table.address(), ..params }, items.into()))
    }
}

/// Units (4 elements of a row) of a number of tokens.
fn items(spec: &ReorgKvCache, tokens: u64) -> Result<u32> {
    let cure = "copy the rows of fewer tokens a step";
    checked_items("items of reorg_kvcache", tokens * u64::from(spec.row_elems / 4), cure)
}
