//! `merge_states`: any number of partial attention results into one.

use std::ops::Range;

use cudarc::driver::DeviceRepr;

use super::array::Array;
use super::range::TokenTable;
use super::{Divisor, THREADS, checked_items, code};
use crate::Result;
use crate::cuda::{Buffer, Cuda, Function};
use crate::ops::is_wide;
use crate::ops::variants::only;
use crate::ops::{Choice, Kernel, LseBase, MergeStates, MergeStatesArgs, MergeStatesExtent, OpOptions};

/// The entries for rows of a multiple of 8 elements, and for others.
pub(super) const ENTRIES: [&str; 2] = ["merge_states", "merge_states_elements"];

/// `Args` of merge_states.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
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

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for MergeStatesParams {}

/// One layer's sets, held.
#[derive(Debug)]
pub struct Layer {
    args: MergeStatesParams,
    buffers: [Buffer; 4],
}

impl Kernel<MergeStates> for Cuda {
    type Kernels = Function;
    type Step = TokenTable;
    type Binding = Layer;

    fn kernel_compile(&self, spec: &MergeStates, options: &OpOptions) -> Result<(Function, (), Choice)> {
        let [wide, elements] = ENTRIES;
        let entry = if is_wide(spec.head_size) { wide } else { elements };
        Ok((self.kernel(entry)?, (), only(options)?))
    }

    fn kernel_step(&self, _: &MergeStates, _: &Function, max_tokens: u32) -> Result<TokenTable> {
        TokenTable::new(self, max_tokens)
    }

    fn kernel_capacity(step: &TokenTable) -> u32 {
        step.max_tokens()
    }

    fn kernel_prepare(
        &self,
        spec: &MergeStates,
        _: &Function,
        step: &mut TokenTable,
        (tokens, num_sets): (Range<u32>, u32),
    ) -> Result<MergeStatesExtent> {
        let extent = spec.extent(&tokens, num_sets)?;
        step.upload_with(self, &tokens, Some(num_sets))?;
        Ok(extent)
    }

    fn kernel_bind(
        &self,
        spec: &MergeStates,
        _: &Function,
        args: &MergeStatesArgs<&Buffer>,
        room: MergeStatesExtent,
    ) -> Result<Layer> {
        items(spec, room.tokens, args.num_heads)?;
        let (rows, row_units, bytes) =
            ([room.tokens, args.num_heads], row_units(spec.head_size), spec.dtype.bytes());
        let [_, per_ln] = args.lse_base.ln();
        // The stride of one set is unused and may be anything, as may that of no token.
        let sets = |stride: u64, bytes: u64| if room.sets > 1 { stride.wrapping_mul(bytes) } else { 0 };
        let bound = MergeStatesParams {
            states: Array::new(&args.states, bytes, rows),
            lse: Array::new(&args.lse, 4, rows),
            output: Array::new(&args.output, bytes, rows),
            output_lse: args.output_lse.map_or(Array::NONE, |view| Array::new(&view, 4, rows)),
            table: 0,
            set_stride: sets(args.set_stride, bytes as u64),
            lse_set_stride: sets(args.lse_set_stride, 4),
            max_tokens: room.tokens,
            max_sets: room.sets,
            num_heads: args.num_heads,
            row_units,
            dtype: code(spec.dtype),
            log2_base: log2_of(args.lse_base),
            per_ln,
            output_scale: args.output_scale,
            by_row_units: Divisor::new(row_units),
            by_num_heads: Divisor::new(args.num_heads.max(1)),
        };
        let output_lse = args.output_lse.unwrap_or(args.lse);
        let buffers = [args.states.buffer, args.lse.buffer, args.output.buffer, output_lse.buffer];
        Ok(Layer { args: bound, buffers: buffers.map(Buffer::clone) })
    }

    /// The grid covers the smaller capacity of step and binding: a captured launch merges what the step's table holds at the replay.
    fn kernel_record(
        &self,
        spec: &MergeStates,
        kernel: &Function,
        (): &mut (),
        step: &TokenTable,
        layer: &Layer,
    ) -> Result<()> {
        // Every address is in its buffer, for every pair of step and binding and whatever the table holds: the kernel takes tokens below the
        // binding's max_tokens only, quotients and rests by row_units and num_heads are heads and units of the rows, and sets are below
        // max_sets by `min`; `check_args` found where the last set's rows end.
        let max_tokens = step.max_tokens().min(layer.args.max_tokens);
        let items = items(spec, max_tokens, layer.args.num_heads)?;
        let args = MergeStatesParams { table: step.ptr(), ..layer.args };
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

/// What a thread takes of a row: quads (4 consecutive elements), or elements where a row is no multiple of 8.
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
