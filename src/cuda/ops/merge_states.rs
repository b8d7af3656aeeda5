//! `merge_states`: any number of partial attention results into one.

use super::array::Array;
use super::single::{SingleOp, kernel_args};
use super::table::Table;
use super::{Divisor, checked_items, code};
use crate::base::error::Result;
use crate::cuda::{Buffer, Cuda};
use crate::ops::{LseBase, MergeStates, MergeStatesArgs, MergeStatesExtent, is_wide};

/// The entries for rows of a multiple of 8 elements, and for others.
const ENTRIES: [&str; 2] = ["merge_states", "merge_states_elements"];

kernel_args! {
    /// `Args` of merge_states.cu.
    pub struct MergeStatesParams {
        states: Array,
        lse: Array,
        output: Array,
        output_lse: Array,
        table: u64,
        set_stride: u64,
        lse_set_stride: u64,
        max_tokens: u32,
        max_sets: u32,
        num_heads: u32,
        row_units: u32,
        dtype: u32,
        log2_base: f32,
        per_ln: f32,
        output_scale: f32,
        by_row_units: Divisor,
        by_num_heads: Divisor,
    }
}

impl SingleOp for MergeStates {
    type Params = MergeStatesParams;

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

    fn params(&self, args: &MergeStatesArgs<&Buffer>, room: MergeStatesExtent) -> Result<MergeStatesParams> {
        items(self, room.tokens, args.num_heads)?;
        let (rows, row_units, bytes) =
            ([room.tokens, args.num_heads], row_units(self.head_size), self.dtype.bytes());
        let [_, per_ln] = args.lse_base.ln();
        // The stride of one set is unused and may be anything, as may that of no token.
        let sets = |stride: u64, bytes: u64| if room.sets > 1 { stride.wrapping_mul(bytes) } else { 0 };
        Ok(MergeStatesParams {
            states: Array::new(&args.states, bytes, rows),
            lse: Array::new(&args.lse, 4, rows),
            output: Array::new(&args.output, bytes, rows),
            output_lse: args.output_lse.map(|view| Array::new(&view, 4, rows)).unwrap_or_default(),
            set_stride: sets(args.set_stride, bytes as u64),
            lse_set_stride: sets(args.lse_set_stride, 4),
            max_tokens: room.tokens,
            max_sets: room.sets,
            num_heads: args.num_heads,
            row_units,
            dtype: code(self.dtype),
            log2_base: log2_of(args.lse_base),
            per_ln,
            output_scale: args.output_scale,
            by_row_units: Divisor::new(row_units),
            by_num_heads: Divisor::new(args.num_heads.max(1)),
            ..MergeStatesParams::default()
        })
    }

    fn launch(&self, params: MergeStatesParams, table: &Table) -> Result<(MergeStatesParams, u64)> {
        // bounds: merge_states
        let items = items(self, table.most().min(params.max_tokens), params.num_heads)?;
        Ok((MergeStatesParams { table: table.address(), ..params }, items.into()))
    }
}

/// The elements of a row that a thread takes at a time: a quad (4 consecutive ones), or a single one where a row is no multiple of 8.
pub(super) fn row_units(head_size: u32) -> u32 {
    if is_wide(head_size) { head_size / 4 } else { head_size }
}

/// The binary logarithm of a base: kernels raise 2 to powers.
pub(super) fn log2_of(base: LseBase) -> f32 {
    match base {
        LseBase::E => std::f32::consts::LOG2_E,
        LseBase::Two => 1.0,
    }
}

/// Units of the output of a number of tokens.
fn items(spec: &MergeStates, tokens: u32, heads: u32) -> Result<u32> {
    let items = u64::from(tokens) * u64::from(heads);
    let cure = "merge the states of fewer tokens a call";
    checked_items("items of a merge", items.saturating_mul(row_units(spec.head_size).into()), cure)
}
