//! The page pool against a model that knows tokens and no pages.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use proptest::prelude::*;
use wgpu_mla::{
    AppendBatch, BlockTable, Csr, Dtype, Error, KvSpec, PagePool, PageTable, SeqId, SharedPrefix,
    check_copies, csr_seq_lens,
};

fn pool(page_size: u32, num_pages: u32) -> PagePool {
    PagePool::new(spec(page_size, num_pages)).unwrap()
}

fn spec(page_size: u32, num_pages: u32) -> KvSpec {
    KvSpec { dtype: Dtype::F16, page_size, num_pages }
}

fn grown(pool: &mut PagePool, tokens: u32) -> SeqId {
    let seq = pool.add();
    pool.append(seq, tokens).unwrap();
    seq
}

#[derive(Debug, Clone)]
enum Op {
    Add,
    Append(usize, u32),
    AppendBatch(Vec<(usize, u32)>),
    Fork(usize),
    ForkPrefix(usize, u32),
    Truncate(usize, u32),
    Free(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let seq = 0..64usize;
    prop_oneof![
        1 => Just(Op::Add),
        3 => (seq.clone(), 0..12u32).prop_map(|(s, n)| Op::Append(s, n)),
        4 => prop::collection::vec((seq.clone(), 0..4u32), 0..8).prop_map(Op::AppendBatch),
        3 => seq.clone().prop_map(Op::Fork),
        2 => (seq.clone(), 0..100u32).prop_map(|(s, n)| Op::ForkPrefix(s, n)),
        2 => (seq.clone(), 0..100u32).prop_map(|(s, n)| Op::Truncate(s, n)),
        1 => seq.prop_map(Op::Free),
    ]
}

/// What a slot holds that no token was written to.
const POISON: u64 = u64::MAX;

/// A pool, the memory it manages, and each sequence's tokens. Every token that is ever written is another number.
struct World {
    pool: PagePool,
    memory: Vec<u64>,
    tokens: BTreeMap<SeqId, Vec<u64>>,
    written: u64,
}

impl World {
    fn new(page_size: u32, num_pages: u32) -> Self {
        let pool = pool(page_size, num_pages);
        let memory = vec![POISON; pool.spec().num_slots() as usize];
        Self { pool, memory, tokens: BTreeMap::new(), written: 0 }
    }

    fn pick(&self, index: usize) -> Option<SeqId> {
        let live = self.tokens.len();
        (live > 0).then(|| *self.tokens.keys().nth(index % live).unwrap())
    }

    fn run(&mut self, op: &Op) {
        match *op {
            Op::Add => {
                let seq = self.pool.add();
                assert!(self.tokens.insert(seq, Vec::new()).is_none(), "a handle was given out twice");
            }
            Op::Append(index, tokens) => {
                let Some(seq) = self.pick(index) else { return };
                let before = self.pool.clone();
                match self.pool.append(seq, tokens) {
                    Ok(append) => self.write(append.copies(), &[(seq, append.tokens.clone())]),
                    Err(error) => self.refused(&before, error),
                }
            }
            Op::AppendBatch(ref requests) => {
                let requests: Vec<(SeqId, u32)> =
                    requests.iter().filter_map(|&(i, n)| Some((self.pick(i)?, n))).collect();
                self.append_batch(&requests);
            }
            Op::Fork(index) => {
                let Some(seq) = self.pick(index) else { return };
                let fork = self.pool.fork(seq).unwrap();
                let tokens = self.tokens[&seq].clone();
                assert!(self.tokens.insert(fork, tokens).is_none(), "a handle was given out twice");
            }
            Op::ForkPrefix(index, tokens) => {
                let Some(seq) = self.pick(index) else { return };
                let tokens = tokens % (self.tokens[&seq].len() as u32 + 1);
                let fork = self.pool.fork_prefix(seq, tokens).unwrap();
                self.tokens.insert(fork, self.tokens[&seq][..tokens as usize].to_vec());
            }
            Op::Truncate(index, tokens) => {
                let Some(seq) = self.pick(index) else { return };
                let tokens = tokens % (self.tokens[&seq].len() as u32 + 1);
                self.pool.truncate(seq, tokens).unwrap();
                self.tokens.get_mut(&seq).unwrap().truncate(tokens as usize);
            }
            Op::Free(index) => {
                let Some(seq) = self.pick(index) else { return };
                self.pool.free(seq).unwrap();
                self.tokens.remove(&seq);
                assert_eq!(self.pool.len(seq), Err(Error::UnknownSequence { id: seq.0 }));
            }
        }
    }

