//! A pool's sequences as the arrays that kernels take.

use std::ops::Range;

use super::{PagePool, SeqId, Sequence};
use crate::base::error::{Error, Result};
use crate::plan::SlabTable;
use crate::plan::tables::PageTable;

/// `block_table` of a batch, i32 `[batch, max_pages]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockTable {
    /// The entries, row by row.
    pub entries: Vec<i32>,
    /// Entries in a row: pages of the longest sequence.
    pub max_pages: u32,
    /// Tokens per page of the pool.
    pub page_size: u32,
    /// Pages of a slab of the pool.
    pub slab_pages: u32,
}

impl BlockTable {
    /// The table as [`crate::Batch::slabs`] takes it.
    #[must_use]
    pub fn slab_table(&self) -> SlabTable<'_> {
        SlabTable { pages: self.page_table(), slab_pages: self.slab_pages }
    }

    /// The table as `prepare` takes it.
    #[must_use]
    pub fn page_table(&self) -> PageTable<'_> {
        let Self { entries, max_pages, page_size, .. } = self;
        PageTable::Pool { block_table: entries, max_pages: *max_pages, page_size: *page_size }
    }
}

/// The pages of a batch as compressed rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Csr {
    /// Where each sequence's pages begin in `kv_indices`; one entry more than sequences.
    pub kv_indptr: Vec<i32>,
    /// Page ids.
    pub kv_indices: Vec<i32>,
    /// Tokens in each sequence's last page: 1 to `page_size`, or 0 for an empty sequence.
    pub kv_last_page_len: Vec<i32>,
    /// Tokens per page of the pool.
    pub page_size: u32,
}

impl Csr {
    /// The rows as `prepare` takes them.
    #[must_use]
    pub fn page_table(&self) -> PageTable<'_> {
        let Self { kv_indptr, kv_indices, page_size, .. } = self;
        PageTable::PoolCsr { kv_indptr, kv_indices, page_size: *page_size }
    }
}

/// More new tokens than a step appends: rows of 288 elements of e4m3, the shortest, are 19 GB then.
const MOST_SLOTS: u64 = 1 << 26;
/// A dense table of 4 GiB.
const MOST_ENTRIES: u64 = 1 << 30;

/// Makes room for `count` entries.
///
/// # Errors
/// [`Error::Limit`] and [`Error::OutOfMemory`].
fn make_room<T>(
    array: &mut Vec<T>,
    what: &'static str,
    count: u64,
    limit: u64,
    cure: &'static str,
) -> Result<()> {
    if count > limit {
        return Err(Error::Limit { what, need: count, limit, cure });
    }
    array.try_reserve(count as usize).map_err(|_| Error::OutOfMemory { what })
}

impl PagePool {
    /// Slots of a range of tokens of each sequence, one after another: the `slot_mapping` of `kv_append` for
    /// tokens that were just appended.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] and [`Error::OtherPool`]; [`Error::Shape`] for a range that goes past its sequence's length;
    /// [`Error::Limit`] for more than 2^26 tokens in all, and [`Error::OutOfMemory`].
    pub fn slot_mapping(&self, tokens: &[(SeqId, Range<u32>)]) -> Result<Vec<i64>> {
        let mut slots = Vec::new();
        self.slot_mapping_into(tokens, &mut slots)?;
        Ok(slots)
    }

    /// [`Self::slot_mapping`] in place of what `slots` held.
    ///
    /// # Errors
    /// The errors of [`Self::slot_mapping`]; `slots` is then not to be used.
    pub fn slot_mapping_into(&self, tokens: &[(SeqId, Range<u32>)], slots: &mut Vec<i64>) -> Result<()> {
        slots.clear();
        let count = tokens.iter().map(|(_, range)| range.len() as u64).fold(0, u64::saturating_add);
        make_room(slots, "slots of a slot_mapping", count, MOST_SLOTS, "append in several steps")?;
        for (seq, range) in tokens {
            let sequence = self.sequence(*seq)?;
            sequence.check_tokens("end of a token range", range.end)?;
            slots.extend(range.clone().filter_map(|token| sequence.slot(token, self.spec.page_size)));
        }
        Ok(())
    }

    /// Makes room for the slots and the block table of a step before it changes any sequence. More than the pool has is left to the append
    /// to refuse.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::OtherPool`], [`Error::Limit`] and [`Error::OutOfMemory`].
    pub(crate) fn reserve_tables(
        &self,
        requests: &[(SeqId, u32)],
        slots: &mut Vec<i64>,
        entries: &mut Vec<i32>,
    ) -> Result<()> {
        let (mut count, mut longest) = (0u64, 0u64);
        for &(seq, tokens) in requests {
            let len = u64::from(self.len(seq)?) + u64::from(tokens);
            count = count.saturating_add(tokens.into());
            longest = longest.max(len.div_ceil(self.spec.page_size.into()));
        }
        let count = count.min(self.spec.num_slots());
        make_room(slots, "slots of a slot_mapping", count, MOST_SLOTS, "append in several steps")?;
        let count = requests.len() as u64 * longest.min(self.spec.num_pages.into());
        make_room(entries, "entries of a block table", count, MOST_ENTRIES, "use a smaller batch")
    }

