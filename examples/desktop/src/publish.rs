//! What the thread that writes shows of itself.

use crate::open;
use crate::sequence::Sequence;
use crate::shown::{Phase, Shown};
use crate::writer::Writer;

impl Writer {
    /// Shows what there is.
    pub(crate) fn publish(&mut self) {
        let phase = self.phase();
        let pages =
            self.slices.as_ref().map(|slices| open::pages(slices, &self.sequences)).unwrap_or_default();
        let (sequences, speed) = (self.sequences.iter().map(Sequence::shown).collect(), self.meter.speed());
        let slice = self.pace.describe();
        self.shared.show(|shown: &mut Shown| {
            (shown.phase, shown.pages, shown.sequences, shown.speed) = (phase, pages, sequences, speed);
            if let Some(about) = &mut shown.about {
                about.slice = slice;
            }
        });
    }

    fn phase(&self) -> Phase {
        let reading = self.sequences.iter().find(|sequence| sequence.is_reading());
        match reading {
            _ if self.sequences.iter().all(|sequence| sequence.ended.is_some()) => Phase::Done,
            _ if self.is_paused => Phase::Paused,
            Some(one) => Phase::Reading { done: one.cached, all: one.given() },
            None => Phase::Writing,
        }
    }
}