    /// A batch takes and copies what its requests would one by one, or fails and changes nothing.
    fn append_batch(&mut self, requests: &[(SeqId, u32)]) {
        let before = self.pool.clone();
        let mut one_by_one = before.clone();
        let mut copies = Vec::new();
        let mut fits = true;
        for &(seq, tokens) in requests {
            let append = one_by_one.append(seq, tokens);
            fits &= append.is_ok();
            copies.extend(append.ok().and_then(|append| append.copy));
        }
        match self.pool.append_batch(requests) {
            Ok(batch) => {
                assert!(fits);
                assert_eq!(self.pool, one_by_one);
                assert_eq!(batch.copies, copies);
                self.write(&batch.copies, &batch.tokens);
            }
            Err(error) => {
                assert!(!fits);
                self.refused(&before, error);
            }
        }
    }

    fn refused(&self, before: &PagePool, error: Error) {
        let Error::OutOfPages { wanted, free, total } = error else { panic!("{error}") };
        assert!(wanted > free);
        assert_eq!(free, before.free_pages());
        assert_eq!(total, before.spec().num_pages as usize);
        assert_eq!(&self.pool, before);
    }

    /// What the GPU would do: all copies of the call, then the new tokens.
    fn write(&mut self, copies: &[(u32, u32)], tokens: &[(SeqId, Range<u32>)]) {
        check_copies(self.pool.spec(), copies).unwrap();
        let size = self.pool.spec().page_size as usize;
        for &(from, to) in copies {
            self.memory.copy_within(from as usize * size..(from as usize + 1) * size, to as usize * size);
        }
        let mut slots = self.pool.slot_mapping(tokens).unwrap().into_iter();
        for (seq, range) in tokens {
            let own = self.tokens.get_mut(seq).unwrap();
            assert_eq!(range.start as usize, own.len());
            for _ in range.clone() {
                self.written += 1;
                own.push(self.written);
                self.memory[slots.next().unwrap() as usize] = self.written;
            }
        }
        assert_eq!(slots.next(), None);
    }

    fn check(&mut self) {
        let seqs: Vec<SeqId> = self.tokens.keys().copied().collect();
        let mut owners: BTreeMap<u32, usize> = BTreeMap::new();
        for &seq in &seqs {
            for &page in self.pool.pages(seq).unwrap() {
                *owners.entry(page).or_default() += 1;
            }
        }
        let spec = *self.pool.spec();
        assert_eq!(self.pool.num_sequences(), seqs.len());
        assert_eq!(self.pool.used_pages(), owners.len());
        assert_eq!(self.pool.free_pages(), spec.num_pages as usize - owners.len());
        for page in 0..spec.num_pages {
            let count = owners.get(&page).copied().unwrap_or(0);
            assert_eq!(self.pool.owners(page), count);
            if count == 0 {
                let size = spec.page_size as usize;
                self.memory[page as usize * size..][..size].fill(POISON);
            }
        }
        self.check_tables(&seqs);
        check_groups(&self.pool, &seqs);
    }

