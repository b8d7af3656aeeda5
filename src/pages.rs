//! The page pool: which pages of the cache each sequence has, and which of them several sequences share. Pure.
//!
//! A sequence of `n` tokens holds `ceil(n / page_size)` pages. Every page counts its owners. A page that is about
//! to be written while it has other owners is replaced by a copy first (copy on write), and only the last page of
//! a sequence can be, so a page that two sequences share stands at one index in both, behind the same pages.

use std::collections::HashMap;
use std::ops::Range;

use crate::{Error, KvSpec, PageTable, Result, SharedPrefix};

/// Names a sequence of a [`PagePool`]. A pool never gives out a handle twice, but two pools may give out the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId(pub u64);

/// Hands out the pages of one cache to sequences that grow, fork, roll back and end.
///
/// The pool only does the book-keeping. What it asks of the GPU is a list of page copies `(from, to)`, which the
/// caller runs with `kv_copy_pages` before the new tokens are written: one call for each append, in the order of
/// the appends. Commands of one queue run in order, so a page may be freed while earlier commands still read it.
///
/// Pages are handed out last freed first, and then by lowest id; a sequence's pages are freed last page first. The
/// same calls therefore give the same pages.
///
/// A call that fails changes nothing.
///
/// ```
/// use wgpu_mla::{Dtype, KvSpec, PagePool};
///
/// let mut pool = PagePool::new(KvSpec { dtype: Dtype::F16, page_size: 4, num_pages: 8 })?;
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
    spec: KvSpec,
    store: Store,
    sequences: HashMap<SeqId, Sequence>,
    next_id: u64,
}

/// What an append gave one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Append {
    /// Positions of the new tokens in their sequence.
    pub tokens: Range<u32>,
    /// The page copy `(from, to)` that must run before the new tokens are written.
    pub copy: Option<(u32, u32)>,
}

impl Append {
    /// The copy as a list of at most one, the way `kv_copy_pages` takes it.
    pub fn copies(&self) -> &[(u32, u32)] {
        self.copy.as_slice()
    }
}

/// What an append gave a batch. Its memory serves the next batch too.
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

/// `block_table` of a batch, i32 `[batch, max_pages]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockTable {
    /// The entries, row by row.
    pub entries: Vec<i32>,
    /// Entries in a row: pages of the longest sequence.
    pub max_pages: usize,
}

impl BlockTable {
    /// The table as `prepare` takes it.
    pub fn page_table(&self) -> PageTable<'_> {
        PageTable::Dense { block_table: &self.entries, max_pages: self.max_pages }
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
}

impl Csr {
    /// The rows as `prepare` takes them.
    pub fn page_table(&self) -> PageTable<'_> {
        PageTable::Csr { kv_indptr: &self.kv_indptr, kv_indices: &self.kv_indices }
    }
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

/// Free pages and the owners of the others.
#[derive(Debug, Clone, PartialEq)]
struct Store {
    /// Pages in the pool.
    total: usize,
    /// Owners of each page that was ever handed out. The ids at and past its end are free: a large pool costs no
    /// memory before it is used. An owner takes memory of its own, so a count cannot overflow.
    owners: Vec<usize>,
    /// Pages that were freed; the last is handed out first.
    freed: Vec<u32>,
}

impl Store {
    fn free_pages(&self) -> usize {
        self.total - self.owners.len() + self.freed.len()
    }

    fn check_room(&self, wanted: u64) -> Result<()> {
        let free = self.free_pages();
        if wanted > free as u64 {
            let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
            return Err(Error::OutOfPages { wanted, free, total: self.total });
        }
        Ok(())
    }

    /// A page for one owner. [`Self::check_room`] comes first.
    fn take(&mut self) -> u32 {
        debug_assert!(self.free_pages() > 0, "check_room must come before take");
        let page = self.freed.pop().unwrap_or_else(|| {
            self.owners.push(0);
            (self.owners.len() - 1) as u32
        });
        self.owners[page as usize] = 1;
        page
    }

    fn share(&mut self, page: u32) {
        self.owners[page as usize] += 1;
    }

    fn release(&mut self, page: u32) {
        let owners = &mut self.owners[page as usize];
        *owners -= 1;
        if *owners == 0 {
            self.freed.push(page);
        }
    }

    fn owners(&self, page: u32) -> usize {
        self.owners.get(page as usize).copied().unwrap_or(0)
    }
}

