//! How kernels count what rounding loses.

use super::single::kernel_args;
use crate::cuda::Buffer;
use crate::ops::GuardView;
use crate::ops::guard::GuardBounds;

kernel_args! {
    /// `Guard` of guard.cuh.
    pub struct Guard {
        row: u64,
        flushed: u32,
        top: u32,
    }
}

impl Guard {
    /// An address of 0 says that nothing is counted.
    pub(super) fn new(guard: Option<&GuardView<&Buffer>>, bounds: GuardBounds) -> Self {
        let row = guard.map_or(0, |guard| guard.counters.ptr().wrapping_add(guard.bytes(1).start));
        Self { row, flushed: bounds.flushed, top: bounds.top }
    }
}
