//! The bytes of a checkpoint's files: mapped, so that a weight is in memory once and as its file has it, or read.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::{Error, Result};

/// A file's bytes, which weights share.
#[derive(Clone)]
pub struct Bytes(Arc<Held>);

enum Held {
    #[cfg(not(target_arch = "wasm32"))]
    Mapped(memmap2::Mmap),
    Owned(Vec<u8>),
    /// Aligned to 4 bytes.
    Words(Vec<f32>),
}

impl Bytes {
    /// A regular file's bytes.
    ///
    /// # Errors
    /// [`Error::File`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |error| Error::file(path, error);
        let file = std::fs::File::open(path).map_err(failed)?;
        // SAFETY: the map is only read. A program that cuts the file off meanwhile ends this one by SIGBUS, as every reader of mapped
        // weights; one that writes into it changes weights, which are plain numbers.
        let held = match unsafe { memmap2::Mmap::map(&file) } {
            Ok(map) => Held::Mapped(map),
            // Some network drives cannot.
            Err(_) => Held::Owned(std::fs::read(path).map_err(failed)?),
        };
        Ok(Self(Arc::new(held)))
    }

    /// There are no files in a page.
    #[cfg(target_arch = "wasm32")]
    pub fn open(path: &Path) -> Result<Self> {
        Err(Error::file(path, "files are not read here; pass their contents"))
    }

    pub fn all(&self) -> &[u8] {
        match self.0.as_ref() {
            #[cfg(not(target_arch = "wasm32"))]
            Held::Mapped(map) => map,
            Held::Owned(bytes) => bytes,
            Held::Words(words) => bytemuck::cast_slice(words),
        }
    }

    /// A copy of bytes that begins at a multiple of 4 in memory, and is filled up to one.
    pub fn aligned(bytes: &[u8]) -> Self {
        let mut words = vec![0.0; bytes.len().div_ceil(4)];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        words.into()
    }

    /// Brings a part of a mapped file into memory, a page after the other.
    pub fn touch(&self, part: Range<usize>) {
        const PAGE: usize = 4096;
        let bytes = self.all().get(part).unwrap_or_default();
        std::hint::black_box(bytes.iter().step_by(PAGE).fold(0, |sum: u8, byte| sum.wrapping_add(*byte)));
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Held::Owned(bytes)))
    }
}

impl From<Vec<f32>> for Bytes {
    fn from(words: Vec<f32>) -> Self {
        Self(Arc::new(Held::Words(words)))
    }
}
