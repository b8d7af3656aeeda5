//! `merge_states`: any number of partial attention results into one.

use std::ops::Range;

use cudarc::driver::DeviceRepr;

use super::array::Array;
use super::range::TokenTable;
use super::{Divisor, THREADS, checked_items, code};
use crate::Result;
use crate::cuda::{Buffer, Cuda, Function};
use crate::ops::variants::only;
use crate::ops::{Choice, Kernel, MergeStates, MergeStatesArgs, MergeStatesExtent, OpOptions};

pub(super) const ENTRY: &str = "merge_states";

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
    head_quads: u32,
    dtype: u32,
    reserved: u32,
    by_head_quads: Divisor,
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

    fn kernel_compile(&self, _: &MergeStates, options: &OpOptions) -> Result<(Function, (), Choice)> {
        Ok((self.kernel(ENTRY)?, (), only(options)?))
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
        let (rows, head_quads, bytes) =
            ([room.tokens, args.num_heads], spec.head_size / 4, spec.dtype.bytes());
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
            head_quads,
            dtype: code(spec.dtype),
            reserved: 0,
            by_head_quads: Divisor::new(head_quads),
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
        // binding's max_tokens only, quotients and rests by head_quads and num_heads are heads and quads of the rows, and sets are below
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

/// Quads (4 consecutive elements) of the output of a number of tokens.
fn items(spec: &MergeStates, tokens: u32, heads: u32) -> Result<u32> {
    let items = u64::from(tokens) * u64::from(heads);
    let cure = "merge the states of fewer tokens a call";
    checked_items("items of a merge", items.saturating_mul((spec.head_size / 4).into()), cure)
}
