//! Any sequence of operations, against the model.

use super::*;

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

/// The content of a slot that no token was written to.
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
        // One slab to three.
        let spec = spec(page_size, num_pages);
        let pool = PagePool::in_slabs(spec, num_pages.div_ceil(1 + page_size % 3)).unwrap();
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
                assert_eq!(self.pool.len(seq), Err(Error::UnknownSequence { number: seq.number() }));
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
        assert!(wanted > u64::from(free));
        assert_eq!(free, before.num_free_pages());
        assert_eq!(total, before.spec().num_pages);
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
        assert_eq!(self.pool.num_used_pages(), owners.len() as u32);
        assert_eq!(self.pool.num_free_pages(), spec.num_pages - owners.len() as u32);
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
        assert_eq!(table.entries.len(), seqs.len() * table.max_pages as usize);
        assert_eq!(csr_seq_lens(&csr.kv_indptr, &csr.kv_last_page_len, size).unwrap(), lens);
        for (i, seq) in seqs.iter().enumerate() {
            let want = &self.tokens[seq];
            assert_eq!(lens[i] as usize, want.len());
            let row = &table.entries[i * table.max_pages as usize..][..table.max_pages as usize];
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
        assert_eq!(world.pool.num_used_pages(), 0);
        // Nothing leaked: all pages can be allocated again.
        let all = world.pool.add();
        world.pool.append(all, page_size * num_pages).unwrap();
    }
}

crate::tests![every_sequence_reads_its_own_tokens,];
