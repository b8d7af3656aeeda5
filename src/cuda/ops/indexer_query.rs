//! `indexer_query`: index queries, rotated and quantised, and their scales in the heads' weights.

use super::index_row::{CURE, Index, LANES, THREADS, entry};
use super::single::{SingleOp, kernel_args};
use super::table::Table;
use super::{Divisor, address, checked_items, stride};
use crate::base::dtype::Dtype;
use crate::base::error::Result;
use crate::base::view::View;
use crate::cuda::{Buffer, Cuda};
use crate::ops::step_table::{StepTable, TableOp};
use crate::ops::{IndexerQuery, IndexerQueryArgs, IndexerQueryBatch, RopeAppendExtent};

/// Words of a table between its count and the positions: the first token, and whether the step has positions of its own.
const HEAD_WORDS: u32 = 2;

kernel_args! {
    /// `Place` of quads.cuh.
    pub struct Place {
        address: u64,
        token_stride: u64,
        head_stride: u64,
    }
}

kernel_args! {
    /// `Args` of indexer_query.cu.
    pub struct IndexQueryParams {
        index: Index,
        q: Place,
        weights: Place,
        q_out: Place,
        weights_out: Place,
        table: u64,
        weight_scale: f32,
        max_tokens: u32,
        table_tokens: u32,
        num_heads: u32,
        by_heads: Divisor,
    }
}

impl SingleOp for IndexerQuery {
    type Params = IndexQueryParams;
    const THREADS: u32 = THREADS;

    fn entries(&self) -> Vec<String> {
        vec![entry("indexer_query", &self.format)]
    }

    fn new_table(cuda: &Cuda, max_tokens: u32) -> Result<Table> {
        Table::new(cuda, u64::from(max_tokens) + u64::from(HEAD_WORDS), 0)
    }

    fn capacity(table: &Table) -> u32 {
        table.room(1).saturating_sub(HEAD_WORDS)
    }

    /// The table has room for positions whether the step has them or not: a replay serves both.
    fn upload(
        &self,
        cuda: &Cuda,
        table: &mut Table,
        batch: IndexerQueryBatch<'_>,
    ) -> Result<RopeAppendExtent> {
        let positions = batch.positions;
        let StepTable { count, words, extent } = self.table(batch, |_| Ok(()))?;
        let position = |index: u32| positions.map_or(0, |positions| positions[index as usize] as u32);
        let words = words.into_iter().chain([positions.is_some().into()]).chain((0..count).map(position));
        table.upload(cuda, count, words)?;
        Ok(extent)
    }

    fn params(
        &self,
        args: &IndexerQueryArgs<&Buffer>,
        RopeAppendExtent { tokens: max_tokens, .. }: RopeAppendExtent,
    ) -> Result<IndexQueryParams> {
        self.lanes(max_tokens)?;
        let place = |view: &View<&Buffer>, dtype: Dtype| Place {
            address: address(view.buffer, view.offset, dtype.bytes()),
            token_stride: stride(max_tokens, view.token_stride, dtype.bytes()),
            head_stride: stride(self.num_heads, view.head_stride, dtype.bytes()),
        };
        Ok(IndexQueryParams {
            index: Index::new(&self.format, self.input, [args.positions, args.cos_sin], args.max_position),
            q: place(&args.q, self.input),
            weights: place(&args.weights, Dtype::F32),
            q_out: place(&args.q_out, self.format.dtype),
            weights_out: place(&args.weights_out, Dtype::F32),
            weight_scale: args.weight_scale,
            max_tokens,
            num_heads: self.num_heads,
            by_heads: Divisor::new(self.num_heads),
            ..IndexQueryParams::default()
        })
    }

    fn launch(&self, params: IndexQueryParams, table: &Table) -> Result<(IndexQueryParams, u64)> {
        // bounds: indexer_query
        let table_tokens = Self::capacity(table);
        let items = self.lanes(table_tokens.min(params.max_tokens))?;
        Ok((IndexQueryParams { table: table.address(), table_tokens, ..params }, items.into()))
    }
}

impl IndexerQuery {
    /// Lanes of a warp for each head of each token.
    fn lanes(&self, tokens: u32) -> Result<u32> {
        let lanes = u64::from(tokens) * u64::from(self.num_heads) * LANES;
        checked_items("items of index queries", lanes, CURE)
    }
}
