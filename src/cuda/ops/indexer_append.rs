//! `indexer_append`: index keys of new tokens into the index cache.

use super::index_row::{CURE, Index, LANES, THREADS, entry};
use super::single::{SingleOp, kernel_args};
use super::table::Table;
use super::{Divisor, address, checked_items, stride};
use crate::base::error::Result;
use crate::cuda::{Buffer, Cuda};
use crate::ops::step_table::{StepTable, TableOp};
use crate::ops::{IndexerAppend, IndexerAppendArgs, RopeAppendBatch, RopeAppendExtent};

kernel_args! {
    /// `Args` of indexer_append.cu.
    pub struct IndexAppendParams {
        index: Index,
        k: u64,
        norm_weight: u64,
        norm_bias: u64,
        kv: u64,
        table: u64,
        k_stride: u64,
        block_stride: u64,
        norm_eps: f32,
        max_tokens: u32,
        num_slots: u32,
        first_slot: u32,
        page_size: u32,
        reserved: u32,
        by_page_size: Divisor,
    }
}

impl SingleOp for IndexerAppend {
    type Params = IndexAppendParams;
    const SERVES_RECORDS: bool = true;
    const THREADS: u32 = THREADS;

    fn entries(&self) -> Vec<String> {
        vec![entry("indexer_append", &self.index.format)]
    }

    fn new_table(cuda: &Cuda, max_tokens: u32) -> Result<Table> {
        Table::new(cuda, max_tokens.into(), 0)
    }

    fn capacity(table: &Table) -> u32 {
        table.room(1)
    }

    /// Whether it has positions of its own: the kernel is given where they are.
    fn form(table: &Table) -> u64 {
        table.positions().is_some().into()
    }

    fn upload(&self, cuda: &Cuda, table: &mut Table, batch: RopeAppendBatch<'_>) -> Result<RopeAppendExtent> {
        let StepTable { count, words, extent } = self.table(batch, |_| Ok(()))?;
        table.upload(cuda, count, words)?;
        table.upload_positions(cuda, batch.positions)?;
        Ok(extent)
    }

    fn params(
        &self,
        args: &IndexerAppendArgs<&Buffer>,
        RopeAppendExtent { tokens: max_tokens, .. }: RopeAppendExtent,
    ) -> Result<IndexAppendParams> {
        items(max_tokens)?;
        let (kv, cache, format) = (self.index.kv(), &args.cache, &self.index.format);
        let (first_slot, num_slots) = cache.slots(&kv);
        Ok(IndexAppendParams {
            index: Index::new(format, self.input, [args.positions, args.cos_sin], args.max_position),
            k: address(args.k.buffer, args.k.offset, self.input.bytes()),
            norm_weight: args.norm_weight.ptr(),
            norm_bias: args.norm_bias.ptr(),
            kv: address(cache.buffer, cache.base(), 1),
            k_stride: stride(max_tokens, args.k.token_stride, self.input.bytes()),
            block_stride: stride(kv.num_pages, cache.block_stride, 1),
            norm_eps: args.norm_eps,
            max_tokens,
            num_slots,
            first_slot,
            page_size: kv.page_size,
            by_page_size: Divisor::new(kv.page_size),
            ..IndexAppendParams::default()
        })
    }

    fn launch(&self, params: IndexAppendParams, table: &Table) -> Result<(IndexAppendParams, u64)> {
        // bounds: indexer_append
        let index = table.positions().map_or(params.index, |positions| params.index.at_positions(positions));
        let max_tokens = table.room(1).min(params.max_tokens);
        let items = items(max_tokens)?;
        Ok((IndexAppendParams { index, table: table.address(), max_tokens, ..params }, items.into()))
    }
}

/// Lanes of a warp for each token.
fn items(tokens: u32) -> Result<u32> {
    checked_items("items of an index append", u64::from(tokens) * LANES, CURE)
}
