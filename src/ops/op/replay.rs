//! What a captured graph asks before each replay.

use std::any::Any;

use crate::Result;

/// What a graph checks before each replay.
pub trait Replay: Any + Send {
    /// # Errors
    /// [`crate::Error::LayoutMismatch`] where the graph would give wrong results.
    fn check(&self) -> Result<()>;

    /// Whether `other` checks the same.
    fn is(&self, other: &dyn Any) -> bool;
}
