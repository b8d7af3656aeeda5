//! A step that is a range of tokens.

use std::ops::Range;

use super::table::Table;
use crate::Result;
use crate::cuda::{Buffer, Cuda};
use crate::view::check_tokens;

/// The range in device memory, and the most tokens that it has had, which grids cover.
#[derive(Debug)]
pub struct TokenTable {
    table: Table,
    max_tokens: u32,
}

impl TokenTable {
    /// An empty range.
    pub(super) fn new(cuda: &Cuda, max_tokens: u32) -> Result<Self> {
        Ok(Self { table: Table::new(cuda, 2)?, max_tokens })
    }

    /// Writes the range, in the stream's order, and returns how far it reaches.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] for a range that ends before it begins, [`crate::Error::Cuda`].
    pub(super) fn upload(&mut self, cuda: &Cuda, tokens: &Range<u32>) -> Result<u32> {
        self.upload_with(cuda, tokens, None)
    }

    /// As [`TokenTable::upload`], with a word after the range.
    ///
    /// # Errors
    /// Those of [`TokenTable::upload`].
    pub(super) fn upload_with(&mut self, cuda: &Cuda, tokens: &Range<u32>, word: Option<u32>) -> Result<u32> {
        let (count, end) = check_tokens(tokens)?;
        self.table.upload(cuda, count, [tokens.start].into_iter().chain(word))?;
        self.max_tokens = self.max_tokens.max(count);
        Ok(end)
    }

    /// Tokens that a launch's grid covers.
    pub(super) fn max_tokens(&self) -> u32 {
        self.max_tokens
    }

    pub(super) fn buffer(&self) -> Option<&Buffer> {
        self.table.buffer()
    }

    pub(super) fn ptr(&self) -> u64 {
        self.table.ptr().unwrap_or(0)
    }
}
