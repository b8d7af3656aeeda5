//! A ring of regions, so that an upload does not change what recorded commands will read.
//!
//! `Queue::write_buffer` takes effect before all commands of the next submit, even those recorded earlier. So a prepare never writes a
//! region that commands were recorded with: it takes the next region of the step's buffers, and makes new buffers where all were
//! recorded. Commands keep the old buffers alive. Each region has a bind group of its own, because on an H100 a storage buffer with a
//! dynamic offset costs each dispatch half a microsecond.

use std::sync::atomic::{AtomicBool, Ordering};

/// Regions of a buffer: the microseconds that new buffers and bind groups cost are spread over so many prepares.
pub(super) const REGIONS: u32 = 16;

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

    /// Moves to a region that may be written: the same if nothing was recorded with it, else the next. False where none is left.
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
