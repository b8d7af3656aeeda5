//! `rope_append`: `rope` and `kv_append` fused in one launch, before a decode.

use super::codes::CodeScale;
use super::guard::Guard;
use super::kv_append::AppendParams;
use super::rope::{CURE, Rows, THREADS};
use super::single::{SingleOp, kernel_args};
use super::table::Table;
use super::{Divisor, checked_items, code};
use crate::base::error::Result;
use crate::cuda::{Buffer, Cuda};
use crate::ops::guard::GuardBounds;
use crate::ops::step_table::{StepTable, TableOp};
use crate::ops::{RopeAppend, RopeAppendArgs, RopeAppendBatch, RopeAppendExtent};

/// Lanes of a warp; each kind of a token's items begins at a multiple, as a half of a warp has the octs of a record that share a scale.
const LANES: u32 = 32;

kernel_args! {
    /// `Args` of rope_append.cu.
    pub struct RopeAppendParams {
        query: Rows,
        append: AppendParams,
        query_dtype: u32,
        query_items: u32,
        key_items: u32,
        token_items: u32,
        by_token_items: Divisor,
        query_is_coded: u32,
        reserved: u32,
        query_scale: CodeScale,
        query_guard: Guard,
    }
}

impl SingleOp for RopeAppend {
    type Params = RopeAppendParams;
    const SERVES_RECORDS: bool = true;
    const THREADS: u32 = THREADS;

    fn entries(&self) -> Vec<String> {
        vec![format!("rope_append_{}_{}", self.append.input, self.append.kv.layout)]
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
        args: &RopeAppendArgs<&Buffer>,
        RopeAppendExtent { tokens: max_tokens, .. }: RopeAppendExtent,
    ) -> Result<RopeAppendParams> {
        items(self, max_tokens)?;
        let token_items = Items::of(self);
        Ok(RopeAppendParams {
            query: Rows::new(&self.rope(), self.query_out, &args.rope(), max_tokens),
            append: AppendParams::new(&self.append, &args.layer, max_tokens),
            query_dtype: code(self.query),
            query_items: token_items.query,
            key_items: token_items.key,
            token_items: token_items.all(),
            by_token_items: Divisor::new(token_items.all()),
            query_is_coded: (self.query_out != self.query).into(),
            reserved: 0,
            query_scale: CodeScale::new(args.q_scale),
            query_guard: Guard::new(
                args.query_guard(self).as_ref(),
                GuardBounds::of(self.query_out, args.q_scale),
            ),
        })
    }

    fn launch(&self, params: RopeAppendParams, table: &Table) -> Result<(RopeAppendParams, u64)> {
        // bounds: rope_append
        let append = params.append.with_table(table);
        let items = items(self, append.max_tokens())?;
        let query = table.positions().map_or(params.query, |positions| params.query.at_positions(positions));
        Ok((RopeAppendParams { append, query, ..params }, items.into()))
    }
}

fn items(spec: &RopeAppend, tokens: u32) -> Result<u32> {
    let items = u64::from(tokens) * u64::from(Items::of(spec).all());
    checked_items("items of a rotation", items, CURE)
}

/// A token's items: `query_items`, `key_items` and octs of the latent.
struct Items {
    query: u32,
    key: u32,
    latent: u32,
}

impl Items {
    fn of(spec: &RopeAppend) -> Self {
        let units = spec.append.shape.qk_rope_head_dim / 8;
        Self {
            query: (units * spec.num_heads).next_multiple_of(LANES),
            key: units.next_multiple_of(LANES),
            latent: spec.append.shape.kv_lora_rank / 8,
        }
    }

    fn all(&self) -> u32 {
        self.query + self.key + self.latent
    }
}