    /// Every sequence reads back its own tokens, through each of the tables.
    fn check_tables(&self, seqs: &[SeqId]) {
        let size = self.pool.spec().page_size;
        let table = self.pool.block_table(seqs, -7).unwrap();
        let csr = self.pool.csr(seqs).unwrap();
        let lens = self.pool.seq_lens(seqs).unwrap();
        assert_eq!(table.entries.len(), seqs.len() * table.max_pages);
        assert_eq!(csr_seq_lens(&csr.kv_indptr, &csr.kv_last_page_len, size).unwrap(), lens);
        for (i, seq) in seqs.iter().enumerate() {
            let want = &self.tokens[seq];
            assert_eq!(lens[i] as usize, want.len());
            let row = &table.entries[i * table.max_pages..][..table.max_pages];
            let used = want.len().div_ceil(size as usize);
            assert!(row[used..].iter().all(|&page| page == -7));
            let (begin, end) = (csr.kv_indptr[i] as usize, csr.kv_indptr[i + 1] as usize);
            assert_eq!(&csr.kv_indices[begin..end], &row[..used]);
            let slot = |token: u32| (row[(token / size) as usize] as u32 * size + token % size) as usize;
            let read: Vec<u64> = (0..want.len() as u32).map(|token| self.memory[slot(token)]).collect();
            assert_eq!(&read, want, "{seq:?}");
            for token in 0..want.len() as u32 {
                assert_eq!(self.pool.slot(*seq, token).unwrap() as usize, slot(token));
            }
        }
    }
}

fn full_pages(pool: &PagePool, seq: SeqId) -> &[u32] {
    &pool.pages(seq).unwrap()[..(pool.len(seq).unwrap() / pool.spec().page_size) as usize]
}

fn check_groups(pool: &PagePool, seqs: &[SeqId]) {
    let groups = pool.shared_prefixes(seqs).unwrap();
    let mut grouped = BTreeSet::new();
    for SharedPrefix { sequences, tokens } in &groups {
        assert!(sequences.len() > 1);
        assert!(sequences.is_sorted());
        let rows: Vec<&[u32]> = sequences.iter().map(|&i| full_pages(pool, seqs[i as usize])).collect();
        let common = (0..rows[0].len())
            .take_while(|&block| rows.iter().all(|row| row.get(block) == rows[0].get(block)))
            .count();
        assert!(common > 0);
        assert_eq!(*tokens as usize, common * pool.spec().page_size as usize);
        for &sequence in sequences {
            assert!(grouped.insert(sequence), "sequence {sequence} is in two groups");
        }
    }
    let mut alone = BTreeSet::new();
    for (i, &seq) in seqs.iter().enumerate() {
        if let Some(first) = full_pages(pool, seq).first()
            && !grouped.contains(&(i as u32))
        {
            assert!(alone.insert(*first), "two sequences share page {first} and are in no group");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_sequence_reads_its_own_tokens(
        page_size in 1..6u32,
        num_pages in 1..28u32,
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let mut world = World::new(page_size, num_pages);
        for op in &ops {
            world.run(op);
            world.check();
        }
        for seq in world.tokens.keys().copied().collect::<Vec<_>>() {
            world.pool.free(seq).unwrap();
        }
        assert_eq!(world.pool.used_pages(), 0);
        // Nothing leaked: all pages can be had again.
        let all = world.pool.add();
        world.pool.append(all, page_size * num_pages).unwrap();
    }
}

#[test]
fn a_fork_copies_its_partial_page_when_it_writes() {
    let mut pool = pool(4, 8);
    let parent = grown(&mut pool, 6);
    let child = pool.fork(parent).unwrap();
    assert_eq!(pool.pages(child).unwrap(), [0, 1]);
    assert_eq!((pool.owners(0), pool.owners(1)), (2, 2));

    assert_eq!(pool.append(child, 0).unwrap().copy, None);
    let append = pool.append(child, 3).unwrap();
    assert_eq!(append.copies(), [(1, 2)]);
    assert_eq!(append.tokens, 6..9);
    assert_eq!(pool.pages(child).unwrap(), [0, 2, 3]);
    assert_eq!(pool.slot_mapping(&[(child, 6..9)]).unwrap(), [10, 11, 12]);

    // The parent is alone on page 1 now.
    assert_eq!(pool.append(parent, 1).unwrap().copy, None);
    assert_eq!(pool.pages(parent).unwrap(), [0, 1]);
}

#[test]
fn a_full_shared_page_is_not_copied() {
    let mut pool = pool(4, 8);
    let parent = grown(&mut pool, 8);
    let child = pool.fork(parent).unwrap();
    let prefix = pool.fork_prefix(parent, 4).unwrap();
    assert_eq!(pool.append(child, 1).unwrap().copy, None);
    assert_eq!(pool.append(prefix, 1).unwrap().copy, None);
    assert_eq!(pool.pages(child).unwrap(), [0, 1, 2]);
    assert_eq!(pool.pages(prefix).unwrap(), [0, 3]);
}

#[test]
fn a_prefix_that_ends_inside_a_full_page_is_copied() {
    let mut pool = pool(4, 8);
    let parent = grown(&mut pool, 8);
    let prefix = pool.fork_prefix(parent, 5).unwrap();
    assert_eq!(pool.pages(prefix).unwrap(), [0, 1]);
    assert_eq!(pool.append(prefix, 1).unwrap().copy, Some((1, 2)));
    assert_eq!(pool.append(parent, 1).unwrap().copy, None);
    let empty = pool.fork_prefix(parent, 0).unwrap();
    assert_eq!(pool.pages(empty).unwrap(), [0u32; 0]);
}

#[test]
fn truncate_gives_pages_back_and_copies_what_is_shared() {
    let mut pool = pool(4, 8);
    let seq = grown(&mut pool, 10);
    pool.truncate(seq, 5).unwrap();
    assert_eq!((pool.pages(seq).unwrap(), pool.free_pages()), (&[0, 1][..], 6));
    assert_eq!(pool.append(seq, 5).unwrap().copy, None);
    assert_eq!(pool.pages(seq).unwrap(), [0, 1, 2]);

    let fork = pool.fork(seq).unwrap();
    pool.truncate(fork, 5).unwrap();
    assert_eq!(pool.append(fork, 1).unwrap().copy, Some((1, 3)));
    pool.truncate(seq, 0).unwrap();
    assert_eq!(pool.pages(seq).unwrap(), [0u32; 0]);
    assert_eq!(pool.len(seq).unwrap(), 0);
    assert_eq!(pool.free_pages(), 6);
    // Page 0 is still the fork's; page 1 was freed last.
    assert_eq!(pool.append(seq, 9).map(|a| a.tokens), Ok(0..9));
    assert_eq!(pool.pages(seq).unwrap(), [1, 2, 4]);
}

#[test]
fn the_last_owner_of_a_batch_writes_in_place() {
    let mut pool = pool(4, 8);
    let a = grown(&mut pool, 2);
    let b = pool.fork(a).unwrap();
    let c = pool.fork(a).unwrap();
    let mut two = pool.clone();

    let batch = pool.append_batch(&[(b, 1), (a, 1), (c, 1)]).unwrap();
    assert_eq!(batch.copies, [(0, 1), (0, 2)]);
    assert_eq!(batch.tokens, [(b, 2..3), (a, 2..3), (c, 2..3)]);
    assert_eq!(pool.slot_mapping(&batch.tokens).unwrap(), [6, 10, 2]);
    check_copies(pool.spec(), &batch.copies).unwrap();

    // One owner stays behind, so both writers copy.
    assert_eq!(two.append_batch(&[(b, 1), (a, 1), (c, 0)]).unwrap().copies, [(0, 1), (0, 2)]);
}

#[test]
fn a_batch_is_all_or_nothing() {
    let mut pool = pool(4, 3);
    let a = grown(&mut pool, 6);
    let b = pool.fork(a).unwrap();
    let before = pool.clone();
    let mut batch = AppendBatch::default();

    // A copy, then a page more than there is.
    let error = pool.append_batch_into(&[(a, 1), (b, 3)], &mut batch).unwrap_err();
    assert_eq!(error, Error::OutOfPages { wanted: 2, free: 1, total: 3 });
    assert_eq!(pool, before);
    assert!(batch.copies.is_empty() && batch.tokens.is_empty());

    let unknown = SeqId(99);
    let error = pool.append_batch_into(&[(a, 1), (unknown, 1)], &mut batch).unwrap_err();
    assert_eq!(error, Error::UnknownSequence { id: 99 });
    assert_eq!(pool, before);

    // The exact need fits, though each of the two would copy if the other did not.
    pool.append_batch_into(&[(a, 1), (b, 1)], &mut batch).unwrap();
    assert_eq!(batch.copies, [(1, 2)]);
    assert_eq!(pool.free_pages(), 0);
}

#[test]
fn a_sequence_may_stand_in_a_batch_twice() {
    let mut pool = pool(4, 2);
    let a = grown(&mut pool, 2);
    let b = pool.fork(a).unwrap();
    let batch = pool.append_batch(&[(a, 1), (b, 1), (a, 1)]).unwrap();
    assert_eq!(batch.copies, [(0, 1)]);
    assert_eq!(batch.tokens, [(a, 2..3), (b, 2..3), (a, 3..4)]);
    let before = pool.clone();
    let error = pool.append_batch(&[(b, 1), (b, 1)]).unwrap_err();
    assert_eq!(error, Error::OutOfPages { wanted: 1, free: 0, total: 2 });
    assert_eq!(pool, before);
}

#[test]
fn sizes_past_u32_are_out_of_pages() {
    let mut pool = pool(1, 8);
    let a = grown(&mut pool, 4);
    let before = pool.clone();
    let want = |error: Error| matches!(error, Error::OutOfPages { free: 4, total: 8, .. });
    assert!(want(pool.append(a, u32::MAX).unwrap_err()));
    assert!(want(pool.append_batch(&[(a, u32::MAX), (a, u32::MAX)]).unwrap_err()));
    assert_eq!(pool, before);
    // The largest pool there is costs nothing before it is used.
    let mut large = PagePool::new(spec(1, i32::MAX as u32)).unwrap();
    assert_eq!(large.free_pages(), i32::MAX as usize);
    let first = large.add();
    assert_eq!(large.append(first, 1).unwrap().tokens, 0..1);
    assert!(matches!(PagePool::new(spec(0, 1)), Err(Error::Shape { what: "page_size", .. })));
    assert!(matches!(PagePool::new(spec(4, 0)), Err(Error::Shape { what: "num_pages", .. })));
}

#[test]
fn tables_of_a_batch() {
    let mut pool = pool(4, 8);
    let a = grown(&mut pool, 9);
    let empty = pool.add();
    let b = grown(&mut pool, 4);

    let mut table = BlockTable { entries: vec![5; 40], max_pages: 40 };
    pool.block_table_into(&[b, a, empty], 77, &mut table).unwrap();
    assert_eq!(table.entries, [3, 77, 77, 0, 1, 2, 77, 77, 77]);
    assert_eq!(table.max_pages, 3);
    assert!(matches!(table.page_table(), PageTable::Dense { max_pages: 3, .. }));

    let mut csr = Csr { kv_indptr: vec![1], kv_indices: vec![1], kv_last_page_len: vec![1] };
    pool.csr_into(&[b, a, empty], &mut csr).unwrap();
    assert_eq!(csr.kv_indptr, [0, 1, 4, 4]);
    assert_eq!(csr.kv_indices, [3, 0, 1, 2]);
    assert_eq!(csr.kv_last_page_len, [4, 1, 0]);
    assert!(matches!(csr.page_table(), PageTable::Csr { kv_indptr: [0, ..], .. }));

    assert_eq!(pool.seq_lens(&[b, a, empty]).unwrap(), [4, 9, 0]);
    assert_eq!(pool.slot_mapping(&[(a, 3..5), (empty, 0..0), (b, 2..4)]).unwrap(), [3, 4, 14, 15]);
    assert_eq!(pool.block_table(&[], 0).unwrap(), BlockTable::default());
    assert_eq!(pool.csr(&[]).unwrap().kv_indptr, [0]);
}

#[test]
fn tables_reuse_their_memory() {
    let mut pool = pool(4, 64);
    let seqs: Vec<SeqId> = (0..8).map(|_| grown(&mut pool, 8)).collect();
    let requests: Vec<(SeqId, u32)> = seqs.iter().map(|&seq| (seq, 1)).collect();
    let (mut batch, mut table, mut csr) = (AppendBatch::default(), BlockTable::default(), Csr::default());
    let (mut slots, mut lens) = (Vec::new(), Vec::new());
    let mut step = || {
        pool.append_batch_into(&requests, &mut batch).unwrap();
        pool.slot_mapping_into(&batch.tokens, &mut slots).unwrap();
        pool.block_table_into(&seqs, -1, &mut table).unwrap();
        pool.csr_into(&seqs, &mut csr).unwrap();
        pool.seq_lens_into(&seqs, &mut lens).unwrap();
        assert_eq!((slots.len(), table.max_pages), (8, 3));
        [
            batch.tokens.as_ptr() as usize,
            slots.as_ptr() as usize,
            table.entries.as_ptr() as usize,
            csr.kv_indices.as_ptr() as usize,
            lens.as_ptr() as usize,
        ]
    };
    let first = step();
    assert_eq!([step(), step(), step()], [first; 3]);
}

#[test]
fn unknown_handles_and_tokens_are_errors() {
    let mut pool = pool(4, 8);
    let freed = grown(&mut pool, 5);
    pool.free(freed).unwrap();
    let live = grown(&mut pool, 5);
    assert_ne!(freed, live);
    let before = pool.clone();
    let unknown = Error::UnknownSequence { id: freed.0 };
    let both = [live, freed];
    assert_eq!(pool.append(freed, 1), Err(unknown.clone()));
    assert_eq!(pool.append_batch(&[(freed, 0)]).unwrap_err(), unknown);
    assert_eq!(pool.fork(freed), Err(unknown.clone()));
    assert_eq!(pool.fork_prefix(freed, 0), Err(unknown.clone()));
    assert_eq!(pool.truncate(freed, 0), Err(unknown.clone()));
    assert_eq!(pool.free(freed), Err(unknown.clone()));
    assert_eq!(pool.len(freed), Err(unknown.clone()));
    assert_eq!(pool.pages(freed), Err(unknown.clone()));
    assert_eq!(pool.slot(freed, 0), Err(unknown.clone()));
    assert_eq!(pool.slot_mapping(&[(live, 0..1), (freed, 0..0)]), Err(unknown.clone()));
    assert_eq!(pool.block_table(&both, 0), Err(unknown.clone()));
    assert_eq!(pool.csr(&both), Err(unknown.clone()));
    assert_eq!(pool.seq_lens(&both), Err(unknown.clone()));
    assert_eq!(pool.shared_prefixes(&both), Err(unknown));

    let shape = |error| matches!(error, Error::Shape { got: 6, .. });
    assert!(shape(pool.truncate(live, 6).unwrap_err()));
    assert!(shape(pool.fork_prefix(live, 6).unwrap_err()));
    assert!(shape(pool.slot_mapping(&[(live, 4..6)]).unwrap_err()));
    assert!(shape(pool.slot(live, 6).unwrap_err()));
    assert!(pool.slot(live, 5).is_err());
    assert_eq!(pool.owners(8), 0);
    assert_eq!(pool, before);
}

#[test]
fn prefixes_count_full_pages_only() {
    let mut pool = pool(4, 32);
    let a = grown(&mut pool, 11);
    let b = pool.fork(a).unwrap();
    let other = grown(&mut pool, 8);
    let group = |sequences: &[u32], tokens| SharedPrefix { sequences: sequences.to_vec(), tokens };
    assert_eq!(pool.shared_prefixes(&[a, other, b]).unwrap(), [group(&[0, 2], 8)]);
    assert_eq!(pool.shared_prefixes(&[a, other]).unwrap(), []);
    // Page 1 is full in `a` and not in `c`.
    let c = pool.fork_prefix(a, 7).unwrap();
    assert_eq!(pool.shared_prefixes(&[c, a]).unwrap(), [group(&[0, 1], 4)]);
    pool.truncate(c, 3).unwrap();
    assert_eq!(pool.shared_prefixes(&[c, a]).unwrap(), []);
}

#[test]
fn a_short_prefix_does_not_spoil_a_long_one() {
    let mut pool = pool(4, 400);
    let system = grown(&mut pool, 8);
    let mut child = |tokens| {
        let seq = pool.fork(system).unwrap();
        pool.append(seq, tokens).unwrap();
        seq
    };
    // Two beams of a long text, between conversations that share the system prompt.
    let (before, long, after) = (child(4), child(400), child(4));
    let beam = pool.fork(long).unwrap();
    let groups = pool.shared_prefixes(&[before, long, system, beam, after]).unwrap();
    assert_eq!(
        groups,
        [
            SharedPrefix { sequences: vec![0, 2, 4], tokens: 8 },
            SharedPrefix { sequences: vec![1, 3], tokens: 408 },
        ]
    );
}
