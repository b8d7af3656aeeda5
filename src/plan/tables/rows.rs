//! The rows of a page table, checked against a batch.

use std::ops::Range;

use super::PageTable;
use crate::base::error::{Error, Result};
use crate::base::memory::{extend, room_for};
use crate::cache::KvSpec;

/// A page table with a row for each sequence of a batch. Nothing is known of the page ids, nor whether a row holds its sequence's tokens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageRows<'a> {
    pages: PageTable<'a>,
    kv: KvSpec,
}

impl<'a> PageRows<'a> {
    /// # Errors
    /// [`Error::Length`] for a table of another number of sequences, [`Error::OtherSpec`] for one of other pages, [`Error::KvIndptr`], and
    /// [`Error::LayoutMismatch`] for lists of slots.
    pub(crate) fn new(pages: PageTable<'a>, sequences: usize, kv: &KvSpec) -> Result<Self> {
        check(pages, sequences, kv)?;
        Ok(Self { pages, kv: *kv })
    }

    /// The entries of a sequence.
    pub(crate) fn row(&self, seq: usize) -> &'a [i32] {
        match self.pages {
            PageTable::Dense { block_table, max_pages } | PageTable::Pool { block_table, max_pages, .. } => {
                &block_table[seq * max_pages as usize..][..max_pages as usize]
            }
            PageTable::Csr { kv_indptr, kv_indices } | PageTable::PoolCsr { kv_indptr, kv_indices, .. } => {
                &kv_indices[kv_indptr[seq] as usize..kv_indptr[seq + 1] as usize]
            }
            PageTable::Device | PageTable::Indices => &[],
        }
    }

    /// The pages of a sequence's first `len` tokens.
    ///
    /// # Errors
    /// [`Error::SeqLen`] where its row has no more.
    pub(crate) fn used(&self, seq: usize, len: u32) -> Result<&'a [i32]> {
        self.range(seq, 0..len)
    }

    /// The pages of some of a sequence's tokens, which begin where a page does.
    ///
    /// # Errors
    /// [`Error::SeqLen`] where its row has no more.
    pub(crate) fn range(&self, seq: usize, tokens: Range<u32>) -> Result<&'a [i32]> {
        let pages = (tokens.start / self.kv.page_size) as usize..self.kv.pages_for(tokens.end) as usize;
        self.row(seq).get(pages).ok_or_else(|| self.too_short(seq, tokens.end.into()))
    }

    /// The pages of some sequences and their tokens, which begin where a page does, as `(kv_indptr, kv_indices)`.
    ///
    /// # Errors
    /// [`Error::SeqLen`] where a row has no more, and [`Error::LayoutMismatch`] for pages of the device.
    pub(crate) fn list(
        &self,
        sequences: impl ExactSizeIterator<Item = (u32, Range<u32>)>,
    ) -> Result<(Vec<i32>, Vec<i32>)> {
        if matches!(self.pages, PageTable::Device) {
            let detail = "a layer gathers pages by a list of the host: give PageTable::Dense or Csr";
            return Err(Error::LayoutMismatch { detail });
        }
        let (what, mut indices) = ("a list of pages", Vec::new());
        let mut indptr: Vec<i32> = room_for(sequences.len() + 1, what)?;
        indptr.push(0);
        for (sequence, tokens) in sequences {
            extend(&mut indices, self.range(sequence as usize, tokens)?.iter().copied(), what)?;
            indptr.push(indices.len() as i32);
        }
        Ok((indptr, indices))
    }

    /// What is wrong where a sequence's row does not hold its `got` tokens.
    pub(crate) fn too_short(&self, seq: usize, got: i64) -> Error {
        let max = self.row(seq).len() as i64 * i64::from(self.kv.page_size);
        let cure = "its row of the block table has no more pages: append pages to it before the step, or correct seq_lens";
        Error::SeqLen { seq, got, max, cure }
    }
}

fn check(pages: PageTable<'_>, rows: usize, kv: &KvSpec) -> Result<()> {
    match pages {
        PageTable::Indices => {
            let detail =
                "PageTable::Indices has no pages: only a decode compiled with DecodeOptions::topk takes it";
            Err(Error::LayoutMismatch { detail })
        }
        PageTable::Pool { page_size, .. } | PageTable::PoolCsr { page_size, .. }
            if page_size != kv.page_size =>
        {
            let (what, got, want) = ("page_size of the block table", page_size, kv.page_size);
            Err(Error::OtherSpec { what, got, want })
        }
        PageTable::Dense { block_table, max_pages } | PageTable::Pool { block_table, max_pages, .. }
            if Some(block_table.len()) != rows.checked_mul(max_pages as usize) =>
        {
            Err(Error::Length {
                what: "block_table",
                got: block_table.len() as u64,
                want: rows.saturating_mul(max_pages as usize) as u64,
                cure: "one row of max_pages entries a sequence",
            })
        }
        PageTable::Csr { kv_indptr, .. } | PageTable::PoolCsr { kv_indptr, .. }
            if kv_indptr.len() != rows + 1 =>
        {
            Err(Error::Length {
                what: "kv_indptr",
                got: kv_indptr.len() as u64,
                want: rows as u64 + 1,
                cure: "one entry a sequence and one more for the end",
            })
        }
        PageTable::Csr { kv_indptr, kv_indices } | PageTable::PoolCsr { kv_indptr, kv_indices, .. } => {
            check_indptr(kv_indptr, kv_indices.len() as u64)
        }
        _ => Ok(()),
    }
}

/// # Errors
/// [`Error::KvIndptr`] for entries that are no ranges of `most` page ids.
fn check_indptr(kv_indptr: &[i32], most: u64) -> Result<()> {
    let mut least = 0;
    for (index, &got) in kv_indptr.iter().enumerate() {
        let got = i64::from(got);
        if got < least || got.unsigned_abs() > most {
            return Err(Error::KvIndptr { index, got, least, most });
        }
        least = got;
    }
    Ok(())
}
