//! The check that a captured CUDA graph makes before each replay: whether the steps in it still are what its kernels were captured for.

use std::any::Any;

use crate::base::error::Result;

/// What a captured graph holds of one step, to check before each replay.
pub trait Replay: Any + Send {
    /// # Errors
    /// [`crate::Error::LayoutMismatch`] where the graph would give wrong results.
    fn check(&self) -> Result<()>;

    /// Whether `other` checks the same step for the same binding, so that a graph keeps one of them.
    fn is(&self, other: &dyn Any) -> bool;
}
