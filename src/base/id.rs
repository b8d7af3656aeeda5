//! Numbers that tell devices, compiled ops and pools apart.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that is given out once.
pub(crate) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
