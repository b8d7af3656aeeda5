//! The state of a step, shared with the CUDA graphs that were captured of it: before each replay a graph compares it with the state at
//! capture.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use super::Op;
use super::replay::Replay;
use crate::base::error::{Error, Result};

pub(super) const fn mismatch(detail: &'static str) -> Error {
    Error::LayoutMismatch { detail }
}

pub(super) const UNPREPARED: &str =
    "the step was not prepared, or its last prepare failed: call `prepare` first";

/// How far a step reaches and what it has room for: one value that the step and its graphs share.
#[derive(Debug)]
pub(crate) struct SharedState<O: Op>(Arc<Mutex<State<O::Extent, O::Capacity>>>);

#[derive(Debug, Clone, Copy)]
struct State<E, C> {
    /// `None` until it was prepared, and after a prepare that failed.
    used: Option<E>,
    capacity: C,
    /// The value of [`super::Kernel::recording_key`].
    form: u64,
}

impl<O: Op> SharedState<O> {
    pub(crate) fn new(used: Option<O::Extent>, capacity: O::Capacity, form: u64) -> Self {
        Self(Arc::new(Mutex::new(State { used, capacity, form })))
    }

    pub(crate) fn set(&self, used: Option<O::Extent>, capacity: O::Capacity, form: u64) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = State { used, capacity, form };
    }

    fn get(&self) -> State<O::Extent, O::Capacity> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a graph keeps of the step as it is captured now, with a binding that has room for `room`.
    pub(crate) fn recorded(&self, room: O::Extent) -> Box<dyn Replay> {
        Box::new(Recorded::<O> { now: Self(self.0.clone()), then: self.get(), room })
    }
}

/// A step and the room of a binding, as they were at capture.
struct Recorded<O: Op> {
    now: SharedState<O>,
    then: State<O::Extent, O::Capacity>,
    room: O::Extent,
}

impl<O: Op> Replay for Recorded<O> {
    fn check(&self) -> Result<()> {
        let (now, then) = (self.now.get(), &self.then);
        let used = now.used.ok_or(mismatch(UNPREPARED))?;
        if (now.capacity, now.form) != (then.capacity, then.form) {
            return Err(mismatch(
                "a step of the graph was prepared with what the captured kernels do not serve (its `capacity` or, of a layer, its \
                 `generation` has changed): capture the graph again",
            ));
        }
        O::fits(used, self.room).map_err(mismatch)
    }

    fn is(&self, other: &dyn Any) -> bool {
        other.downcast_ref::<Self>().is_some_and(|other| {
            Arc::ptr_eq(&self.now.0, &other.now.0)
                && (self.then.capacity, self.then.form, self.room)
                    == (other.then.capacity, other.then.form, other.room)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::KvAppend;

    #[test]
    fn a_replay_needs_a_step_that_is_prepared_and_fits_what_was_captured() {
        let now = SharedState::<KvAppend>::new(Some(0), 16, 0);
        let [graph, again, wider] = [4, 4, 8].map(|room| now.recorded(room));
        assert!(graph.is(&*again) && !graph.is(&*wider));
        assert!(!graph.is(&*SharedState::<KvAppend>::new(Some(0), 16, 0).recorded(4)), "another step");
        let refused = |why: &str| {
            let error = graph.check().expect_err("refused");
            assert!(error.to_string().contains(why), "{error}");
        };
        for (used, capacity, form, why) in [
            (Some(4), 16, 0, None),
            (Some(5), 16, 0, Some("than the binding")),
            (Some(4), 32, 0, Some("capture the graph again")),
            (Some(4), 16, 1, Some("capture the graph again")),
            (None, 16, 0, Some("its last prepare failed")),
            (Some(1), 16, 0, None),
        ] {
            now.set(used, capacity, form);
            match why {
                Some(why) => refused(why),
                None => assert_eq!(graph.check(), Ok(())),
            }
        }
    }
}
