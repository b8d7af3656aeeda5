//! What a captured graph keeps: the memory that its launches use, and the steps that it must check before a replay.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::buffer::Buffer;
use crate::base::error::{Error, Result};
use crate::ops::Replay;

/// What a graph keeps of its capture.
#[derive(Default)]
pub(super) struct Held {
    /// The memory that its launches name.
    pub(super) buffers: Vec<Buffer>,
    /// The check of each step, made before a replay.
    pub(super) replays: Vec<Box<dyn Replay>>,
}

/// What is kept for the graph of a capture, while there is one.
#[derive(Clone, Default)]
pub(super) struct Captures(Arc<Mutex<Option<Held>>>);

impl Captures {
    /// Keeps these for the graph, if there is to be one.
    pub(super) fn hold<'a>(&self, buffers: impl IntoIterator<Item = &'a Buffer>) {
        if let Some(Held { buffers: held, .. }) = &mut *self.lock() {
            for buffer in buffers {
                if !held.iter().any(|other| other.shares_owner(buffer)) {
                    held.push(buffer.clone());
                }
            }
        }
    }

    /// Keeps a check for the graph, if there is to be one: once, though each layer of a model has the same.
    pub(super) fn note(&self, recorded: impl FnOnce() -> Box<dyn Replay>) {
        if let Some(Held { replays, .. }) = &mut *self.lock() {
            let recorded = recorded();
            if !replays.iter().any(|other| other.is(&*recorded)) {
                replays.push(recorded);
            }
        }
    }

    #[cfg(feature = "nccl")]
    pub(super) fn is_open(&self) -> bool {
        self.lock().is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Held>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Errors
    /// [`Error::LayoutMismatch`] in a capture.
    pub(super) fn begin(&self) -> Result<()> {
        let mut held = self.lock();
        if held.is_some() {
            let detail = "Cuda::capture within a capture of the same stream: end that one first";
            return Err(Error::LayoutMismatch { detail });
        }
        *held = Some(Held::default());
        Ok(())
    }

    pub(super) fn end(&self) -> Held {
        self.lock().take().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_holds_each_buffer_once_and_is_alone() {
        // SAFETY: nothing follows the addresses.
        let [a, b] = [16, 32].map(|address| unsafe { Buffer::from_raw(address, 16) });
        let captures = Captures::default();
        captures.hold([&a]);
        assert!(captures.end().buffers.is_empty(), "nothing is captured");
        captures.begin().expect("the first");
        let error = captures.begin().expect_err("a second");
        assert!(error.to_string().contains("end that one first"), "{error}");
        captures.hold([&a, &b]);
        captures.hold([&b, &a]);
        assert_eq!(captures.end().buffers.iter().map(Buffer::ptr).collect::<Vec<_>>(), [16, 32]);
        captures.begin().expect("the next");
        assert!(captures.end().buffers.is_empty());
    }
}
