//! The pages of all sequences, and a step's tables: what any attention over a paged cache needs on the host.

use wgpu_mla::{KvSpec, LayerArrays, LayerBatch, PageCopies, PagePool, SeqId};

use crate::{Error, Result};

/// A page pool and the arrays of the step that was begun last.
pub struct Pages {
    pool: PagePool,
    arrays: LayerArrays,
    /// Page copies that come before the new rows.
    pub copies: PageCopies,
    /// Position of each new token in its sequence.
    pub positions: Vec<i32>,
    most_used: u32,
    max_position: usize,
    max_tokens: u32,
}

impl Pages {
    /// An empty pool for sequences of at most `max_position` tokens, and steps of at most `max_tokens`.
    pub fn new(spec: KvSpec, max_position: usize, max_tokens: u32) -> Result<Self> {
        Ok(Self {
            pool: PagePool::new(spec)?,
            arrays: LayerArrays::default(),
            copies: PageCopies::default(),
            positions: Vec::new(),
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

    /// Takes a sequence back to its first `tokens` tokens.
    pub fn truncate(&mut self, sequence: SeqId, tokens: u32) -> Result<()> {
        Ok(self.pool.truncate(sequence, tokens)?)
    }

    pub fn free(&mut self, sequence: SeqId) -> Result<()> {
        Ok(self.pool.free(sequence)?)
    }

    /// Grows the sequences and makes the step's arrays.
    pub fn begin(&mut self, batch: &[(SeqId, u32)]) -> Result<()> {
        self.positions.clear();
        self.copies = self.pool.layer_step_into(batch, &mut self.arrays)?;
        self.most_used = self.most_used.max(self.pool.num_used_pages());
        let positions = self.arrays.tokens().iter().flat_map(|(_, tokens)| tokens.clone());
        self.positions.extend(positions.map(|position| position as i32));
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

    /// The step's arrays as a layer takes them. Its forks are few, and each attends its prefix alone: what one writes does then not depend
    /// on the others, in any bit.
    pub fn batch(&self) -> LayerBatch<'_> {
        LayerBatch { shared_prefixes: &[], ..self.arrays.batch() }
    }

    /// Pages of the step's first sequence, in its order.
    pub fn of_first(&self) -> &[i32] {
        let page_size = self.spec().page_size;
        let used =
            self.arrays.batch().seq_lens.first().map_or(0, |&len| (len as u32).div_ceil(page_size) as usize);
        &self.arrays.block_table().entries[..used]
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
