//! `correct_attn_out`: one rank's attention output, weighted for a sum over the ranks.

use std::ops::Range;

use cudarc::driver::DeviceRepr;

use super::array::Array;
use super::merge_states::{log2_of, row_units};
use super::range::TokenTable;
use super::{Divisor, THREADS, checked_items, code};
use crate::Result;
use crate::cuda::{Buffer, Cuda, Function};
use crate::ops::is_wide;
use crate::ops::variants::only;
use crate::ops::{Choice, CorrectAttnOut, CorrectAttnOutArgs, Kernel, OpOptions};

/// The entries for rows of a multiple of 8 elements, and for others.
pub(super) const ENTRIES: [&str; 2] = ["correct_attn_out", "correct_attn_out_elements"];

/// `Args` of correct_attn_out.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
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

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for CorrectParams {}

/// One layer's arrays, held.
#[derive(Debug)]
pub struct Layer {
    args: CorrectParams,
    buffers: [Buffer; 4],
}

impl Kernel<CorrectAttnOut> for Cuda {
    type Kernels = Function;
    type Step = TokenTable;
    type Binding = Layer;

    fn kernel_compile(&self, spec: &CorrectAttnOut, options: &OpOptions) -> Result<(Function, (), Choice)> {
        let [wide, elements] = ENTRIES;
        let entry = if is_wide(spec.head_size) { wide } else { elements };
        Ok((self.kernel(entry)?, (), only(options)?))
    }

    fn kernel_step(&self, _: &CorrectAttnOut, _: &Function, max_tokens: u32) -> Result<TokenTable> {
        TokenTable::new(self, max_tokens)
    }

    fn kernel_capacity(step: &TokenTable) -> u32 {
        step.max_tokens()
    }

    fn kernel_prepare(
        &self,
        _: &CorrectAttnOut,
        _: &Function,
        step: &mut TokenTable,
        tokens: Range<u32>,
    ) -> Result<u32> {
        step.upload(self, &tokens)
    }

    fn kernel_bind(
        &self,
        spec: &CorrectAttnOut,
        _: &Function,
        args: &CorrectAttnOutArgs<&Buffer>,
        tokens: u32,
    ) -> Result<Layer> {
        items(spec, tokens, args.num_heads)?;
        let (rows, row_units, bytes) =
            ([tokens, args.num_heads], row_units(spec.head_size), spec.dtype.bytes());
        let [_, per_ln] = args.lse_base.ln();
        let bound = CorrectParams {
            out: Array::new(&args.out, bytes, rows),
            lses: Array::new(&args.lses, 4, rows),
            output: Array::new(&args.output, bytes, rows),
            output_lse: args.output_lse.map_or(Array::NONE, |view| Array::new(&view, 4, rows)),
            table: 0,
            // The stride of one rank is unused and may be anything.
            lse_rank_stride: if args.world > 1 { args.lse_rank_stride.wrapping_mul(4) } else { 0 },
            max_tokens: tokens,
            world: args.world,
            rank: args.rank,
            num_heads: args.num_heads,
            row_units,
            dtype: code(spec.dtype),
            log2_base: log2_of(args.lse_base),
            per_ln,
            by_row_units: Divisor::new(row_units),
            by_num_heads: Divisor::new(args.num_heads.max(1)),
        };
        let output_lse = args.output_lse.unwrap_or(args.lses);
        let buffers = [args.out.buffer, args.lses.buffer, args.output.buffer, output_lse.buffer];
        Ok(Layer { args: bound, buffers: buffers.map(Buffer::clone) })
    }

    /// The grid covers the smaller capacity of step and binding: a captured launch takes what the step's table holds at the replay.
    fn kernel_record(
        &self,
        spec: &CorrectAttnOut,
        kernel: &Function,
        (): &mut (),
        step: &TokenTable,
        layer: &Layer,
    ) -> Result<()> {
        // Every address is in its buffer, for every pair of step and binding and whatever the table holds: the kernel takes tokens below the
        // binding's max_tokens only, quotients and rests by row_units and num_heads are heads and units of the rows, ranks are below
        // world; `check_args` found where the last rank's rows end.
        let max_tokens = step.max_tokens().min(layer.args.max_tokens);
        let items = items(spec, max_tokens, layer.args.num_heads)?;
        let args = CorrectParams { table: step.ptr(), ..layer.args };
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

/// Units of the output of a number of tokens.
fn items(spec: &CorrectAttnOut, tokens: u32, heads: u32) -> Result<u32> {
    let items = u64::from(tokens) * u64::from(heads);
    let cure = "correct the output of fewer tokens a call";
    checked_items("items of correct_attn_out", items.saturating_mul(row_units(spec.head_size).into()), cure)
}
