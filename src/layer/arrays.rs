//! A step of a pool's sequences as the arrays that a layer takes.

use std::ops::{Deref, Range};

use super::batch::LayerBatch;
use crate::base::error::{Error, Result};
use crate::base::memory::collected;
use crate::pages::{AppendBatch, BlockTable, PagePool, SeqId};
use crate::plan::SharedPrefix;

/// The arrays of one step of an [`MlaLayer`](super::MlaLayer), made by [`PagePool::layer_step`]: it owns what a [`LayerBatch`] borrows. Its
/// memory serves the next step too.
#[derive(Debug, Clone, Default)]
pub struct LayerArrays {
    append: AppendBatch,
    sequences: Vec<SeqId>,
    seq_lens: Vec<i32>,
    query_start_loc: Vec<i32>,
    slot_mapping: Vec<i64>,
    block_table: BlockTable,
    shared_prefixes: Vec<SharedPrefix>,
}

/// Page copies `(from, to)` of a step, often none: what [`KvCopyPages`](crate::KvCopyPages) runs in the cache of every layer before the
/// step's new tokens are written there. Without them a sequence that was forked reads pages that were never written.
#[must_use = "run `KvCopyPages` with them in every layer, before the layer's step"]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageCopies(Vec<(u32, u32)>);

impl Deref for PageCopies {
    type Target = [(u32, u32)];

    fn deref(&self) -> &[(u32, u32)] {
        &self.0
    }
}

impl PagePool {
    /// A step of an [`MlaLayer`](super::MlaLayer): gives each sequence so many new tokens, and makes all arrays of the step. The requests'
    /// order is that of the batch: [`MlaLayer::decodes_first`](super::MlaLayer::decodes_first) comes before.
    ///
    /// ```
    /// use wgpu_mla::{Dtype, KvSpec, PagePool};
    ///
    /// let mut pool = PagePool::new(KvSpec { layout: Dtype::F16.into(), page_size: 4, num_pages: 8 })?;
    /// let prompt = pool.add();
    /// let (arrays, copies) = pool.layer_step(&[(prompt, 6)])?;
    /// assert_eq!((arrays.batch().seq_lens, arrays.batch().query_start_loc), (&[6][..], &[0, 6][..]));
    /// assert!(copies.is_empty());
    ///
    /// // The last page of two forks is copied before one of them writes to it.
    /// let beam = pool.fork(prompt)?;
    /// let (arrays, copies) = pool.layer_step(&[(beam, 1), (prompt, 1)])?;
    /// assert_eq!((&copies[..], arrays.batch().slot_mapping), (&[(1, 2)][..], &[10, 6][..]));
    /// assert_eq!(arrays.batch().shared_prefixes[0].tokens, 4);
    /// # Ok::<(), wgpu_mla::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::OtherPool`] and [`Error::OutOfPages`]; [`Error::Shape`] for a sequence that is named twice;
    /// [`Error::Limit`] for more than 2^26 new tokens or 2^30 entries of the block table, and [`Error::OutOfMemory`]. No sequence has
    /// changed then.
    pub fn layer_step(&mut self, requests: &[(SeqId, u32)]) -> Result<(LayerArrays, PageCopies)> {
        let mut arrays = LayerArrays::default();
        let copies = self.layer_step_into(requests, &mut arrays)?;
        Ok((arrays, copies))
    }

    /// [`Self::layer_step`] in the memory of an earlier step.
    ///
    /// # Errors
    /// The errors of [`Self::layer_step`]; the arrays are then those of an empty batch.
    pub fn layer_step_into(
        &mut self,
        requests: &[(SeqId, u32)],
        arrays: &mut LayerArrays,
    ) -> Result<PageCopies> {
        arrays.clear();
        // What can fail comes before the append, which changes sequences.
        let result = arrays
            .make_room(self, requests)
            .and_then(|()| check_once(&arrays.sequences))
            .and_then(|()| self.append_batch_into(requests, &mut arrays.append))
            .and_then(|()| arrays.fill(self));
        if result.is_err() {
            arrays.clear();
        }
        result.map(|()| PageCopies(std::mem::take(&mut arrays.append.copies)))
    }
}

/// # Errors
/// [`Error::Shape`] and [`Error::OutOfMemory`].
fn check_once(sequences: &[SeqId]) -> Result<()> {
    let mut sorted = collected(sequences.iter().copied(), sequences.len(), "sequences of a step")?;
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => {
            let cure = "must be in the step once: ask for all of its tokens in one request";
            Err(Error::Shape { what: "sequence", got: pair[0].number(), cure })
        }
        None => Ok(()),
    }
}

