//! The targets, a module each.

mod cases;
mod checkpoints;
mod ops;
mod plans;
mod pools;
mod state;

use crate::Target;

/// All targets, in the order in which they run.
pub const TARGETS: &[Target] = &[
    cases::TARGET,
    checkpoints::TARGET,
    plans::TARGET,
    ops::ON_CPU,
    ops::ON_GPU,
    pools::TARGET,
    state::TARGET,
];
