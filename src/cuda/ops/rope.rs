//! `rope`: rotary embedding of queries.

use super::single::{SingleOp, kernel_args};
use super::table::Table;
use super::{Divisor, address, checked_items, stride};
use crate::base::dtype::Dtype;
use crate::base::error::Result;
use crate::cuda::{Buffer, Cuda};
use crate::ops::{Rope, RopeArgs, RopeLayout};

/// `THREADS` of rope.cu and rope_append.cu: small blocks spread a decode step's batch over more multiprocessors.
pub(super) const THREADS: u32 = 128;
pub(super) const CURE: &str = "rotate in several steps, and bind a part of the tokens for each";

kernel_args! {
    /// `RopeParams` of rope.cuh.
    pub struct Rows {
        x: u64,
        y: u64,
        x_token_stride: u64,
        x_head_stride: u64,
        y_token_stride: u64,
        y_head_stride: u64,
        positions: u64,
        cos_sin: u64,
        max_position: u32,
        units: u32,
        head_units: u32,
        is_interleaved: u32,
        scale: f32,
        reserved: u32,
        by_units: Divisor,
    }
}

kernel_args! {
    /// `Args` of rope.cu.
    pub struct RopeParams {
        rope: Rows,
        table: u64,
        by_head_units: Divisor,
        max_tokens: u32,
        reserved: u32,
    }
}

impl Rows {
    /// Checked rows of up to `max_tokens` tokens, which go to rows of the dtype `output`.
    pub(super) fn new(spec: &Rope, output: Dtype, args: &RopeArgs<&Buffer>, max_tokens: u32) -> Self {
        let (bytes, y_bytes, units) = (spec.dtype.bytes(), output.bytes(), spec.rope_dim / 8);
        Self {
            x: address(args.x.buffer, args.x.offset, bytes),
            y: address(args.y.buffer, args.y.offset, y_bytes),
            x_token_stride: stride(max_tokens, args.x.token_stride, bytes),
            x_head_stride: stride(spec.num_heads, args.x.head_stride, bytes),
            y_token_stride: stride(max_tokens, args.y.token_stride, y_bytes),
            y_head_stride: stride(spec.num_heads, args.y.head_stride, y_bytes),
            positions: args.positions.ptr(),
            cos_sin: args.cos_sin.ptr(),
            max_position: args.max_position,
            units,
            head_units: units * spec.num_heads,
            is_interleaved: (spec.layout == RopeLayout::Interleaved).into(),
            scale: args.scale,
            by_units: Divisor::new(units),
            ..Self::default()
        }
    }
}

impl Rows {
    /// The same arguments with positions at another address.
    pub(super) fn at_positions(self, positions: u64) -> Self {
        Self { positions, ..self }
    }
}

impl SingleOp for Rope {
    type Params = RopeParams;
    const THREADS: u32 = THREADS;

    fn entries(&self) -> Vec<String> {
        vec![format!("rope_{}", self.dtype)]
    }

    fn new_table(cuda: &Cuda, max_tokens: u32) -> Result<Table> {
        Table::new(cuda, 2, max_tokens)
    }

    fn capacity(table: &Table) -> u32 {
        table.most()
    }

    fn params(&self, args: &RopeArgs<&Buffer>, max_tokens: u32) -> Result<RopeParams> {
        items(self, max_tokens)?;
        let rope = Rows::new(self, self.dtype, args, max_tokens);
        let by_head_units = Divisor::new(rope.head_units);
        Ok(RopeParams { rope, by_head_units, max_tokens, ..RopeParams::default() })
    }

    fn launch(&self, params: RopeParams, table: &Table) -> Result<(RopeParams, u64)> {
        // bounds: rope
        let items = items(self, table.most().min(params.max_tokens))?;
        Ok((RopeParams { table: table.address(), ..params }, items.into()))
    }
}

/// Units (four rotated pairs) of a number of tokens.
fn items(spec: &Rope, tokens: u32) -> Result<u32> {
    let units = u64::from(spec.rope_dim / 8) * u64::from(spec.num_heads);
    checked_items("items of a rotation", u64::from(tokens).saturating_mul(units), CURE)
}
