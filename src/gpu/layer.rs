//! What a layer asks of wgpu.

use std::sync::Mutex;

use super::Gpu;
use crate::ops::composes::{Composes, PrefixCost};

/// Cooperative matrices, fitted to measurements on an H100 through Vulkan (benches/results/h100-unrolled-loops-2026-11-25.md).
pub(crate) const MATRICES: PrefixCost =
    PrefixCost { tile_rows: u32::MAX, read: 16, token: 30, tile_queries: 1, step: 4_000_000, step_row: 1400 };

impl Composes for Gpu {
    type Turn<'a> = ();

    fn turn(&self, _: &Mutex<()>) {}

    /// [`PrefixCost::ARITHMETIC`] fits measurements on lavapipe.
    fn prefix_cost(on_tensor_cores: bool, tile_queries: u32) -> PrefixCost {
        if on_tensor_cores { MATRICES } else { PrefixCost::ARITHMETIC }.with_tiles(tile_queries)
    }
}
