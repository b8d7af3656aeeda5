//! The pages of all sequences, and a step's tables: what any attention over a paged cache needs on the host.

use wgpu_mla::{AppendBatch, BlockTable, KvSpec, LayerBatch, PagePool, SeqId};

use crate::{Error, Result};

/// A page pool and the tables of the step that was begun last.
pub struct Pages {
    pool: PagePool,
    /// What each sequence got: positions, and page copies that come before the new rows.
    pub append: AppendBatch,
    /// Tokens in the cache, the step's included.
    pub seq_lens: Vec<i32>,
    /// Where each sequence's new tokens begin.
    pub query_start_loc: Vec<i32>,
    /// Slot of each new token.
    pub slot_mapping: Vec<i64>,
    /// Position of each new token in its sequence.
    pub positions: Vec<i32>,
    /// Pages of each sequence.
    pub table: BlockTable,
    most_used: u32,
    max_position: usize,
    max_tokens: u32,
}

impl Pages {
    /// An empty pool for sequences of at most `max_position` tokens, and steps of at most `max_tokens`.
    pub fn new(spec: KvSpec, max_position: usize, max_tokens: u32) -> Result<Self> {
        Ok(Self {
            pool: PagePool::new(spec)?,
            append: AppendBatch::default(),
            seq_lens: Vec::new(),
            query_start_loc: Vec::new(),
            slot_mapping: Vec::new(),
            positions: Vec::new(),
            table: BlockTable::default(),
            most_used: 0,
            max_position,
            max_tokens,
        })
    }

    /// A new, empty sequence.
    pub fn add(&mut self) -> SeqId {
        self.pool.add()
    }

    /// A new sequence that shares all pages of another until one of them writes.
    pub fn fork(&mut self, sequence: SeqId) -> Result<SeqId> {
        Ok(self.pool.fork(sequence)?)
    }

    /// A new sequence with the first `tokens` tokens of another, in the same pages.
    pub fn fork_prefix(&mut self, sequence: SeqId, tokens: u32) -> Result<SeqId> {
        Ok(self.pool.fork_prefix(sequence, tokens)?)
    }

    pub fn free(&mut self, sequence: SeqId) -> Result<()> {
        Ok(self.pool.free(sequence)?)
    }

    /// Grows the sequences and writes the step's tables.
    pub fn begin(&mut self, batch: &[(SeqId, u32)]) -> Result<()> {
        self.pool.append_batch_into(batch, &mut self.append)?;
        self.most_used = self.most_used.max(self.pool.num_used_pages());
        let sequences: Vec<SeqId> = batch.iter().map(|&(sequence, _)| sequence).collect();
        self.pool.seq_lens_into(&sequences, &mut self.seq_lens)?;
        self.pool.block_table_into(&sequences, -1, &mut self.table)?;
        self.slot_mapping = self.pool.slot_mapping(&self.append.tokens)?;
        self.positions.clear();
        self.query_start_loc.clear();
        self.query_start_loc.push(0);
        for (_, tokens) in &self.append.tokens {
            self.positions.extend(tokens.clone().map(|position| position as i32));
            self.query_start_loc.push(self.positions.len() as i32);
        }
        self.check_positions()
    }

    /// Every position has a row of cosines and sines.
    fn check_positions(&self) -> Result<()> {
        let most = self.max_position;
        if let Some(position) = self.positions.iter().find(|&&position| position as usize >= most) {
            let cure = "end the sequence before it, or raise Setup::positions where the model has more";
            return Err(Error::Input(format!("position {position}: the RoPE table has {most}; {cure}")));
        }
        Ok(())
    }

    /// The step's tables as a layer takes them.
    pub fn batch(&self) -> LayerBatch<'_> {
        LayerBatch {
            seq_lens: &self.seq_lens,
            query_start_loc: &self.query_start_loc,
            slot_mapping: &self.slot_mapping,
            pages: self.table.page_table(),
            shared_prefixes: &[],
            expanded: &[],
        }
    }

    /// The pages of a sequence, in its order.
    pub fn of(&self, sequence: SeqId) -> Result<&[u32]> {
        Ok(self.pool.pages(sequence)?)
    }

    /// Pages in use now, the most so far, and all there are.
    pub fn used(&self) -> (u32, u32, u32) {
        (self.pool.num_used_pages(), self.most_used, self.pool.spec().num_pages)
    }

    /// Tokens that one step may have.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens as usize
    }

    pub fn spec(&self) -> &KvSpec {
        self.pool.spec()
    }
}
