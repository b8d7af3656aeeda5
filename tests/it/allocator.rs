//! The allocator of this program: it counts each thread's allocations, and refuses one where a test asks for that.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Allocations of this thread.
    pub static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    static REFUSAL: Cell<Option<Refusal>> = const { Cell::new(None) };
}

#[derive(Clone, Copy)]
struct Refusal {
    /// Only allocations of so many bytes count.
    bytes: usize,
    /// How many of them are still to succeed.
    left: usize,
}

struct Counting;

// SAFETY: every call is passed on to the system's allocator as it is, or answered with a null pointer, which is a refusal. What else
// an allocator has calls these two.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        match REFUSAL.get() {
            Some(refusal) if layout.size() < refusal.bytes => {}
            Some(Refusal { left: 0, .. }) => {
                REFUSAL.set(None);
                return std::ptr::null_mut();
            }
            Some(Refusal { bytes, left }) => REFUSAL.set(Some(Refusal { bytes, left: left - 1 })),
            None => {}
        }
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Calls `call` while this thread's allocation number `n` of at least so many bytes is refused; says whether there was one. Where the
/// code does not expect a refusal the program aborts: a test of arrays that may be large finds such code.
pub fn refusing<T>(bytes: usize, n: usize, call: impl FnOnce() -> T) -> (T, bool) {
    REFUSAL.set(Some(Refusal { bytes, left: n }));
    let result = call();
    (result, REFUSAL.take().is_none())
}