impl PagePool {
    /// A pool whose pages are all free.
    ///
    /// # Errors
    /// [`Error::Shape`] as [`KvSpec::check`].
    pub fn new(spec: KvSpec) -> Result<Self> {
        spec.check()?;
        let store = Store { total: spec.num_pages as usize, owners: Vec::new(), freed: Vec::new() };
        Ok(Self { spec, store, sequences: HashMap::new(), next_id: 0 })
    }

    /// The cache that the pages belong to.
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
    /// [`Error::UnknownSequence`], [`Error::OutOfPages`].
    pub fn append(&mut self, seq: SeqId, tokens: u32) -> Result<Append> {
        let (sequence, page_size) = (self.sequence(seq)?, self.spec.page_size);
        let copies = tokens > 0 && sequence.shared_tail(page_size, &self.store).is_some();
        self.store.check_room(sequence.fresh_pages(tokens.into(), page_size) + u64::from(copies))?;
        self.grow(seq, tokens)
    }

    /// [`Self::append`] for a whole batch of `(sequence, tokens)`: all of it or nothing.
    ///
    /// Of several sequences that share a last page and all write to it, the last writes in place, if no other
    /// sequence owns the page. A sequence that stands in the batch twice grows twice.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::OutOfPages`].
    pub fn append_batch(&mut self, requests: &[(SeqId, u32)]) -> Result<AppendBatch> {
        let mut batch = AppendBatch::default();
        self.append_batch_into(requests, &mut batch)?;
        Ok(batch)
    }

    /// [`Self::append_batch`] in the memory of an earlier batch.
    ///
    /// # Errors
    /// As [`Self::append_batch`]; the batch is then empty.
    pub fn append_batch_into(&mut self, requests: &[(SeqId, u32)], batch: &mut AppendBatch) -> Result<()> {
        batch.copies.clear();
        batch.tokens.clear();
        self.store.check_room(self.pages_wanted(requests, batch)?)?;
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
    /// [`Error::UnknownSequence`].
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId> {
        let tokens = self.sequence(seq)?.len;
        self.fork_prefix(seq, tokens)
    }

    /// A new sequence with the first `tokens` tokens of another, in the same pages.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Shape`] for more tokens than there are.
    pub fn fork_prefix(&mut self, seq: SeqId, tokens: u32) -> Result<SeqId> {
        let parent = self.sequence(seq)?;
        parent.check_tokens("tokens to fork", tokens)?;
        let pages = parent.pages[..self.spec.pages_for(tokens) as usize].to_vec();
        for &page in &pages {
            self.store.share(page);
        }
        Ok(self.insert(Sequence { pages, len: tokens }))
    }

    /// Rolls a sequence back to its first `tokens` tokens, as speculative decoding does with rejected ones, and
    /// gives up the pages behind them.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Shape`] for more tokens than there are.
    pub fn truncate(&mut self, seq: SeqId, tokens: u32) -> Result<()> {
        let sequence = self.sequences.get_mut(&seq).ok_or(Error::UnknownSequence { id: seq.0 })?;
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
    /// [`Error::UnknownSequence`].
    pub fn free(&mut self, seq: SeqId) -> Result<()> {
        let sequence = self.sequences.remove(&seq).ok_or(Error::UnknownSequence { id: seq.0 })?;
        for &page in sequence.pages.iter().rev() {
            self.store.release(page);
        }
        Ok(())
    }

    /// Tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn len(&self, seq: SeqId) -> Result<u32> {
        Ok(self.sequence(seq)?.len)
    }

    /// Page ids of a sequence, in token order: as many as its tokens fill.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn pages(&self, seq: SeqId) -> Result<&[u32]> {
        Ok(&self.sequence(seq)?.pages)
    }

    /// Sequences in the pool.
    pub fn num_sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Pages that no sequence has.
    pub fn free_pages(&self) -> usize {
        self.store.free_pages()
    }

    /// Pages that at least one sequence has. A shared page counts once.
    pub fn used_pages(&self) -> usize {
        self.store.total - self.store.free_pages()
    }

    /// Sequences that have a page: 0 for a free page and for an id that is not in the pool.
    pub fn owners(&self, page: u32) -> usize {
        self.store.owners(page)
    }

    /// Slot of a token: `page * page_size + offset`.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Shape`] for a token at or past the sequence's length.
    pub fn slot(&self, seq: SeqId, token: u32) -> Result<i64> {
        let slot = self.sequence(seq)?.slot(token, self.spec.page_size);
        let cure = "must be below the sequence's length; append first";
        slot.ok_or(Error::Shape { what: "token", got: token.into(), cure })
    }

