//! `correct_attn_out`: one rank's attention output, weighted for a sum over the ranks.

use super::array::Array;
use super::merge_states::{log2_of, row_units};
use super::single::{SingleOp, kernel_args};
use super::table::Table;
use super::{Divisor, checked_items, code};
use crate::base::error::Result;
use crate::cuda::{Buffer, Cuda};
use crate::ops::{CorrectAttnOut, CorrectAttnOutArgs, is_wide};

/// The entries for rows of a multiple of 8 elements, and for others.
const ENTRIES: [&str; 2] = ["correct_attn_out", "correct_attn_out_elements"];

kernel_args! {
    /// `Args` of correct_attn_out.cu.
    pub struct CorrectParams {
        out: Array,
        lses: Array,
        output: Array,
        output_lse: Array,
        table: u64,
        lse_rank_stride: u64,
        max_tokens: u32,
        world: u32,
        rank: u32,
        num_heads: u32,
        row_units: u32,
        dtype: u32,
        log2_base: f32,
        per_ln: f32,
        by_row_units: Divisor,
        by_num_heads: Divisor,
    }
}

impl SingleOp for CorrectAttnOut {
    type Params = CorrectParams;

    fn entries(&self) -> Vec<String> {
        let [wide, elements] = ENTRIES;
        vec![if is_wide(self.head_size) { wide } else { elements }.to_owned()]
    }

    fn new_table(cuda: &Cuda, max_tokens: u32) -> Result<Table> {
        Table::new(cuda, 2, max_tokens)
    }

    fn capacity(table: &Table) -> u32 {
        table.most()
    }

    fn params(&self, args: &CorrectAttnOutArgs<&Buffer>, tokens: u32) -> Result<CorrectParams> {
        items(self, tokens, args.num_heads)?;
        let (rows, row_units, bytes) =
            ([tokens, args.num_heads], row_units(self.head_size), self.dtype.bytes());
        let [_, per_ln] = args.lse_base.ln();
        Ok(CorrectParams {
            out: Array::new(&args.out, bytes, rows),
            lses: Array::new(&args.lses, 4, rows),
            output: Array::new(&args.output, bytes, rows),
            output_lse: args.output_lse.map(|view| Array::new(&view, 4, rows)).unwrap_or_default(),
            // The stride of one rank is unused and may be anything.
            lse_rank_stride: if args.world > 1 { args.lse_rank_stride.wrapping_mul(4) } else { 0 },
            max_tokens: tokens,
            world: args.world,
            rank: args.rank,
            num_heads: args.num_heads,
            row_units,
            dtype: code(self.dtype),
            log2_base: log2_of(args.lse_base),
            per_ln,
            by_row_units: Divisor::new(row_units),
            by_num_heads: Divisor::new(args.num_heads.max(1)),
            ..CorrectParams::default()
        })
    }

    fn launch(&self, params: CorrectParams, table: &Table) -> Result<(CorrectParams, u64)> {
        // bounds: correct_attn_out
        let items = items(self, table.most().min(params.max_tokens), params.num_heads)?;
        Ok((CorrectParams { table: table.address(), ..params }, items.into()))
    }
}

/// Units of the output of a number of tokens.
fn items(spec: &CorrectAttnOut, tokens: u32, heads: u32) -> Result<u32> {
    let items = u64::from(tokens) * u64::from(heads);
    let cure = "correct the output of fewer tokens a call";
    checked_items("items of correct_attn_out", items.saturating_mul(row_units(spec.head_size).into()), cure)
}
