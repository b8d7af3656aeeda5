//! The page pool: which pages of the cache each sequence has, and which of them several sequences share. Pure.
//!
//! A sequence of `n` tokens holds `ceil(n / page_size)` pages. Every page counts its owners. A page that is about
//! to be written while it has other owners is replaced by a copy first (copy on write), and only the last page of
//! a sequence can be, so a page that two sequences share stands at one index in both, behind the same pages.

mod export;
mod prefix;
mod store;

use crate::base::id::next_id;
use std::collections::HashMap;
use std::ops::Range;

use crate::base::error::{Error, Result};
use crate::cache::KvSpec;

pub use export::{BlockTable, Csr};
use store::Store;

/// The error for sequences or pages that the host has no memory for.
const OUT_OF_MEMORY: Error = Error::OutOfMemory { what: "a pool's pages" };

/// A handle of a sequence in a [`PagePool`]. A pool never makes the same twice, and only that pool and its clones accept it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId {
    pool: u64,
    number: u64,
}

impl SeqId {
    /// Sequences that the pool made before it.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.number
    }
}

/// Hands out the pages of one cache to sequences that grow, fork, roll back and end.
///
/// The pool only does the book-keeping. What it asks of the GPU is a list of page copies `(from, to)`, which the
/// caller runs with `kv_copy_pages` before the new tokens are written: one call for each append, in the order of
/// the appends. Commands of one queue run in order, so a page may be freed while earlier commands still read it.
///
/// Pages of a slab are handed out last freed first, and then by lowest id; a sequence's pages are freed last page first. The
/// same calls therefore give the same pages.
///
/// A call that fails changes nothing.
///
/// ```
/// use wgpu_mla::{Dtype, KvSpec, PagePool};
///
/// let mut pool = PagePool::new(KvSpec { layout: Dtype::F16.into(), page_size: 4, num_pages: 8 })?;
/// let prompt = pool.add();
/// let prefill = pool.append(prompt, 6)?;
/// assert_eq!(pool.slot_mapping(&[(prompt, prefill.tokens)])?, [0, 1, 2, 3, 4, 5]);
///
/// let beam = pool.fork(prompt)?;
/// let step = pool.append(beam, 1)?;
/// assert_eq!(step.copies(), [(1, 2)]); // for kv_copy_pages, ahead of kv_append
/// assert_eq!(pool.slot_mapping(&[(beam, step.tokens)])?, [10]);
/// assert_eq!((pool.pages(prompt)?, pool.pages(beam)?), (&[0, 1][..], &[0, 2][..]));
/// # Ok::<(), wgpu_mla::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct PagePool {
    /// A number that only clones of a pool share.
    id: u64,
    spec: KvSpec,
    store: Store,
    sequences: HashMap<SeqId, Sequence>,
    next_number: u64,
}

/// The result of an append to one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Append {
    /// Positions of the new tokens in their sequence.
    pub tokens: Range<u32>,
    /// The page copy `(from, to)` that must run before the new tokens are written.
    pub copy: Option<(u32, u32)>,
}

impl Append {
    /// The copy as a list of at most one, the way `kv_copy_pages` takes it.
    #[must_use]
    pub fn copies(&self) -> &[(u32, u32)] {
        self.copy.as_slice()
    }
}

/// The result of an append to a batch. Its memory serves the next batch too.
#[derive(Debug, Clone, Default)]
pub struct AppendBatch {
    /// Page copies `(from, to)` that must run, in one call, before the new tokens are written. They pass
    /// [`check_copies`](crate::check_copies).
    pub copies: Vec<(u32, u32)>,
    /// Positions of each request's new tokens, in the order of the requests: ready for
    /// [`PagePool::slot_mapping`].
    pub tokens: Vec<(SeqId, Range<u32>)>,
    /// Tokens asked for, one entry a sequence.
    totals: Vec<(SeqId, u64)>,
    /// Shared last pages that a sequence wants to write, one entry a sequence.
    shared_tails: Vec<u32>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Sequence {
    /// Exactly as many as `len` tokens fill.
    pages: Vec<u32>,
    /// Tokens.
    len: u32,
}

impl Sequence {
    /// Pages that `tokens` more tokens need, a copy of a shared last page not counted.
    fn fresh_pages(&self, tokens: u64, page_size: u32) -> u64 {
        let len = tokens.saturating_add(self.len.into());
        len.div_ceil(page_size.into()) - self.pages.len() as u64
    }

