//! The targets, a module each.

mod ops;
mod plans;
mod pools;

use crate::Target;

/// All targets, in the order in which they run.
pub const TARGETS: &[Target] = &[ops::ON_CPU, ops::ON_GPU, plans::TARGET, pools::TARGET];
