//! What a step uploads stays as it was recorded.
//!
//! `Queue::write_buffer` takes effect before all commands of the next submit, whatever was recorded first. So a prepare never writes
//! what commands were recorded with: it takes the next region of the step's buffers, which are bound with dynamic offsets, and makes
//! new buffers where all regions were recorded. Commands keep the old ones alive.

use std::sync::atomic::{AtomicBool, Ordering};

/// Regions of a buffer: new buffers and a bind group cost microseconds, which so many prepares share.
pub(super) const REGIONS: u32 = 8;

/// Which region holds what was prepared last.
#[derive(Debug)]
pub(super) struct Ring {
    regions: u32,
    current: u32,
    /// Whether commands were recorded with it.
    recorded: AtomicBool,
}

impl Ring {
    pub(super) fn new(regions: u32) -> Self {
        Self { regions, current: 0, recorded: AtomicBool::new(false) }
    }

    /// To what may be written: the same region if nothing was recorded with it, else the next. False where there is none.
    pub(super) fn turn(&mut self) -> bool {
        if std::mem::take(self.recorded.get_mut()) {
            self.current += 1;
        }
        self.current < self.regions
    }

    pub(super) fn current(&self) -> u32 {
        self.current
    }

    /// The region, for commands that are recorded now.
    pub(super) fn record(&self) -> u32 {
        self.recorded.store(true, Ordering::Relaxed);
        self.current
    }
}

#[cfg(test)]
mod tests {
    use super::Ring;

    #[test]
    fn a_region_that_was_recorded_is_not_written_again() {
        let mut ring = Ring::new(2);
        assert!(ring.turn() && ring.turn() && ring.current() == 0);
        assert_eq!(ring.record(), 0);
        assert!(ring.turn() && ring.turn() && ring.current() == 1);
        assert_eq!((ring.record(), ring.record()), (1, 1));
        assert!(!ring.turn() && !ring.turn());
    }
}
