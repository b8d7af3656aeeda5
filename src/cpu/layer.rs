//! What a layer asks of the CPU.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Cpu;
use crate::ops::composes::{Composes, PrefixCost};

impl Composes for Cpu {
    type Turn<'a> = MutexGuard<'a, ()>;

    fn turn<'a>(&'a self, of_layer: &'a Mutex<()>) -> MutexGuard<'a, ()> {
        of_layer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It multiplies no missing rows of a tile.
    fn prefix_cost(_: bool, _: u32) -> PrefixCost {
        PrefixCost::ARITHMETIC
    }
}
