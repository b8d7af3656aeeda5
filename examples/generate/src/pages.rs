//! The pages of all sequences, and a step's tables: what any attention over a paged cache needs on the host.

use wgpu_mla::{KvSpec, LayerArrays, LayerBatch, PageCopies, PagePool, SeqId};

use crate::{Error, Result};

/// A page pool and the arrays of the step that was begun last.
pub struct Pages {
    pool: PagePool,
    /// A sequence for each slab that has no memory yet, to which all of its pages belong. The next one is the last.
    slabs_to_come: Vec<SeqId>,
    /// Pages of these slabs.
    pages_to_come: u32,
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
    /// An empty pool for sequences of at most `max_position` tokens, and steps of at most `max_tokens`. Its pages are in slabs, of which
    /// only the first has memory.
    pub fn new(spec: KvSpec, slab_pages: u32, max_position: usize, max_tokens: u32) -> Result<Self> {
        let mut pool = PagePool::in_slabs(spec, slab_pages)?;
        let slab_of = |first: u32| slab_pages.min(spec.num_pages - first);
        let (mut slabs_to_come, mut pages_to_come) = (Vec::new(), 0);
        // A sequence that begins goes to the emptiest slab, of equal ones to the first. So each of these has a slab for itself, in order.
        let slabs = (0..spec.num_pages).step_by(slab_pages as usize);
        for first in slabs.filter(|_| slab_pages < spec.num_pages) {
            let id = pool.add();
            pool.append(id, slab_of(first) * spec.page_size)?;
            slabs_to_come.push(id);
            pages_to_come += slab_of(first);
        }
        slabs_to_come.reverse();
        let mut pages = Self {
            pool,
            slabs_to_come,
            pages_to_come,
            arrays: LayerArrays::default(),
            copies: PageCopies::default(),
            positions: Vec::new(),
            most_used: 0,
            max_position,
            max_tokens,
        };
        pages.grow()?;
        Ok(pages)
    }

    /// The next slab has memory.
    pub fn grow(&mut self) -> Result<()> {
        if let Some(slab) = self.slabs_to_come.pop() {
            self.pages_to_come -= self.pool.pages(slab)?.len() as u32;
            self.pool.free(slab)?;
        }
        Ok(())
    }

    /// Whether another slab, or several, would have the pages that an error of [`Pages::begin`] misses.
    pub fn may_grow(&self, error: &Error) -> bool {
        let missing = |wanted: u64, free: u32| wanted - u64::from(free);
        matches!(*error, Error::Mla(wgpu_mla::Error::OutOfPages { wanted, free, .. })
            if missing(wanted, free) <= self.pages_to_come.into())
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
        self.most_used = self.most_used.max(self.used_now());
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

    /// Pages in use now, the most so far, and all that there is memory for.
    pub fn used(&self) -> (u32, u32, u32) {
        (self.used_now(), self.most_used, self.spec().num_pages - self.pages_to_come)
    }

    fn used_now(&self) -> u32 {
        self.pool.num_used_pages() - self.pages_to_come
    }

    /// Tokens that one step may have.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens as usize
    }

    /// The pool, with the pages that have no memory yet.
    pub fn spec(&self) -> &KvSpec {
        self.pool.spec()
    }
}
