//! What a layer asks of CUDA.

use std::sync::Mutex;

use super::Cuda;
use super::turn::Taken;
use crate::ops::composes::{Composes, PrefixCost};

/// Tensor cores, fitted to measurements on an H100 (benches/results/h100-cascade-2026-11-25.md). `wgmma` multiplies 64 rows in the time
/// of 36.
pub(crate) const TENSOR_CORES: PrefixCost =
    PrefixCost { tile_rows: 36, read: 16, token: 60, tile_queries: 1, step: 4_000_000, step_row: 400 };

impl Composes for Cuda {
    type Turn<'a> = Taken<'a>;

    /// The guard is the stream's, so that it covers captured graphs of the layer too.
    fn turn<'a>(&'a self, _: &'a Mutex<()>) -> Taken<'a> {
        Cuda::turn(self)
    }

    fn prefix_cost(on_tensor_cores: bool, tile_queries: u32) -> PrefixCost {
        if on_tensor_cores { TENSOR_CORES } else { PrefixCost::ARITHMETIC }.with_tiles(tile_queries)
    }
}
