//! What `indexer_append` and `indexer_query` have in common on CUDA: the format as kernels read it.

use super::single::kernel_args;
use crate::base::dtype::Dtype;
use crate::cuda::Buffer;
use crate::cuda::formats::code;
use crate::ops::{IndexFormat, RopeLayout};

/// `THREADS` of the kernels: small blocks spread a decode step's batch over more multiprocessors.
pub(super) const THREADS: u32 = 128;
/// Lanes of a warp, which has a row.
pub(super) const LANES: u64 = 32;
pub(super) const CURE: &str = "take fewer tokens a step, and bind a part of them for each";

kernel_args! {
    /// `IndexArgs` of index_row.cuh.
    pub struct Index {
        positions: u64,
        cos_sin: u64,
        max_position: u32,
        rope: u32,
        hadamard: u32,
        ue8m0: u32,
        input: u32,
        output: u32,
    }
}

impl Index {
    pub(super) fn new(
        format: &IndexFormat,
        input: Dtype,
        [positions, cos_sin]: [&Buffer; 2],
        max_position: u32,
    ) -> Self {
        Self {
            positions: positions.ptr(),
            cos_sin: cos_sin.ptr(),
            max_position,
            rope: match format.rope {
                None => 0,
                Some(RopeLayout::Interleaved) => 1,
                Some(RopeLayout::HalfSplit) => 2,
            },
            hadamard: format.hadamard.into(),
            ue8m0: format.ue8m0.into(),
            input: code(input),
            output: code(format.dtype),
        }
    }

    /// The same format with positions at another address.
    pub(super) fn at_positions(self, positions: u64) -> Self {
        Self { positions, ..self }
    }
}

/// The kernel of a format, by what it writes.
pub(super) fn entry(op: &str, format: &IndexFormat) -> String {
    format!("{op}_{}", if format.dtype.is_fp8() { "codes" } else { "elements" })
}