impl LayerArrays {
    fn clear(&mut self) {
        self.append.copies.clear();
        self.append.tokens.clear();
        self.sequences.clear();
        self.seq_lens.clear();
        self.query_start_loc.clear();
        self.query_start_loc.push(0);
        self.slot_mapping.clear();
        self.block_table =
            BlockTable { entries: std::mem::take(&mut self.block_table.entries), ..Default::default() };
        self.block_table.entries.clear();
        self.shared_prefixes.clear();
    }

    /// Room for all that [`Self::fill`] writes but the shared prefixes; the sequences too.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::OtherPool`], [`Error::Limit`] and [`Error::OutOfMemory`].
    fn make_room(&mut self, pool: &PagePool, requests: &[(SeqId, u32)]) -> Result<()> {
        let out_of_memory = |_| Error::OutOfMemory { what: "sequences of a step" };
        self.sequences.try_reserve(requests.len()).map_err(out_of_memory)?;
        self.seq_lens.try_reserve(requests.len()).map_err(out_of_memory)?;
        self.query_start_loc.try_reserve(requests.len()).map_err(out_of_memory)?;
        self.sequences.extend(requests.iter().map(|&(sequence, _)| sequence));
        pool.reserve_tables(requests, &mut self.slot_mapping, &mut self.block_table.entries)
    }

    /// After the append.
    fn fill(&mut self, pool: &PagePool) -> Result<()> {
        pool.seq_lens_into(&self.sequences, &mut self.seq_lens)?;
        pool.slot_mapping_into(&self.append.tokens, &mut self.slot_mapping)?;
        pool.block_table_into(&self.sequences, -1, &mut self.block_table)?;
        self.shared_prefixes = pool.shared_prefixes(&self.sequences)?;
        let mut end = 0;
        self.query_start_loc.extend(self.append.tokens.iter().map(|(_, tokens)| {
            // A pool has fewer than 2^31 slots, and each new token has one.
            end += tokens.len() as i32;
            end
        }));
        Ok(())
    }

    /// The step's batch. A host that keeps prefixes expanded adds [`LayerBatch::expanded`].
    #[must_use]
    pub fn batch(&self) -> LayerBatch<'_> {
        LayerBatch {
            seq_lens: &self.seq_lens,
            query_start_loc: &self.query_start_loc,
            slot_mapping: &self.slot_mapping,
            pages: self.block_table.page_table(),
            shared_prefixes: &self.shared_prefixes,
            expanded: &[],
        }
    }

    /// The sequences, in the order of the batch, and the positions of their new tokens.
    #[must_use]
    pub fn tokens(&self) -> &[(SeqId, Range<u32>)] {
        &self.append.tokens
    }

    /// Query tokens of the batch.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.slot_mapping.len()
    }

    /// The pages of each sequence, -1 behind the last.
    #[must_use]
    pub fn block_table(&self) -> &BlockTable {
        &self.block_table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::dtype::Dtype;
    use crate::cache::KvSpec;
    use crate::plan::tables::PageTable;

    #[test]
    fn a_step_is_all_or_nothing() {
        let mut pool =
            PagePool::new(KvSpec { layout: Dtype::F16.into(), page_size: 4, num_pages: 3 }).expect("a pool");
        let (a, b) = (pool.add(), pool.add());
        let mut arrays = LayerArrays::default();
        assert!(pool.layer_step_into(&[(b, 1), (a, 5)], &mut arrays).is_ok_and(|copies| copies.is_empty()));
        assert_eq!((arrays.tokens(), arrays.num_tokens()), (&[(b, 0..1), (a, 0..5)][..], 6));
        let before = pool.clone();
        let twice = pool.layer_step_into(&[(a, 1), (b, 1), (a, 1)], &mut arrays);
        assert_eq!(
            twice.expect_err("twice").to_string(),
            "sequence 0: must be in the step once: ask for all of its tokens in one request"
        );
        let full = pool.layer_step_into(&[(a, 1), (b, 9)], &mut arrays);
        assert!(matches!(full, Err(Error::OutOfPages { .. })));
        assert_eq!(pool, before);
        let LayerBatch { seq_lens, query_start_loc, slot_mapping, pages, .. } = arrays.batch();
        assert!(seq_lens.is_empty() && slot_mapping.is_empty() && query_start_loc == [0]);
        assert!(matches!(pages, PageTable::Pool { block_table: [], max_pages: 0, .. }));
    }
}