    /// Slots of a range of tokens of each sequence, one after another: the `slot_mapping` of `kv_append` for
    /// tokens that were just appended.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Shape`] for a range that goes past its sequence's length.
    pub fn slot_mapping(&self, tokens: &[(SeqId, Range<u32>)]) -> Result<Vec<i64>> {
        let mut slots = Vec::new();
        self.slot_mapping_into(tokens, &mut slots)?;
        Ok(slots)
    }

    /// [`Self::slot_mapping`] in place of what `slots` held.
    ///
    /// # Errors
    /// As [`Self::slot_mapping`]; `slots` is then not to be used.
    pub fn slot_mapping_into(&self, tokens: &[(SeqId, Range<u32>)], slots: &mut Vec<i64>) -> Result<()> {
        slots.clear();
        for (seq, range) in tokens {
            let sequence = self.sequence(*seq)?;
            sequence.check_tokens("end of a token range", range.end)?;
            slots.extend(range.clone().filter_map(|token| sequence.slot(token, self.spec.page_size)));
        }
        Ok(())
    }

    /// `block_table` of a batch: one row a sequence, as long as the longest and filled up with `pad`, which no
    /// kernel reads.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn block_table(&self, seqs: &[SeqId], pad: i32) -> Result<BlockTable> {
        let mut table = BlockTable::default();
        self.block_table_into(seqs, pad, &mut table)?;
        Ok(table)
    }

    /// [`Self::block_table`] in place of what `table` held.
    ///
    /// # Errors
    /// As [`Self::block_table`]; `table` is then empty.
    pub fn block_table_into(&self, seqs: &[SeqId], pad: i32, table: &mut BlockTable) -> Result<()> {
        let BlockTable { entries, max_pages } = table;
        entries.clear();
        *max_pages = 0;
        let mut longest = 0;
        for &seq in seqs {
            longest = longest.max(self.pages(seq)?.len());
        }
        *max_pages = longest;
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
    /// [`Error::UnknownSequence`]; [`Error::Limit`] past 2^31 - 1 page ids in all.
    pub fn csr(&self, seqs: &[SeqId]) -> Result<Csr> {
        let mut csr = Csr::default();
        self.csr_into(seqs, &mut csr)?;
        Ok(csr)
    }

    /// [`Self::csr`] in place of what `csr` held.
    ///
    /// # Errors
    /// As [`Self::csr`]; `csr` is then not to be used.
    pub fn csr_into(&self, seqs: &[SeqId], csr: &mut Csr) -> Result<()> {
        let Csr { kv_indptr, kv_indices, kv_last_page_len } = csr;
        kv_indptr.clear();
        kv_indices.clear();
        kv_last_page_len.clear();
        kv_indptr.push(0);
        for &seq in seqs {
            let Sequence { pages, len } = self.sequence(seq)?;
            let end = kv_indices.len() + pages.len();
            kv_indptr.push(i32::try_from(end).map_err(|_| Error::Limit {
                what: "page ids of one batch",
                need: end as u64,
                limit: i32::MAX as u64,
                cure: "use a smaller batch",
            })?);
            kv_indices.extend(pages.iter().map(|&page| page as i32));
            let before = pages.len().saturating_sub(1) as u32 * self.spec.page_size;
            kv_last_page_len.push((len - before) as i32);
        }
        Ok(())
    }

    /// `seq_lens` of a batch: tokens of each sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn seq_lens(&self, seqs: &[SeqId]) -> Result<Vec<i32>> {
        let mut lens = Vec::new();
        self.seq_lens_into(seqs, &mut lens)?;
        Ok(lens)
    }

    /// [`Self::seq_lens`] in place of what `lens` held.
    ///
    /// # Errors
    /// As [`Self::seq_lens`]; `lens` is then not to be used.
    pub fn seq_lens_into(&self, seqs: &[SeqId], lens: &mut Vec<i32>) -> Result<()> {
        lens.clear();
        for &seq in seqs {
            // A pool has fewer than 2^31 slots, so a sequence has fewer tokens.
            lens.push(self.sequence(seq)?.len as i32);
        }
        Ok(())
    }

    /// Groups of sequences of a batch that begin with the same full pages, for [`Batch`](crate::Batch).
    ///
    /// A sequence is in one group at most, and a page counts only where it is full in the whole group. Groups are
    /// joined, longest prefix first, where that leaves no more pages to read; this finds a good grouping, not
    /// always the best. It changes only when the batch does or a page fills up, so it need not run at every step.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn shared_prefixes(&self, seqs: &[SeqId]) -> Result<Vec<SharedPrefix>> {
        let mut rows: Vec<(&[u32], u32)> = Vec::with_capacity(seqs.len());
        // A sequence that is in no group is right too, so a batch past u32 needs no error.
        for (index, &seq) in (0..u32::MAX).zip(seqs) {
            let Sequence { pages, len } = self.sequence(seq)?;
            rows.push((&pages[..(len / self.spec.page_size) as usize], index));
        }
        // In the order of their pages, rows with a common prefix are neighbours.
        rows.sort_unstable_by(|(a, i), (b, j)| {
            let common = common_pages(a, b);
            a.get(common).cmp(&b.get(common)).then(i.cmp(j))
        });
        let mut groups = group_rows(&rows, self.spec.page_size);
        for group in &mut groups {
            group.sequences.sort_unstable();
        }
        groups.sort_unstable_by_key(|group| group.sequences[0]);
        Ok(groups)
    }

    fn insert(&mut self, sequence: Sequence) -> SeqId {
        let id = SeqId(self.next_id);
        self.next_id += 1;
        self.sequences.insert(id, sequence);
        id
    }

    fn sequence(&self, seq: SeqId) -> Result<&Sequence> {
        self.sequences.get(&seq).ok_or(Error::UnknownSequence { id: seq.0 })
    }

    /// Exactly the pages that a batch takes, copies included.
    fn pages_wanted(&self, requests: &[(SeqId, u32)], batch: &mut AppendBatch) -> Result<u64> {
        let AppendBatch { totals, shared_tails, .. } = batch;
        totals.clear();
        shared_tails.clear();
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
        let Self { spec, store, sequences, .. } = self;
        let sequence = sequences.get_mut(&seq).ok_or(Error::UnknownSequence { id: seq.0 })?;
        let shared = if tokens > 0 { sequence.shared_tail(spec.page_size, store) } else { None };
        let copy = shared.map(|from| {
            let to = store.take();
            store.release(from);
            sequence.pages.pop();
            sequence.pages.push(to);
            (from, to)
        });
        for _ in 0..sequence.fresh_pages(tokens.into(), spec.page_size) {
            sequence.pages.push(store.take());
        }
        let first = sequence.len;
        sequence.len += tokens;
        Ok(Append { tokens: first..sequence.len, copy })
    }
}

