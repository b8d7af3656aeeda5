//! A table of words that changes with every step: rewritten in place, grown where it is too small.

use crate::base::error::{Error, Result};
use crate::cuda::{Buffer, Cuda};
use crate::ops::op::Device;

/// Word 0 is a count, which kernels read; the rest is the op's.
#[derive(Debug, Default)]
pub struct Table {
    staged: Vec<u32>,
    buffer: Option<Buffer>,
    /// Words that fit after the count.
    room: u64,
    /// The largest count that it has had, or was made for.
    most: u32,
    /// Positions of the tokens, as many words as `room`: made by the first step that has any. `has_positions`: whether the last step had.
    positions: Option<Buffer>,
    has_positions: bool,
}

impl Table {
    /// A table with a count of 0 and room for so many words behind it, made for counts up to `most`.
    pub(crate) fn new(cuda: &Cuda, room: u64, most: u32) -> Result<Self> {
        let buffer = if room == 0 { None } else { Some(Buffer::zeroed(cuda.stream(), (room + 1) * 4)?) };
        Ok(Self { buffer, room, most, ..Self::default() })
    }

    /// How many entries of so many words fit behind the count.
    pub(crate) fn room(&self, words: u64) -> u32 {
        u32::try_from(self.room / words).unwrap_or(u32::MAX)
    }

    /// The largest count that it has had, or was made for: grids cover it where room does not bound a count.
    pub(crate) fn most(&self) -> u32 {
        self.most
    }

    /// Its memory, if it has room for anything.
    pub(crate) fn buffer(&self) -> Option<&Buffer> {
        self.buffer.as_ref()
    }

    /// All memory that a launch with it reads.
    pub(crate) fn held(&self) -> impl Iterator<Item = &Buffer> {
        self.buffer.iter().chain(&self.positions)
    }

    /// Its address, if it has room for any entry.
    pub(crate) fn ptr(&self) -> Option<u64> {
        self.buffer.as_ref().map(Buffer::ptr)
    }

    /// Its address; 0 if it has room for nothing.
    pub(crate) fn address(&self) -> u64 {
        self.ptr().unwrap_or(0)
    }

    /// Writes the positions of a step's tokens beside it, in the stream's order; after [`Table::upload`], which makes the room.
    pub(crate) fn upload_positions(&mut self, cuda: &Cuda, positions: Option<&[i32]>) -> Result<()> {
        self.has_positions = positions.is_some();
        let Some(positions) = positions.filter(|positions| !positions.is_empty()) else { return Ok(()) };
        let buffer = match self.positions.take().filter(|buffer| buffer.bytes() >= self.room * 4) {
            Some(buffer) => buffer,
            None => Buffer::zeroed(cuda.stream(), self.room * 4)?,
        };
        cuda.upload(&buffer, 0, bytemuck::cast_slice(positions))?;
        self.positions = Some(buffer);
        Ok(())
    }

    /// Where the positions are, if the step has them.
    pub(crate) fn positions(&self) -> Option<u64> {
        self.positions.as_ref().filter(|_| self.has_positions).map(Buffer::ptr)
    }

    /// Writes `count` and `words` in the stream's order: what was launched before still reads the old ones. Makes a new buffer only
    /// where they do not fit, with room to grow.
    pub(crate) fn upload(
        &mut self,
        cuda: &Cuda,
        count: u32,
        words: impl IntoIterator<Item = u32>,
    ) -> Result<()> {
        self.staged.clear();
        self.staged.push(count);
        let words = words.into_iter();
        let out_of_memory = |_| Error::OutOfMemory { what: "a step's table" };
        self.staged.try_reserve(words.size_hint().0).map_err(out_of_memory)?;
        self.staged.extend(words);
        let need = self.staged.len() as u64 - 1;
        if need > self.room {
            let grown = Self::new(cuda, need.next_power_of_two().max(16), 0)?;
            (self.buffer, self.room) = (grown.buffer, grown.room);
        }
        if let Some(buffer) = &self.buffer {
            cuda.upload(buffer, 0, bytemuck::cast_slice(&self.staged))?;
        }
        self.most = self.most.max(count);
        Ok(())
    }
}
