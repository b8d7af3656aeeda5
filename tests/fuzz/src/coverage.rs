//! Which code an input reached, where `instrument.sh` compiled the workspace's packages: LLVM's counters, one a branch. Elsewhere
//! there are none, and every input looks alike.

use std::sync::Mutex;

static COUNTERS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// Called before `main`, once a module, with the bounds of its counters.
///
/// # Safety
/// LLVM's code calls it with the bounds of an array of bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn __sanitizer_cov_8bit_counters_init(begin: *mut u8, end: *mut u8) {
    if begin < end {
        COUNTERS.lock().expect("no panic here").push((begin as usize, end as usize));
    }
}

/// What all inputs have reached so far.
#[derive(Debug)]
pub struct Coverage {
    counters: Vec<(usize, usize)>,
    /// A bit for each order of magnitude of each counter.
    seen: Vec<u8>,
}

impl Coverage {
    /// Nothing reached yet.
    #[must_use]
    pub fn new() -> Self {
        let mut counters = COUNTERS.lock().expect("no panic here").clone();
        counters.sort_unstable();
        counters.dedup();
        let total = counters.iter().map(|(begin, end)| end - begin).sum();
        Self { counters, seen: vec![0; total] }
    }

    /// Counters in all: 0 where nothing was instrumented.
    #[must_use]
    pub fn total(&self) -> usize {
        self.seen.len()
    }

    /// Counters that were reached.
    #[must_use]
    pub fn reached(&self) -> usize {
        self.seen.iter().filter(|&&seen| seen != 0).count()
    }

    /// The counters that ran since the last call.
    pub fn last(&mut self) -> Vec<usize> {
        self.seen.fill(0);
        self.take();
        (0..self.seen.len()).filter(|&at| self.seen[at] != 0).collect()
    }

    /// Whether the input that ran since the last call reached something new.
    pub fn take(&mut self) -> bool {
        let (mut new, mut at) = (false, 0);
        for &(begin, end) in &self.counters {
            // SAFETY: LLVM gave these bounds; other threads only add to a counter, which is a byte of its own.
            let counters = unsafe { std::slice::from_raw_parts_mut(begin as *mut u8, end - begin) };
            for (counter, seen) in counters.iter_mut().zip(&mut self.seen[at..]) {
                if *counter != 0 {
                    let magnitude = 1 << counter.ilog2();
                    new |= *seen & magnitude == 0;
                    *seen |= magnitude;
                    *counter = 0;
                }
            }
            at += end - begin;
        }
        new
    }
}

impl Default for Coverage {
    fn default() -> Self {
        Self::new()
    }
}
