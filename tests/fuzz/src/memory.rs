//! An allocator with a limit: what asks for more gets none, as on a machine that has no more. Code that makes room by `try_reserve` gives
//! an error then; other code aborts, which is a failure of the target.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts the bytes that are in use.
pub struct Limited;

static USED: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);

/// From now on the process may have `bytes` more than now.
pub fn allow(bytes: usize) {
    LIMIT.store(USED.load(Ordering::Relaxed).saturating_add(bytes), Ordering::Relaxed);
}

/// From now on there is no limit.
pub fn allow_all() {
    LIMIT.store(usize::MAX, Ordering::Relaxed);
}

impl Limited {
    fn fits(bytes: usize) -> bool {
        let before = USED.fetch_add(bytes, Ordering::Relaxed);
        let fits = before.saturating_add(bytes) <= LIMIT.load(Ordering::Relaxed);
        if !fits {
            USED.fetch_sub(bytes, Ordering::Relaxed);
        }
        fits
    }
}

// SAFETY: every call that fits is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !Self::fits(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !Self::fits(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: as the caller promised.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        USED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(block, layout) }
    }
}
