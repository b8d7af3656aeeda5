//! `merge_states`: any number of partial attention results into one.

use cudarc::driver::DeviceRepr;

use super::place::Place;
use super::{Divisor, THREADS, checked_items};
use crate::Result;
use crate::cuda::args::code;
use crate::cuda::driver::Kernel;
use crate::cuda::{Buffer, Cuda};
use crate::ops::{MergeStatesSpec, StateSets};

pub(super) const ENTRY: &str = "merge_states";

/// `Args` of merge_states.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct MergeSetsArgs {
    states: Place,
    lse: Place,
    output: Place,
    output_lse: Place,
    set_stride: u64,
    lse_set_stride: u64,
    num_items: u32,
    num_sets: u32,
    num_heads: u32,
    head_quads: u32,
    dtype: u32,
    reserved: u32,
    by_head_quads: Divisor,
    by_num_heads: Divisor,
}

// SAFETY: plain data without padding, as the kernel has it.
unsafe impl DeviceRepr for MergeSetsArgs {}

/// Merges sets of partial attention results: see [`StateSets`].
#[derive(Debug, Clone)]
pub struct MergeStateSets {
    cuda: Cuda,
    spec: MergeStatesSpec,
    kernel: Kernel,
}

/// The arrays of one merge, checked and held.
#[derive(Debug, Clone)]
pub struct MergeSetsBinding {
    kernel: Kernel,
    /// `None` where there is nothing to merge.
    args: Option<MergeSetsArgs>,
    _buffers: [Buffer; 4],
}

impl MergeStateSets {
    /// Loads the merge of a spec.
    ///
    /// # Errors
    /// Those of [`MergeStatesSpec::check`], and [`crate::Error::Cuda`].
    pub fn new(cuda: &Cuda, spec: MergeStatesSpec) -> Result<Self> {
        spec.check()?;
        Ok(Self { cuda: cuda.clone(), spec, kernel: cuda.kernel(ENTRY)? })
    }

    /// What this merge was made for.
    pub fn spec(&self) -> &MergeStatesSpec {
        &self.spec
    }

    /// Checks and binds the arrays of a merge of all `num_tokens` and `num_sets`.
    ///
    /// # Errors
    /// [`crate::Error::Shape`], [`crate::Error::Alignment`], [`crate::Error::BufferTooSmall`], [`crate::Error::Aliased`],
    /// [`crate::Error::Limit`].
    pub fn bind(&self, args: &StateSets<&Buffer>) -> Result<MergeSetsBinding> {
        let spec = &self.spec;
        args.check(spec, Buffer::bytes)?;
        args.check_aliases(Buffer::same_as)?;
        let (rows, head_quads) = ([args.num_tokens, args.num_heads], spec.head_size / 4);
        let items = u64::from(args.num_tokens) * u64::from(args.num_heads);
        let num_items = checked_items(
            "items of a merge",
            items.saturating_mul(head_quads.into()),
            "merge the states of fewer tokens a call",
        )?;
        let output_lse = args.output_lse.unwrap_or(args.lse);
        // The stride of one set is unused and may be anything.
        let sets = |stride: u64, bytes: u64| if args.num_sets > 1 { stride * bytes } else { 0 };
        let bytes = spec.dtype.bytes();
        let bound = (num_items > 0).then(|| MergeSetsArgs {
            states: Place::new(&args.states, bytes, rows),
            lse: Place::new(&args.lse, 4, rows),
            output: Place::new(&args.output, bytes, rows),
            output_lse: args.output_lse.map_or(Place::NONE, |view| Place::new(&view, 4, rows)),
            set_stride: sets(args.set_stride, bytes as u64),
            lse_set_stride: sets(args.lse_set_stride, 4),
            num_items,
            num_sets: args.num_sets,
            num_heads: args.num_heads,
            head_quads,
            dtype: code(spec.dtype),
            reserved: 0,
            by_head_quads: Divisor::new(head_quads),
            by_num_heads: Divisor::new(args.num_heads),
        });
        let buffers = [args.states.buffer, args.lse.buffer, args.output.buffer, output_lse.buffer];
        Ok(MergeSetsBinding {
            kernel: self.kernel.clone(),
            args: bound,
            _buffers: buffers.map(Buffer::clone),
        })
    }

    /// Launches a merge on the stream. Allocates nothing, waits for nothing, and may be captured in a graph.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn record(&self, binding: &MergeSetsBinding) -> Result<()> {
        let Some(args) = &binding.args else { return Ok(()) };
        // Every place is in its buffer: the kernel takes items below num_items only, whose quotients and rests by head_quads and num_heads
        // are tokens, heads and quads of the rows, and sets below num_sets; `bind` checked where the last set's rows end.
        self.cuda.launch(&binding.kernel, args.num_items.div_ceil(THREADS), THREADS, 0, args)
    }
}
