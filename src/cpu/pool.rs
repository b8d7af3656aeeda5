//! A pool of waiting threads. A call runs its job on them and on its own thread, and returns when all are done.
//!
//! A thread that waits spins for a moment before it sleeps: waking one takes as long as a small job, and a decode is two jobs.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Threads beside the caller's.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Held by the call that uses the threads.
    turn: Mutex<()>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Counts jobs, so that a thread takes each once. Changed with the state locked, as is `running`.
    number: AtomicUsize,
    running: AtomicUsize,
    wake: Condvar,
    idle: Condvar,
}

#[derive(Default)]
struct State {
    job: Option<Job>,
    panic: Option<Box<dyn std::any::Any + Send>>,
    quit: bool,
}

/// A closure of a caller that waits, so it outlives every use.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn(usize) + Sync));
// SAFETY: the closure is Sync, and the pointer is followed only while `Pool::broadcast` keeps it alive.
unsafe impl Send for Job {}

/// The most spins before a thread sleeps: 10 to 40 us.
const LOOKS: usize = 1000;

fn look_for(come: impl Fn() -> bool) {
    for _ in 0..LOOKS {
        if come() {
            return;
        }
        std::hint::spin_loop();
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// A pool in which up to `threads` run, the caller's included; fewer where the system has no more to give.
    pub(super) fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared::default());
        let spawn = |index: usize| {
            let shared = Arc::clone(&shared);
            let name = format!("mla-cpu-{index}");
            std::thread::Builder::new().name(name).spawn(move || work(&shared, index)).ok()
        };
        let threads = (1..threads).map_while(spawn).collect();
        Self { shared, threads, turn: Mutex::new(()) }
    }

    /// Threads that run, the caller's included.
    pub(super) fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `each(thread, unit)` for every unit below `units`, on whichever thread is free.
    pub(super) fn for_each(&self, units: usize, each: impl Fn(usize, usize) + Sync) {
        let next = AtomicUsize::new(0);
        let run = |thread: usize| {
            loop {
                let unit = next.fetch_add(1, Ordering::Relaxed);
                if unit >= units {
                    return;
                }
                each(thread, unit);
            }
        };
        if units < 2 || self.threads.is_empty() { run(0) } else { self.broadcast(&run) }
    }

    fn broadcast(&self, run: &(dyn Fn(usize) + Sync)) {
        let _turn = locked(&self.turn);
        // SAFETY: only the lifetime changes. `Recall` takes the job back and waits for the threads that have begun
        // it before this function returns or unwinds.
        let job = Job(unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync + 'static)>(
                std::ptr::from_ref(run),
            )
        });
        {
            let mut state = locked(&self.shared.state);
            state.job = Some(job);
            self.shared.number.fetch_add(1, Ordering::Relaxed);
        }
        self.shared.wake.notify_all();
        let recall = Recall(&self.shared);
        let own = catch_unwind(AssertUnwindSafe(|| run(0)));
        drop(recall);
        // Taken whether or not this thread panicked too: it would surface in the next call.
        let other = locked(&self.shared.state).panic.take();
        if let Some(panic) = own.err().or(other) {
            resume_unwind(panic);
        }
    }
}

/// Ends a job: threads that have not begun it never will, and those that have are waited for.
struct Recall<'a>(&'a Shared);

impl Drop for Recall<'_> {
    fn drop(&mut self) {
        locked(&self.0.state).job = None;
        let running = || self.0.running.load(Ordering::Relaxed);
        look_for(|| running() == 0);
        let mut state = locked(&self.0.state);
        while running() > 0 {
            state = self.0.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        locked(&self.shared.state).quit = true;
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn work(shared: &Shared, index: usize) {
    let mut seen = 0;
    let number = || shared.number.load(Ordering::Relaxed);
    let mut state = locked(&shared.state);
    while !state.quit {
        match state.job {
            Some(job) if number() != seen => {
                seen = number();
                shared.running.fetch_add(1, Ordering::Relaxed);
                drop(state);
                // SAFETY: `running` was raised under the lock that `Recall` takes, so the caller waits for us.
                let run = unsafe { &*job.0 };
                let done = catch_unwind(AssertUnwindSafe(|| run(index)));
                state = locked(&shared.state);
                if let Err(panic) = done {
                    state.panic.get_or_insert(panic);
                }
                if shared.running.fetch_sub(1, Ordering::Relaxed) == 1 {
                    shared.idle.notify_all();
                }
            }
            _ => {
                // Where its job is gone already, it counts as seen.
                seen = number();
                drop(state);
                look_for(|| number() != seen);
                state = locked(&shared.state);
                if number() == seen && !state.quit {
                    state = shared.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn every_unit_runs_once_whatever_the_threads() {
        for threads in 1..5 {
            let pool = Pool::new(threads);
            for units in [0, 1, 2, 1000] {
                let counts: Vec<AtomicUsize> = (0..units).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each(units, |thread, unit| {
                    assert!(thread < pool.threads());
                    counts[unit].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3);
        let caught = catch_unwind(AssertUnwindSafe(|| pool.for_each(50, |_, unit| assert_ne!(unit, 20))));
        assert!(caught.is_err());
        let sum = AtomicUsize::new(0);
        pool.for_each(10, |_, unit| {
            sum.fetch_add(unit, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45);
    }

    #[test]
    fn of_panics_at_once_one_reaches_the_caller_and_none_the_next_call() {
        let pool = Pool::new(2);
        for _ in 0..20 {
            // Both threads are in a unit before either panics.
            let both = Barrier::new(2);
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.for_each(2, |thread, _| {
                    both.wait();
                    panic!("on thread {thread}");
                });
            }));
            let text = caught.err().and_then(|panic| panic.downcast_ref::<String>().cloned());
            assert_eq!(text.as_deref(), Some("on thread 0"), "the caller's own first");
            pool.for_each(4, |_, _| {});
        }
    }
}