/// Leading pages that two sequences share. A page that is in both at one index has the same pages before it in
/// both, so a binary search finds where they part.
fn common_pages(a: &[u32], b: &[u32]) -> usize {
    let (mut low, mut high) = (0, a.len().min(b.len()));
    while low < high {
        let middle = low.midpoint(high);
        if a[middle] == b[middle] { low = middle + 1 } else { high = middle }
    }
    low
}

/// Groups of rows of full pages and their index, which come in the order of their pages.
fn group_rows(rows: &[(&[u32], u32)], page_size: u32) -> Vec<SharedPrefix> {
    let mut groups: Vec<SharedPrefix> =
        rows.iter().map(|&(_, index)| SharedPrefix { sequences: vec![index], tokens: 0 }).collect();
    let mut links: Vec<(usize, usize)> =
        (1..rows.len()).map(|i| (common_pages(rows[i - 1].0, rows[i].0), i)).collect();
    links.retain(|&(common, _)| common > 0);
    links.sort_unstable_by_key(|&(common, i)| (std::cmp::Reverse(common), i));
    let saved = |rows: usize, tokens: u32| (rows as u64).saturating_sub(1) * u64::from(tokens);
    // Rows that are linked so far have one leader, the first of them. The leader's place has the group that may
    // still grow; the others' places are empty or have a group that is done.
    let mut leaders: Vec<usize> = (0..rows.len()).collect();
    for (common, i) in links {
        let tokens = common as u32 * page_size;
        // The leader of `i` is `i`: only this link joins it to the rows before it.
        let leader = leader_of(&mut leaders, i - 1);
        leaders[i] = leader;
        let (before, from) = groups.split_at_mut(i);
        let (left, right) = (&mut before[leader], &mut from[0]);
        let apart = [&*left, &*right].map(|group| saved(group.sequences.len(), group.tokens));
        if saved(left.sequences.len() + right.sequences.len(), tokens) >= apart[0] + apart[1] {
            left.sequences.append(&mut right.sequences);
            left.tokens = tokens;
        } else if apart[0] > apart[1] {
            // The one that saves more is done.
            std::mem::swap(left, right);
        }
    }
    groups.retain(|group| group.sequences.len() > 1);
    groups
}

fn leader_of(leaders: &mut [usize], mut row: usize) -> usize {
    while leaders[row] != row {
        leaders[row] = leaders[leaders[row]];
        row = leaders[row];
    }
    row
}
