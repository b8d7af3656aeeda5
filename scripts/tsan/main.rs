//! The CPU backend's pool under ThreadSanitizer: what threads of a job write plainly, the caller and the next job's threads read.

mod pool;
mod posix;

use std::cell::UnsafeCell;
use std::sync::Arc;

use pool::Pool;

struct Cells(Vec<UnsafeCell<u64>>);
// SAFETY: this is what is tested.
unsafe impl Sync for Cells {}

impl Cells {
    fn at(&self, index: usize) -> *mut u64 {
        self.0[index].get()
    }
}

fn cells() -> Cells {
    Cells((0..64).map(|_| UnsafeCell::new(0)).collect())
}

fn main() {
    let racy = std::env::args().any(|word| word == "racy");
    // All callers' jobs write these, one job after another.
    let shared: &Cells = Box::leak(Box::new(cells()));
    for threads in 2..6 {
        let pool = Arc::new(Pool::new(threads));
        // Joined one by one: the tool does not know how the end of a scope waits.
        let callers = [(); 3].map(|()| {
            let pool = pool.clone();
            std::thread::spawn(move || calls(&pool, shared, racy))
        });
        callers.into_iter().for_each(|caller| caller.join().expect("a sum that is right"));
    }
    // SAFETY: all threads are gone.
    let sum: u64 = (0..64).map(|i| unsafe { *shared.at(i) }).sum();
    println!("{sum} units ran");
    assert!(racy || sum == 4 * 3 * 200 * 128);
}

/// Two jobs a round, of which each caller sees what all threads wrote.
fn calls(pool: &Pool, shared: &Cells, racy: bool) {
    let mine = &cells();
    for round in 1..=200 {
        let add = |_: usize, unit: usize| {
            // So that one thread does not run all units before another begins.
            if unit.is_multiple_of(8) {
                std::thread::yield_now();
            }
            let at = if racy { 0 } else { unit };
            // SAFETY: a unit is one thread's, unless a race is asked for.
            unsafe { (*mine.at(at), *shared.at(at)) = (*mine.at(at) + 1, *shared.at(at) + 1) };
        };
        pool.for_each(64, add);
        // Units of other threads than before.
        pool.for_each(64, |thread, unit| add(thread, 63 - unit));
        // SAFETY: no job of this caller runs.
        let sum: u64 = (0..64).map(|i| unsafe { *mine.at(i) }).sum();
        assert!(racy || sum == round * 128, "round {round}: {sum}");
        if round % 16 == 0 {
            // The pool's threads go to sleep, so that they are woken too.
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}
