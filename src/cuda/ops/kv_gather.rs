//! `kv_gather`: tokens of the paged cache to rows of a contiguous workspace.

use super::single::{SingleOp, kernel_args};
use super::table::Table;
use super::{Divisor, MAX_ITEMS, address, stride};
use crate::base::error::{Error, Result};
use crate::cuda::{Buffer, Cuda};
use crate::ops::{KvGather, KvGatherArgs};

/// `PLACES_PER_THREAD` of kv_gather.cu.
const PLACES_PER_THREAD: u32 = 8;

kernel_args! {
    /// `Args` of kv_gather.cu.
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
}

impl SingleOp for KvGather {
    type Params = GatherParams;
    const SERVES_RECORDS: bool = true;

    fn entries(&self) -> Vec<String> {
        vec![format!("kv_gather_{}_{}", self.kv.layout, self.output)]
    }

    fn new_table(cuda: &Cuda, max_pages: u32) -> Result<Table> {
        Table::new(cuda, u64::from(max_pages) * 3, 0)
    }

    fn capacity(table: &Table) -> u32 {
        table.room(3)
    }

    fn check_count(&self, need: u64) -> Result<()> {
        let limit = max_pieces(self).into();
        if need > limit {
            let cure = "gather in several steps";
            return Err(Error::Limit { what: "pages of a gather", need, limit, cure });
        }
        Ok(())
    }

    fn params(&self, args: &KvGatherArgs<&Buffer>, max_rows: u32) -> Result<GatherParams> {
        let (output, row_quads) = (self.output.bytes(), self.shape.row_elems() / 4);
        let (first_slot, num_slots) = args.kv.slots(&self.kv);
        Ok(GatherParams {
            kv: address(args.kv.buffer, args.kv.base(), 1),
            out: address(args.out.buffer, args.out.offset, output),
            block_stride: stride(self.kv.num_pages, args.kv.block_stride, 1),
            out_stride: stride(max_rows, args.out.token_stride, output),
            max_rows,
            num_slots,
            first_slot,
            page_size: self.kv.page_size,
            row_quads,
            k_scale: args.k_scale,
            by_row_quads: Divisor::new(row_quads),
            by_page_size: Divisor::new(self.kv.page_size),
            ..GatherParams::default()
        })
    }

    fn launch(&self, params: GatherParams, table: &Table) -> Result<(GatherParams, u64)> {
        // bounds: kv_gather
        // A table may have room for more pieces than a grid has items; `check_count` refuses those.
        let max_pieces = table.room(3).min(max_pieces(self));
        let blocks = (max_pieces * self.kv.page_size).div_ceil(PLACES_PER_THREAD);
        let items = u64::from(blocks) * u64::from(self.shape.row_elems() / 4);
        Ok((GatherParams { table: table.address(), max_pieces, ..params }, items))
    }
}

/// An item is a quad (4 consecutive elements) of PLACES_PER_THREAD tokens. The kernel divides item and place numbers.
fn max_pieces(spec: &KvGather) -> u32 {
    let blocks = MAX_ITEMS / (spec.shape.row_elems() / 4);
    let places = blocks.saturating_mul(PLACES_PER_THREAD).min(MAX_ITEMS);
    places / spec.kv.page_size
}