    /// `block_table` of a batch: one row a sequence, as long as the longest and filled up with `pad`, which no
    /// kernel reads.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] and [`Error::OtherPool`]; [`Error::Limit`] for more than 2^30 entries, and [`Error::OutOfMemory`].
    pub fn block_table(&self, seqs: &[SeqId], pad: i32) -> Result<BlockTable> {
        let mut table = BlockTable::default();
        self.block_table_into(seqs, pad, &mut table)?;
        Ok(table)
    }

    /// [`Self::block_table`] in place of what `table` held.
    ///
    /// # Errors
    /// The errors of [`Self::block_table`]; `table` is then empty.
    pub fn block_table_into(&self, seqs: &[SeqId], pad: i32, table: &mut BlockTable) -> Result<()> {
        let BlockTable { entries, max_pages, page_size, slab_pages } = table;
        (*page_size, *slab_pages) = (self.spec.page_size, self.slab_pages());
        entries.clear();
        *max_pages = 0;
        let mut longest = 0;
        for &seq in seqs {
            longest = longest.max(self.pages(seq)?.len());
        }
        // At most num_pages, a u32.
        *max_pages = longest as u32;
        let (count, cure) = (seqs.len() as u64 * longest as u64, "use PagePool::csr, or a smaller batch");
        make_room(entries, "entries of a block table", count, MOST_ENTRIES, cure)
            .inspect_err(|_| *max_pages = 0)?;
        for &seq in seqs {
            let pages = self.pages(seq)?;
            entries.extend(pages.iter().map(|&page| page as i32));
            entries.extend(std::iter::repeat_n(pad, longest - pages.len()));
        }
        Ok(())
    }

    /// The pages of a batch as compressed rows.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] and [`Error::OtherPool`]; [`Error::Limit`] past 2^31 - 1 page ids in all, and [`Error::OutOfMemory`].
    pub fn csr(&self, seqs: &[SeqId]) -> Result<Csr> {
        let mut csr = Csr::default();
        self.csr_into(seqs, &mut csr)?;
        Ok(csr)
    }

    /// [`Self::csr`] in place of what `csr` held.
    ///
    /// # Errors
    /// The errors of [`Self::csr`]; `csr` is then not to be used.
    pub fn csr_into(&self, seqs: &[SeqId], csr: &mut Csr) -> Result<()> {
        let Csr { kv_indptr, kv_indices, kv_last_page_len, page_size } = csr;
        *page_size = self.spec.page_size;
        kv_indptr.clear();
        kv_indices.clear();
        kv_last_page_len.clear();
        let pages = seqs.iter().map(|&seq| Ok(self.pages(seq)?.len() as u64)).sum::<Result<u64>>()?;
        make_room(kv_indices, "page ids of one batch", pages, i32::MAX as u64, "use a smaller batch")?;
        for (array, count) in [(&mut *kv_indptr, seqs.len() + 1), (&mut *kv_last_page_len, seqs.len())] {
            make_room(array, "sequences of one batch", count as u64, u64::MAX, "use a smaller batch")?;
        }
        kv_indptr.push(0);
        for &seq in seqs {
            let Sequence { pages, len } = self.sequence(seq)?;
            // `make_room` has checked that the counts fit i32.
            kv_indptr.push((kv_indices.len() + pages.len()) as i32);
            kv_indices.extend(pages.iter().map(|&page| page as i32));
            let before = pages.len().saturating_sub(1) as u32 * self.spec.page_size;
            kv_last_page_len.push((len - before) as i32);
        }
        Ok(())
    }

    /// `seq_lens` of a batch: tokens of each sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::OtherPool`] and [`Error::OutOfMemory`].
    pub fn seq_lens(&self, seqs: &[SeqId]) -> Result<Vec<i32>> {
        let mut lens = Vec::new();
        self.seq_lens_into(seqs, &mut lens)?;
        Ok(lens)
    }

    /// [`Self::seq_lens`] in place of what `lens` held.
    ///
    /// # Errors
    /// The errors of [`Self::seq_lens`]; `lens` is then not to be used.
    pub fn seq_lens_into(&self, seqs: &[SeqId], lens: &mut Vec<i32>) -> Result<()> {
        lens.clear();
        make_room(lens, "sequences of one batch", seqs.len() as u64, u64::MAX, "use a smaller batch")?;
        for &seq in seqs {
            // A pool has fewer than 2^31 slots, so a sequence has fewer tokens.
            lens.push(self.sequence(seq)?.len as i32);
        }
        Ok(())
    }
}
