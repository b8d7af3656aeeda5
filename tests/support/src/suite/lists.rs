//! Lists of slots in a backend's buffers.

use wgpu_mla::{Backend, Device, Indices, Result};

use super::memory::{Strides, download, upload};
use super::run::{How, Layout};
use crate::paint::Lists;

/// Words that stand around lists: no slots of any pool, and slot 0, which holds poison where lists were drawn.
const AROUND: [i32; 4] = [0, i32::MIN, 2_147_480_000, 0];

/// The lists of a problem and their lengths, with an offset and gaps where the other arrays have them.
pub struct ListArrays<B: Device> {
    slots: (B::Buffer, Strides, Vec<u8>),
    lengths: Option<(B::Buffer, Strides, Vec<u8>)>,
}

impl<B: Backend> ListArrays<B> {
    /// # Errors
    /// The errors of the backend.
    pub fn new(backend: &B, lists: &Lists, how: &How) -> Result<Self> {
        let (topk, spare) = (lists.topk, how.spare_entries as usize);
        let tokens = lists.slots.len() / topk.max(1);
        let (slots_at, lengths_at) = match how.layout {
            Layout::Dense => (strides(0, topk + spare), strides(0, 1)),
            Layout::Gaps | Layout::HeadMajor => (strides(5, topk + spare + 3), strides(3, 2)),
        };
        let array = |words: &[i32], dim: usize, at: Strides, len: usize| {
            let mut spread: Vec<i32> = (0..len).map(|i| AROUND[i % AROUND.len()]).collect();
            for token in 0..tokens {
                spread[at.offset + token * at.token..][..dim].copy_from_slice(&words[token * dim..][..dim]);
            }
            let bytes: Vec<u8> = spread.iter().flat_map(|word| word.to_le_bytes()).collect();
            upload(backend, &bytes).map(|buffer| (buffer, at, bytes))
        };
        let slots = array(&lists.slots, topk, slots_at, slots_at.end([tokens, 1, topk + spare]))?;
        let lengths = lists.topk_length.as_ref();
        let lengths = lengths.map(|all| array(all, 1, lengths_at, lengths_at.end([tokens, 1, 1])));
        Ok(Self { slots, lengths: lengths.transpose()? })
    }

    /// Writes other lists, of the same `topk` and with lengths as before.
    ///
    /// # Errors
    /// The errors of the backend.
    pub fn replace(&self, backend: &B, lists: &Lists) -> Result<()> {
        let write = |(buffer, at, before): &(B::Buffer, Strides, Vec<u8>), words: &[i32], dim: usize| {
            let mut bytes = before.clone();
            for (token, words) in words.chunks(dim).enumerate() {
                let to = (at.offset + token * at.token) * 4;
                let words: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                bytes[to..][..words.len()].copy_from_slice(&words);
            }
            backend.upload(buffer, 0, &bytes)
        };
        write(&self.slots, &lists.slots, lists.topk)?;
        match (&self.lengths, &lists.topk_length) {
            (Some(array), Some(lengths)) => write(array, lengths, 1),
            _ => Ok(()),
        }
    }

    /// The lists, as a decode takes them.
    pub fn view(&self) -> Indices<&B::Buffer> {
        let lengths = self.lengths.as_ref();
        Indices {
            slots: self.slots.1.view(&self.slots.0),
            topk_length: lengths.map(|(buffer, at, _)| at.view(buffer)),
        }
    }

    /// # Errors
    /// Names the array that a decode wrote.
    pub fn unwritten(&self, backend: &B) -> Result<(), String> {
        let arrays = [("indices", Some(&self.slots)), ("topk_length", self.lengths.as_ref())];
        for (name, array) in arrays {
            let Some((buffer, _, before)) = array else { continue };
            let after = download(backend, buffer, before.len()).map_err(|error| error.to_string())?;
            if after[..before.len()] != before[..] {
                return Err(format!("{name} was written"));
            }
        }
        Ok(())
    }
}

fn strides(offset: usize, token: usize) -> Strides {
    Strides { offset, token, head: 1 }
}
