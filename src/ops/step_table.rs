//! The input of a step as the table that kernels read: the same words on wgpu and on CUDA.

use super::op::Op;
use super::variants::OpOptions;
use crate::base::error::Result;

/// An op whose step is one table of words.
pub trait TableOp: Op<Options = OpOptions, Facts = ()> {
    /// Checks a step's input and lays it out. `check` is given the table's count before any word is made: a device refuses what its
    /// kernels cannot number.
    ///
    /// # Errors
    /// The errors of the input, see the op's page, and of `check`.
    fn table(
        &self,
        input: Self::Input<'_>,
        check: impl FnOnce(u64) -> Result<()>,
    ) -> Result<StepTable<Self::Extent>>;
}

/// A step as kernels read it.
pub struct StepTable<E> {
    /// Entries of the table, its word 0: tokens, pages or copies.
    pub count: u32,
    /// The words behind the count.
    pub words: Vec<u32>,
    /// How far the step reaches.
    pub extent: E,
}