    /// The last page, where more tokens would go into it while other sequences have it too.
    fn shared_tail(&self, page_size: u32, store: &Store) -> Option<u32> {
        let partial = !self.len.is_multiple_of(page_size);
        self.pages.last().copied().filter(|&page| partial && store.owners(page) > 1)
    }

    fn slot(&self, token: u32, page_size: u32) -> Option<i64> {
        let page = self.pages.get((token / page_size) as usize)?;
        (token < self.len).then(|| i64::from(*page) * i64::from(page_size) + i64::from(token % page_size))
    }

    fn check_tokens(&self, what: &'static str, tokens: u32) -> Result<()> {
        if tokens > self.len {
            let cure = "must be at most the sequence's length; append first";
            return Err(Error::Shape { what, got: tokens.into(), cure });
        }
        Ok(())
    }
}

/// What is wrong with a handle that the pool `pool` does not have.
fn unknown(pool: u64, seq: SeqId) -> Error {
    if seq.pool == pool {
        Error::UnknownSequence { number: seq.number }
    } else {
        Error::OtherPool { number: seq.number }
    }
}

impl PagePool {
    /// A pool whose pages are all free.
    ///
    /// # Errors
    /// [`Error::Shape`] as [`KvSpec::check`].
    pub fn new(spec: KvSpec) -> Result<Self> {
        Self::in_slabs(spec, spec.num_pages.max(1))
    }

    /// A pool whose pages are in slabs of `slab_pages` pages each: see [`crate::Slabs`]. A sequence stays in a slab while that has free
    /// pages; one that begins or has to leave goes to the slab with the most.
    ///
    /// # Errors
    /// [`Error::Shape`] as [`KvSpec::check`] and [`KvSpec::num_slabs`].
    pub fn in_slabs(spec: KvSpec, slab_pages: u32) -> Result<Self> {
        spec.check()?;
        spec.num_slabs(slab_pages)?;
        let store = Store::new(spec.num_pages, slab_pages);
        Ok(Self { id: next_id(), spec, store, sequences: HashMap::new(), next_number: 0 })
    }

    /// Pages of a slab: all, for a pool in one buffer.
    #[must_use]
    pub fn slab_pages(&self) -> u32 {
        self.store.slab_pages
    }

    /// The cache that the pages belong to.
    #[must_use]
    pub fn spec(&self) -> &KvSpec {
        &self.spec
    }

    /// Adds an empty sequence, which has no pages.
    pub fn add(&mut self) -> SeqId {
        self.insert(Sequence::default())
    }

    /// Makes a sequence `tokens` tokens longer.
    ///
    /// Where the last page has room and other owners, the sequence gets a page of its own, and the copy in the
    /// result must run before the new tokens are written.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::OtherPool`] and [`Error::OutOfPages`]; [`Error::OutOfMemory`] where the host has none for as
    /// many pages.
    pub fn append(&mut self, seq: SeqId, tokens: u32) -> Result<Append> {
        let (sequence, page_size) = (self.sequence(seq)?, self.spec.page_size);
        let copies = tokens > 0 && sequence.shared_tail(page_size, &self.store).is_some();
        let wanted = sequence.fresh_pages(tokens.into(), page_size) + u64::from(copies);
        self.store.check_room(wanted)?;
        self.reserve(seq, tokens.into())?;
        self.store.reserve(wanted)?;
        self.grow(seq, tokens)
    }

    /// Makes room in a sequence for so many more tokens' pages.
    fn reserve(&mut self, seq: SeqId, tokens: u64) -> Result<()> {
        let page_size = self.spec.page_size;
        let sequence = self.sequences.get_mut(&seq).ok_or(unknown(self.id, seq))?;
        let fresh = sequence.fresh_pages(tokens, page_size) as usize;
        sequence.pages.try_reserve(fresh).map_err(|_| OUT_OF_MEMORY)
    }

