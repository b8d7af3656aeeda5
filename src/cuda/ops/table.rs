//! A table of words that changes with every step: rewritten in place, grown where it is too small.

use crate::Result;
use crate::cuda::{Buffer, Cuda};

/// Word 0 is a count, which kernels read, the rest is the op's.
#[derive(Debug, Default)]
pub(super) struct Table {
    staged: Vec<u32>,
    buffer: Option<Buffer>,
    /// Words that fit behind the count.
    room: u64,
}

impl Table {
    /// With a count of 0.
    pub(super) fn new(cuda: &Cuda, room: u64) -> Result<Self> {
        let buffer = if room == 0 { None } else { Some(Buffer::zeroed(cuda, (room + 1) * 4)?) };
        Ok(Self { staged: Vec::new(), buffer, room })
    }

    /// Words that fit behind the count.
    pub(super) fn room(&self) -> u64 {
        self.room
    }

    /// Where it is, if it has room for anything.
    pub(super) fn ptr(&self) -> Option<u64> {
        self.buffer.as_ref().map(Buffer::ptr)
    }

    /// Writes `count` and `words` in the stream's order: what was launched before still reads the old ones. Makes a new buffer only
    /// where they do not fit, with room to grow.
    pub(super) fn upload(
        &mut self,
        cuda: &Cuda,
        count: u32,
        words: impl IntoIterator<Item = u32>,
    ) -> Result<()> {
        self.staged.clear();
        self.staged.push(count);
        self.staged.extend(words);
        let need = self.staged.len() as u64 - 1;
        if need > self.room {
            let grown = Self::new(cuda, need.next_power_of_two().max(16))?;
            (self.buffer, self.room) = (grown.buffer, grown.room);
        }
        match &self.buffer {
            Some(buffer) => buffer.upload(cuda, 0, bytemuck::cast_slice(&self.staged)),
            None => Ok(()),
        }
    }
}
