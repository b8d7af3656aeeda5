//! The targets, a module each.

mod ops;

use crate::Target;

/// All targets, in the order in which they run.
pub const TARGETS: &[Target] = &[ops::ON_CPU, ops::ON_GPU];