    /// [`Self::append`] for a whole batch of `(sequence, tokens)`: all of it or nothing.
    ///
    /// Where several sequences share a last page and all write to it, the last of them writes in place if no other sequence owns the page;
    /// the others write to copies. A sequence that stands in the batch twice grows twice.
    ///
    /// # Errors
    /// The errors of [`Self::append`].
    pub fn append_batch(&mut self, requests: &[(SeqId, u32)]) -> Result<AppendBatch> {
        let mut batch = AppendBatch::default();
        self.append_batch_into(requests, &mut batch)?;
        Ok(batch)
    }

    /// [`Self::append_batch`] in the memory of an earlier batch.
    ///
    /// # Errors
    /// The errors of [`Self::append_batch`]; the batch is then empty.
    pub fn append_batch_into(&mut self, requests: &[(SeqId, u32)], batch: &mut AppendBatch) -> Result<()> {
        batch.copies.clear();
        batch.tokens.clear();
        let wanted = self.pages_wanted(requests, batch)?;
        self.store.check_room(wanted)?;
        self.store.reserve(wanted)?;
        batch.tokens.try_reserve(requests.len()).map_err(|_| OUT_OF_MEMORY)?;
        batch.copies.try_reserve(batch.shared_tails.len()).map_err(|_| OUT_OF_MEMORY)?;
        for &(seq, tokens) in &batch.totals {
            self.reserve(seq, tokens)?;
        }
        for &(seq, tokens) in requests {
            let Append { tokens, copy } = self.grow(seq, tokens)?;
            batch.copies.extend(copy);
            batch.tokens.push((seq, tokens));
        }
        Ok(())
    }

    /// A new sequence with all tokens of another. They share every page, a partial last page included, until one
    /// of them writes to it.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] and [`Error::OtherPool`]; [`Error::OutOfMemory`] where the host has none for as many pages.
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId> {
        let tokens = self.sequence(seq)?.len;
        self.fork_prefix(seq, tokens)
    }

    /// A new sequence with the first `tokens` tokens of another, in the same pages.
    ///
    /// # Errors
    /// The errors of [`Self::fork`]; [`Error::Shape`] for more tokens than there are.
    pub fn fork_prefix(&mut self, seq: SeqId, tokens: u32) -> Result<SeqId> {
        let parent = self.sequence(seq)?;
        parent.check_tokens("tokens to fork", tokens)?;
        let shared = &parent.pages[..self.spec.pages_for(tokens) as usize];
        let mut pages = Vec::new();
        pages.try_reserve_exact(shared.len()).map_err(|_| OUT_OF_MEMORY)?;
        pages.extend_from_slice(shared);
        for &page in &pages {
            self.store.share(page);
        }
        Ok(self.insert(Sequence { pages, len: tokens }))
    }

    /// Rolls a sequence back to its first `tokens` tokens, as speculative decoding does with rejected ones, and
    /// gives up the pages behind them.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] and [`Error::OtherPool`]; [`Error::Shape`] for more tokens than there are.
    pub fn truncate(&mut self, seq: SeqId, tokens: u32) -> Result<()> {
        let sequence = self.sequences.get_mut(&seq).ok_or(unknown(self.id, seq))?;
        sequence.check_tokens("tokens to keep", tokens)?;
        sequence.len = tokens;
        let keep = self.spec.pages_for(tokens) as usize;
        for page in sequence.pages.drain(keep..).rev() {
            self.store.release(page);
        }
        Ok(())
    }

    /// Ends a sequence. Pages that no other sequence has become free.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] and [`Error::OtherPool`].
    pub fn free(&mut self, seq: SeqId) -> Result<()> {
        let sequence = self.sequences.remove(&seq).ok_or(unknown(self.id, seq))?;
        for &page in sequence.pages.iter().rev() {
            self.store.release(page);
        }
        Ok(())
    }

    /// Tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] and [`Error::OtherPool`].
    pub fn len(&self, seq: SeqId) -> Result<u32> {
        Ok(self.sequence(seq)?.len)
    }

