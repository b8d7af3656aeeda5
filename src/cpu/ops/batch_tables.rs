//! `batch_tables`: the slots of new tokens and the tables of a decode, from a batch as its buffers have it.

use crate::base::error::{Error, Result};
use crate::cache::KvSpec;
use crate::cache::decode_spec::MlaDecode;
use crate::cpu::Cpu;
use crate::cpu::buffer::{Access, Buffer, Locked, lock};
use crate::ops::{Compiled, DeviceBatch, Sequences, Step, no_slots};
use crate::plan::Plan;
use crate::plan::shares::Shares;
use crate::plan::tables::PageTable;

/// The CPU's counterpart of `gpu::ops::BatchTables`, which makes the same tables from the same arrays: for a host that runs its steps on
/// either, and keeps its batches in a backend's buffers, padded to a fixed size. Each call reads the arrays.
///
/// ```text
/// once      tables = BatchTables::new(kv)
/// a step    slots = tables.slot_mapping(&batch, max_tokens), append.prepare(.., &slots), append.run(..) for each layer
///           tables.prepare(&mla, &mut step, &plan, &batch), mla.run(&step, ..) for each layer
/// ```
#[derive(Debug, Clone)]
pub struct BatchTables {
    kv: KvSpec,
    /// `None` where all tokens are here.
    share: Option<(Shares, u32)>,
}

impl BatchTables {
    /// For a cache; its dtype does not matter.
    ///
    /// # Errors
    /// The errors of [`KvSpec::check`].
    pub fn new(kv: KvSpec) -> Result<Self> {
        kv.check()?;
        Ok(Self { kv, share: None })
    }

    /// Like [`BatchTables::new`], for a rank that holds its share of the tokens. A batch's `seq_lens` are those of the whole sequences,
    /// its `block_table` and the plan's bounds the rank's own: lengths, bounds and slots are made for its own tokens, and
    /// tokens of other ranks are skipped.
    ///
    /// # Errors
    /// The errors of [`BatchTables::new`], and [`Error::Shape`] for a rank that there is not.
    pub fn sharded(kv: KvSpec, shares: &Shares, rank: u32) -> Result<Self> {
        kv.check()?;
        shares.local_len(rank, 0)?;
        Ok(Self { kv, share: Some((shares.clone(), rank)) })
    }

    /// What an append takes for the new tokens of a batch: `max_tokens` entries, -1 for a token of no sequence and for
    /// one whose page is not of the pool.
    ///
    /// # Errors
    /// [`Error::Shape`] and [`Error::BufferTooSmall`]; [`Error::Limit`] for more than 2^26 tokens, [`Error::OutOfMemory`].
    pub fn slot_mapping(&self, batch: &DeviceBatch<&Buffer>, max_tokens: u32) -> Result<Vec<i64>> {
        let arrays = Arrays::of(batch, self)?;
        let mut slots = no_slots(max_tokens)?;
        for (token, slot) in (0..).zip(&mut slots) {
            *slot = self.slot(&arrays, token).map_or(-1, i64::from);
        }
        Ok(slots)
    }

    /// Prepares a decode's step with a plan for the longest that each sequence may be, cut down to the batch.
    ///
    /// The plan has the batch's sequences, those of padding included, with `seq_lens` that no batch passes, and
    /// [`crate::Mask::Full`] (or one query token a sequence): what each query token sees is found here, causal and
    /// bottom-right. A sequence's query tokens begin where the plan has them; those that the batch has not, by `query_start_loc`, see
    /// nothing: out is 0 and LSE -inf. Sequences longer than planned are cut off.
    ///
    /// # Errors
    /// The errors of [`Compiled::prepare`]; [`Error::LayoutMismatch`] for a decode of another pool, or a plan of another number of
    /// sequences; [`Error::Shape`] for a plan with shared prefixes or with other bounds; [`Error::BufferTooSmall`].
    pub fn prepare(
        &self,
        mla: &Compiled<MlaDecode, Cpu>,
        step: &mut Step<MlaDecode, Cpu>,
        plan: &Plan,
        batch: &DeviceBatch<&Buffer>,
    ) -> Result<()> {
        let kv = &mla.op().kv;
        if (kv.page_size, kv.num_pages) != (self.kv.page_size, self.kv.num_pages) {
            return Err(Error::LayoutMismatch { detail: "the decode is of another pool of pages" });
        }
        if plan.seq_lens.len() != batch.batch as usize {
            let detail = "the plan has another number of sequences than the batch";
            return Err(Error::LayoutMismatch { detail });
        }
        let sequences = Sequences::of(plan, mla.op().shape.num_heads)?;
        let arrays = Arrays::of(batch, self)?;
        let plan = cut(plan, &sequences, &arrays);
        let max_pages = plan.seq_lens.iter().map(|&len| kv.pages_for(len)).max().unwrap_or(0);
        // Clamped to the pool, as a device does.
        let page = |seq, block| arrays.page(seq, block).unwrap_or(u32::MAX).min(kv.num_pages - 1) as i32;
        let row = |seq| (0..max_pages).map(move |block| page(seq, block));
        let block_table: Vec<i32> = (0..batch.batch as usize).flat_map(row).collect();
        let pages = PageTable::Dense { block_table: &block_table, max_pages };
        mla.prepare(step, (&plan, pages))
    }

