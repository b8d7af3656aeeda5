//! The lock of a stream, held by the thread that puts work on it. It is reentrant.
//!
//! An op that keeps something between its launches, such as a decode's partial results or a layer's workspace, is whole on the stream only
//! if no other thread launches the same op in between. A layer holds the lock over its decode's launches, which take it themselves.

use std::marker::PhantomData;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

/// A clone is another handle on the same lock.
#[derive(Clone, Default)]
pub(super) struct Turn(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    free: Condvar,
}

#[derive(Default)]
struct State {
    owner: Option<ThreadId>,
    /// How many times the owner has locked it.
    depth: u32,
}

/// The lock is held until this is dropped, on the same thread.
pub struct Taken<'a>(&'a Turn, PhantomData<*const ()>);

impl Turn {
    pub(super) fn take(&self) -> Taken<'_> {
        let me = std::thread::current().id();
        let mut state = self.state();
        while state.owner.is_some_and(|owner| owner != me) {
            state = self.0.free.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.owner = Some(me);
        state.depth += 1;
        Taken(self, PhantomData)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.depth -= 1;
        if state.depth == 0 {
            state.owner = None;
            self.0.0.free.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_has_it_and_may_take_it_again() {
        let (turn, held) = (Turn::default(), Mutex::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let _turn = turn.take();
                        {
                            let _nested = turn.take();
                            let alone = held.try_lock().expect("no other thread has the turn");
                            std::thread::yield_now();
                            drop(alone);
                        }
                        assert_eq!(turn.state().depth, 1);
                    }
                });
            }
        });
        assert!(turn.state().owner.is_none());
    }
}