    /// Page ids of a sequence, in token order: as many as its tokens fill.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] and [`Error::OtherPool`].
    pub fn pages(&self, seq: SeqId) -> Result<&[u32]> {
        Ok(&self.sequence(seq)?.pages)
    }

    /// Sequences in the pool.
    #[must_use]
    pub fn num_sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Pages that no sequence has.
    #[must_use]
    pub fn num_free_pages(&self) -> u32 {
        self.store.num_free_pages()
    }

    /// Pages that at least one sequence has. A shared page counts once.
    #[must_use]
    pub fn num_used_pages(&self) -> u32 {
        self.store.total - self.store.num_free_pages()
    }

    /// Sequences that have a page: 0 for a free page and for an id that is not in the pool.
    #[must_use]
    pub fn owners(&self, page: u32) -> usize {
        self.store.owners(page)
    }

    /// Slot of a token: `page * page_size + offset`.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] and [`Error::OtherPool`]; [`Error::Shape`] for a token at or past the sequence's length.
    pub fn slot(&self, seq: SeqId, token: u32) -> Result<i64> {
        let slot = self.sequence(seq)?.slot(token, self.spec.page_size);
        let cure = "must be below the sequence's length; append first";
        slot.ok_or(Error::Shape { what: "token", got: token.into(), cure })
    }

    fn insert(&mut self, sequence: Sequence) -> SeqId {
        let id = SeqId { pool: self.id, number: self.next_number };
        self.next_number += 1;
        self.sequences.insert(id, sequence);
        id
    }

    fn sequence(&self, seq: SeqId) -> Result<&Sequence> {
        self.sequences.get(&seq).ok_or(unknown(self.id, seq))
    }

    /// Exactly the pages that a batch takes, copies included.
    fn pages_wanted(&self, requests: &[(SeqId, u32)], batch: &mut AppendBatch) -> Result<u64> {
        let AppendBatch { totals, shared_tails, .. } = batch;
        totals.clear();
        shared_tails.clear();
        for reserved in [totals.try_reserve(requests.len()), shared_tails.try_reserve(requests.len())] {
            reserved.map_err(|_| OUT_OF_MEMORY)?;
        }
        totals.extend(requests.iter().map(|&(seq, tokens)| (seq, u64::from(tokens))));
        totals.sort_unstable();
        totals.dedup_by(|next, kept| {
            let same = next.0 == kept.0;
            if same {
                kept.1 = kept.1.saturating_add(next.1);
            }
            same
        });
        let mut wanted = 0u64;
        for &(seq, tokens) in totals.iter() {
            let sequence = self.sequence(seq)?;
            wanted = wanted.saturating_add(sequence.fresh_pages(tokens, self.spec.page_size));
            if tokens > 0 {
                shared_tails.extend(sequence.shared_tail(self.spec.page_size, &self.store));
            }
        }
        shared_tails.sort_unstable();
        for writers in shared_tails.chunk_by(|a, b| a == b) {
            // Where every owner writes, the last one needs no copy.
            let copies = writers.len().min(self.store.owners(writers[0]) - 1);
            wanted = wanted.saturating_add(copies as u64);
        }
        Ok(wanted)
    }

    /// Appends once it is known that there is room.
    fn grow(&mut self, seq: SeqId, tokens: u32) -> Result<Append> {
        let Self { id, spec, store, sequences, .. } = self;
        let sequence = sequences.get_mut(&seq).ok_or(unknown(*id, seq))?;
        let shared = if tokens > 0 { sequence.shared_tail(spec.page_size, store) } else { None };
        let copy = shared.map(|from| {
            let to = store.take(Some(from));
            store.release(from);
            sequence.pages.pop();
            sequence.pages.push(to);
            (from, to)
        });
        let fresh = sequence.fresh_pages(tokens.into(), spec.page_size);
        store.take_all(&mut sequence.pages, fresh);
        let first = sequence.len;
        sequence.len += tokens;
        Ok(Append { tokens: first..sequence.len, copy })
    }
}