    fn slot(&self, arrays: &Arrays<'_>, token: u32) -> Option<u32> {
        // The last sequence that begins at or before the token.
        let sequence = arrays.starts().partition_point(|&start| i64::from(start) <= token.into());
        let sequence = sequence.saturating_sub(1);
        let position = arrays.whole_visible(sequence, token).checked_sub(1)?;
        let position = match &self.share {
            None => position,
            Some((shares, rank)) => {
                (shares.owner(position) == *rank).then(|| shares.local_index(position))?
            }
        };
        let page = arrays.page(sequence, position / self.kv.page_size)?;
        (page < self.kv.num_pages).then(|| page * self.kv.page_size + position % self.kv.page_size)
    }
}

/// Work items and query tokens with ranges of the batch.
fn cut(plan: &Plan, sequences: &Sequences, arrays: &Arrays<'_>) -> Plan {
    let mut plan = plan.clone();
    for (item, &sequence) in plan.items.iter_mut().zip(&sequences.items) {
        let end = item.kv_end.min(arrays.len(sequence as usize));
        // An empty item begins at 0, as the planner has it.
        (item.kv_begin, item.kv_end) = if item.kv_begin < end { (item.kv_begin, end) } else { (0, 0) };
    }
    for (query, &sequence) in plan.queries.iter_mut().zip(&sequences.queries) {
        query.visible = query.visible.min(arrays.visible(sequence as usize, query.token));
    }
    for (sequence, len) in plan.seq_lens.iter_mut().enumerate() {
        *len = (*len).min(arrays.len(sequence));
    }
    plan
}

/// A batch's arrays, locked. Their contents are unchecked.
struct Arrays<'a> {
    locked: Locked<'a, 3>,
    tables: &'a BatchTables,
    batch: usize,
    max_pages: usize,
}

impl<'a> Arrays<'a> {
    fn of(batch: &DeviceBatch<&'a Buffer>, tables: &'a BatchTables) -> Result<Self> {
        batch.check(Buffer::bytes)?;
        let locked = lock(batch.arrays().map(|(_, buffer)| (buffer, Access::Read)));
        Ok(Self { locked, tables, batch: batch.batch as usize, max_pages: batch.max_pages as usize })
    }

    fn array(&self, argument: usize) -> &[i32] {
        bytemuck::cast_slice(self.locked.bytes(argument))
    }

    /// Where sequences begin, without the end of the last.
    fn starts(&self) -> &[i32] {
        &self.array(1)[..self.batch]
    }

    /// Tokens of a whole sequence; none for a negative length.
    fn whole_len(&self, sequence: usize) -> u32 {
        self.array(0).get(sequence).map_or(0, |&len| len.max(0) as u32)
    }

    /// Tokens of a sequence that are here.
    fn len(&self, sequence: usize) -> u32 {
        self.local(self.whole_len(sequence))
    }

    /// How many of the first `len` tokens of a whole sequence are here.
    fn local(&self, len: u32) -> u32 {
        match &self.tables.share {
            None => len,
            // `sharded` found the rank.
            Some((shares, rank)) => shares.local_len(*rank, len).unwrap_or(0),
        }
    }

    /// Keys here that a query token of a sequence sees.
    fn visible(&self, sequence: usize, token: u32) -> u32 {
        self.local(self.whole_visible(sequence, token))
    }

    /// Keys of the whole that a query token of a sequence sees, bottom-right: its own position and those before; 0 for a token of
    /// another sequence, or before the first key.
    fn whole_visible(&self, sequence: usize, token: u32) -> u32 {
        let (begin, end) = (self.array(1)[sequence], self.array(1)[sequence + 1]);
        let (begin, end, token) = (i64::from(begin), i64::from(end), i64::from(token));
        if begin < 0 || !(begin..end).contains(&token) {
            return 0;
        }
        // At most the length, which is a u32.
        (i64::from(self.whole_len(sequence)) - (end - token) + 1).max(0) as u32
    }

    /// What `block_table` has for a block of a sequence; `None` past the table.
    fn page(&self, sequence: usize, block: u32) -> Option<u32> {
        let row = self.array(2).get(sequence * self.max_pages..)?;
        let block = ((block as usize) < self.max_pages).then_some(block as usize)?;
        row.get(block).map(|&page| page as u32)
    }
}
