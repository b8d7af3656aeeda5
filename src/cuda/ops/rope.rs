//! `rope`: rotary embedding of queries.

use std::ops::Range;

use cudarc::driver::DeviceRepr;

use super::range::TokenTable;
use super::{Divisor, address, checked_items, stride};
use crate::Result;
use crate::cuda::{Buffer, Cuda, Function};
use crate::ops::variants::only;
use crate::ops::{Choice, Kernel, OpOptions, Rope, RopeArgs, RopeLayout};

/// `THREADS` of rope.cu and rope_append.cu: small blocks spread a decode step's batch over more multiprocessors.
pub(super) const THREADS: u32 = 128;
pub(super) const CURE: &str = "rotate in several steps, and bind a part of the tokens for each";

/// `RopeParams` of rope.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
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

/// `Args` of rope.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RopeParams {
    rope: Rows,
    table: u64,
    by_head_units: Divisor,
    max_tokens: u32,
    reserved: u32,
}

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for RopeParams {}

impl Rows {
    /// Checked rows of up to `max_tokens` tokens.
    pub(super) fn new(spec: &Rope, args: &RopeArgs<&Buffer>, max_tokens: u32) -> Self {
        let (bytes, units) = (spec.dtype.bytes(), spec.rope_dim / 8);
        Self {
            x: address(args.x.buffer, args.x.offset, bytes),
            y: address(args.y.buffer, args.y.offset, bytes),
            x_token_stride: stride(max_tokens, args.x.token_stride, bytes),
            x_head_stride: stride(spec.num_heads, args.x.head_stride, bytes),
            y_token_stride: stride(max_tokens, args.y.token_stride, bytes),
            y_head_stride: stride(spec.num_heads, args.y.head_stride, bytes),
            positions: args.positions.ptr(),
            cos_sin: args.cos_sin.ptr(),
            max_position: args.max_position,
            units,
            head_units: units * spec.num_heads,
            is_interleaved: (spec.layout == RopeLayout::Interleaved).into(),
            scale: args.scale,
            reserved: 0,
            by_units: Divisor::new(units),
        }
    }
}

impl Rows {
    /// With positions that lie elsewhere.
    pub(super) fn at_positions(self, positions: u64) -> Self {
        Self { positions, ..self }
    }
}

/// One layer's buffers, held.
#[derive(Debug)]
pub struct Layer {
    args: RopeParams,
    buffers: [Buffer; 4],
}

impl Kernel<Rope> for Cuda {
    type Kernels = Function;
    type Step = TokenTable;
    type Binding = Layer;

    fn kernel_compile(&self, spec: &Rope, options: &OpOptions) -> Result<(Function, (), Choice)> {
        Ok((self.kernel(&rope_entry(spec))?, (), only(options)?))
    }

    fn kernel_step(&self, _: &Rope, _: &Function, max_tokens: u32) -> Result<TokenTable> {
        TokenTable::new(self, max_tokens)
    }

    fn kernel_capacity(step: &TokenTable) -> u32 {
        step.max_tokens()
    }

    fn kernel_prepare(
        &self,
        _: &Rope,
        _: &Function,
        step: &mut TokenTable,
        tokens: Range<u32>,
    ) -> Result<u32> {
        step.upload(self, &tokens)
    }

    fn kernel_bind(
        &self,
        spec: &Rope,
        _: &Function,
        args: &RopeArgs<&Buffer>,
        max_tokens: u32,
    ) -> Result<Layer> {
        items(spec, max_tokens)?;
        let rope = Rows::new(spec, args, max_tokens);
        let by_head_units = Divisor::new(rope.head_units);
        let buffers = [args.x.buffer, args.y.buffer, args.positions, args.cos_sin].map(Buffer::clone);
        let args = RopeParams { rope, table: 0, by_head_units, max_tokens, reserved: 0 };
        Ok(Layer { args, buffers })
    }

    /// The grid covers the smaller capacity of step and binding: a captured launch rotates what the step's range holds at the replay.
    fn kernel_record(
        &self,
        spec: &Rope,
        kernel: &Function,
        (): &mut (),
        step: &TokenTable,
        layer: &Layer,
    ) -> Result<()> {
        // Every address is in its buffer, for every pair of step and binding and whatever the table holds:
        // - the kernel takes tokens below the binding's max_tokens only, up to where `check_args` found rows and positions; `first + index`
        //   cannot wrap into them, as `TokenTable::upload` bounds their sum;
        // - 0 <= position < max_position, by `max` and `min` in the kernel, and cos_sin has as many rows (`check_args`).
        let items = items(spec, step.max_tokens().min(layer.args.max_tokens))?;
        let args = RopeParams { table: step.ptr(), ..layer.args };
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

/// Units (four rotated pairs) of a number of tokens.
fn items(spec: &Rope, tokens: u32) -> Result<u32> {
    let units = u64::from(spec.rope_dim / 8) * u64::from(spec.num_heads);
    checked_items("items of a rotation", u64::from(tokens).saturating_mul(units), CURE)
}

pub(super) fn rope_entry(spec: &Rope) -> String {
    format!("rope_{}", spec.dtype)
}
