//! Times.

use crate::args::Args;

/// All parts, by threads.
#[must_use]
pub fn over_threads(_: &Args) -> bool {
    false
}
