//! `PagePool` against a simple model of it, which keeps what each slot of the cache holds: after every call each sequence must still read
//! its own tokens, whatever was shared, copied and freed.

use std::collections::BTreeMap;

use wgpu_mla::{Dtype, Error, KvSpec, PagePool, PageTable, SeqId, check_copies, csr_seq_lens};

use crate::source::Source;
use crate::{Target, Verdict};

/// The target.
pub const TARGET: Target = Target {
    name: "pools",
    about: "PagePool against a model of the tokens in its pages",
    run,
    seeds: Vec::new,
    least_ran: 50,
    longest: 1024,
    memory: 64 << 20,
};

/// A token as a sequence reads it: no two are alike.
type Token = u64;

/// What a pool should be.
struct Model {
    kv: KvSpec,
    slab_pages: u32,
    /// The tokens of each sequence.
    sequences: BTreeMap<SeqId, Vec<Token>>,
    /// What each slot holds.
    slots: Vec<Token>,
    /// Every handle that there ever was.
    handles: Vec<SeqId>,
    next: Token,
}

fn run(input: &[u8]) -> Verdict {
    let mut source = Source::new(input);
    let mut kv = KvSpec {
        layout: Dtype::F16.into(),
        page_size: source.between(1, 5),
        num_pages: source.between(1, 24),
    };
    let mut slab_pages = if source.chance(96) { source.between(1, kv.num_pages) } else { kv.num_pages };
    if source.chance(4) {
        (kv.page_size, kv.num_pages, slab_pages) = (source.hostile(), source.hostile(), source.hostile());
    }
    let mut pool = match PagePool::in_slabs(kv, slab_pages) {
        Ok(pool) => pool,
        Err(_) => return Verdict::Refused,
    };
    if kv.num_slots() > 1 << 12 {
        return huge(&mut source, pool);
    }
    let foreign = PagePool::new(kv).expect("a pool").add();
    let mut model = Model {
        kv,
        slab_pages,
        sequences: BTreeMap::new(),
        slots: vec![0; kv.num_slots() as usize],
        handles: vec![foreign],
        next: 0,
    };
    let (mut calls, mut accepted) = (0, 0);
    for _ in 0..source.between(1, 60) {
        let before = pool.clone();
        let done = model.call(&mut source, &mut pool);
        calls += 1;
        accepted += u32::from(done.is_ok());
        if done.is_err() {
            assert!(before == pool, "a call that failed changed the pool");
        }
        model.check(&mut source, &pool);
    }
    if accepted * 2 >= calls { Verdict::Ran } else { Verdict::Refused }
}

impl Model {
    fn handle(&self, source: &mut Source<'_>) -> SeqId {
        // Mostly one that lives.
        let living: Vec<SeqId> = self.sequences.keys().copied().collect();
        if living.is_empty() || source.chance(8) { source.pick(&self.handles) } else { source.pick(&living) }
    }

    fn tokens(&self, source: &mut Source<'_>) -> u32 {
        match source.byte() {
            255 => source.hostile(),
            _ => source.between(0, 2 * self.kv.page_size + 1),
        }
    }

    fn pages_of(&self, tokens: u64) -> u64 {
        tokens.div_ceil(self.kv.page_size.into())
    }

    fn call(&mut self, source: &mut Source<'_>, pool: &mut PagePool) -> Result<(), Error> {
        let seq = self.handle(source);
        let lives = self.sequences.contains_key(&seq);
        match source.below(10) {
            0 | 1 => {
                let seq = pool.add();
                assert!(!self.handles.contains(&seq), "a handle twice");
                self.handles.push(seq);
                self.sequences.insert(seq, Vec::new());
                Ok(())
            }
            2 | 3 => {
                let tokens = self.tokens(source);
                let wanted = self.wanted(pool, &[(seq, tokens)]);
                let done = pool.append(seq, tokens);
                self.expect(&done, wanted, pool);
                let done = done?;
                self.copy(pool, done.copies());
                self.write(pool, seq, done.tokens);
                Ok(())
            }
            4 | 5 => {
                let requests: Vec<_> =
                    (0..source.below(5)).map(|_| (self.handle(source), self.tokens(source))).collect();
                let wanted = self.wanted(pool, &requests);
                let done = pool.append_batch(&requests);
                self.expect(&done, wanted, pool);
                let done = done?;
                self.copy(pool, &done.copies);
                assert_eq!(done.tokens.len(), requests.len());
                for ((seq, tokens), (asked, count)) in done.tokens.into_iter().zip(requests) {
                    assert!(seq == asked && tokens.len() == count as usize, "{tokens:?} for {count}");
                    self.write(pool, seq, tokens);
                }
                Ok(())
            }
            6 | 7 => {
                let len = self.sequences.get(&seq).map_or(0, Vec::len) as u32;
                let (whole, tokens) = (source.chance(128), source.below(u64::from(len) + 2) as u32);
                let fork = if whole { pool.fork(seq) } else { pool.fork_prefix(seq, tokens) };
                let tokens = if whole { len } else { tokens };
                assert_eq!(fork.is_ok(), lives && tokens <= len, "{fork:?}");
                let (fork, parent) = (fork?, self.sequences[&seq][..tokens as usize].to_vec());
                assert!(!self.handles.contains(&fork), "a handle twice");
                self.handles.push(fork);
                self.sequences.insert(fork, parent);
                Ok(())
            }
            8 => {
                let len = self.sequences.get(&seq).map_or(0, Vec::len);
                let tokens = source.below(len as u64 + 2) as usize;
                let done = pool.truncate(seq, tokens as u32);
                assert_eq!(done.is_ok(), lives && tokens <= len, "{done:?}");
                done?;
                self.sequences.get_mut(&seq).expect("it lives").truncate(tokens);
                Ok(())
            }
            _ => {
                let done = pool.free(seq);
                assert_eq!(done.is_ok(), lives, "{done:?}");
                self.sequences.remove(&seq);
                done
            }
        }
    }

    /// Pages that appends take, copies included; None for a sequence that does not live.
    fn wanted(&self, pool: &PagePool, requests: &[(SeqId, u32)]) -> Option<u64> {
        let mut grows: BTreeMap<SeqId, u64> = BTreeMap::new();
        for &(seq, tokens) in requests {
            self.sequences.get(&seq)?;
            *grows.entry(seq).or_default() += u64::from(tokens);
        }
        let mut wanted = 0;
        let mut writers: BTreeMap<u32, usize> = BTreeMap::new();
        for (&seq, &tokens) in &grows {
            let len = self.sequences[&seq].len() as u64;
            wanted += self.pages_of(len + tokens) - self.pages_of(len);
            if tokens > 0 && !len.is_multiple_of(self.kv.page_size.into()) {
                *writers.entry(*pool.pages(seq).expect("it lives").last().expect("a page")).or_default() += 1;
            }
        }
        // The last owner that writes needs no copy.
        let copies = writers.iter().map(|(&page, &count)| count.min(self.owners(pool, page) - 1) as u64);
        Some(wanted + copies.sum::<u64>())
    }

    fn owners(&self, pool: &PagePool, page: u32) -> usize {
        self.sequences.keys().filter(|&&seq| pool.pages(seq).expect("it lives").contains(&page)).count()
    }

    fn expect<T: std::fmt::Debug>(&self, done: &Result<T, Error>, wanted: Option<u64>, pool: &PagePool) {
        match (done, wanted) {
            (Ok(_), Some(wanted)) => assert!(wanted <= u64::from(self.kv.num_pages)),
            (Err(Error::OutOfPages { wanted: said, free, .. }), Some(wanted)) => {
                assert!(*said == wanted && wanted > u64::from(*free) && *free == pool.num_free_pages());
            }
            (Err(Error::UnknownSequence { .. } | Error::OtherPool { .. }), None) => {}
            _ => panic!("{done:?} where {wanted:?} pages are wanted"),
        }
    }

    /// Copies pages as `kv_copy_pages` does.
    fn copy(&mut self, pool: &PagePool, copies: &[(u32, u32)]) {
        check_copies(pool.spec(), copies).expect("copies in one call");
        let before = self.slots.clone();
        let page_size = self.kv.page_size as usize;
        for &(from, to) in copies {
            let [from, to] = [from, to].map(|page| page as usize * page_size);
            self.slots[to..to + page_size].copy_from_slice(&before[from..from + page_size]);
        }
    }

    /// Writes new tokens to their slots, as `kv_append` does.
    fn write(&mut self, pool: &PagePool, seq: SeqId, tokens: std::ops::Range<u32>) {
        let own = self.sequences.get_mut(&seq).expect("it lives");
        assert_eq!(own.len(), tokens.start as usize, "where the new tokens begin");
        // A later request of the batch may have grown it on, so slots are looked up one by one.
        for slot in pool.slot_mapping(&[(seq, tokens)]).expect("slots") {
            self.next += 1;
            own.push(self.next);
            self.slots[slot as usize] = self.next;
        }
    }

    fn check(&self, source: &mut Source<'_>, pool: &PagePool) {
        let mut owners = vec![0; self.kv.num_pages as usize];
        for (&seq, tokens) in &self.sequences {
            let pages = pool.pages(seq).expect("it lives");
            assert_eq!(
                (pool.len(seq), pages.len() as u64),
                (Ok(tokens.len() as u32), self.pages_of(tokens.len() as u64))
            );
            pages.iter().for_each(|&page| owners[page as usize] += 1);
            let slots = pool.slot_mapping(&[(seq, 0..tokens.len() as u32)]).expect("slots");
            for (token, (&slot, &want)) in slots.iter().zip(tokens).enumerate() {
                assert_eq!(pool.slot(seq, token as u32), Ok(slot));
                assert_eq!(self.slots[slot as usize], want, "token {token} of {seq:?}");
            }
            assert!(pool.slot(seq, tokens.len() as u32).is_err(), "a slot past the end");
        }
        for (&count, page) in owners.iter().zip(0..) {
            assert_eq!(pool.owners(page), count, "owners of page {page}");
        }
        let used = owners.iter().filter(|&&count| count > 0).count() as u32;
        assert_eq!((pool.num_used_pages(), pool.num_free_pages()), (used, self.kv.num_pages - used));
        assert_eq!((pool.num_sequences(), pool.slab_pages()), (self.sequences.len(), self.slab_pages));
        let batch: Vec<SeqId> = (0..source.below(6)).map(|_| self.handle(source)).collect();
        if batch.iter().all(|seq| self.sequences.contains_key(seq)) {
            self.exports(pool, &batch);
        } else {
            assert!(pool.block_table(&batch, -1).is_err() && pool.csr(&batch).is_err());
            assert!(pool.seq_lens(&batch).is_err() && pool.shared_prefixes(&batch).is_err());
        }
    }

    /// A batch as arrays.
    fn exports(&self, pool: &PagePool, batch: &[SeqId]) {
        let (table, csr) = (pool.block_table(batch, -7).expect("a table"), pool.csr(batch).expect("rows"));
        let lens = pool.seq_lens(batch).expect("lengths");
        assert_eq!(csr_seq_lens(&csr.kv_indptr, &csr.kv_last_page_len, csr.page_size), Ok(lens.clone()));
        assert!(matches!(table.page_table(), PageTable::Pool { .. }));
        for (i, &seq) in batch.iter().enumerate() {
            let pages: Vec<i32> =
                pool.pages(seq).expect("it lives").iter().map(|&page| page as i32).collect();
            let row = &table.entries[i * table.max_pages as usize..][..table.max_pages as usize];
            assert!(row.starts_with(&pages) && row[pages.len()..].iter().all(|&pad| pad == -7), "{row:?}");
            assert_eq!(csr.kv_indices[csr.kv_indptr[i] as usize..csr.kv_indptr[i + 1] as usize], pages);
            assert_eq!(lens[i] as usize, self.sequences[&seq].len());
        }
        let mut grouped = vec![false; batch.len()];
        for group in pool.shared_prefixes(batch).expect("groups") {
            assert!(
                group.sequences.len() > 1
                    && group.tokens > 0
                    && group.tokens.is_multiple_of(self.kv.page_size)
            );
            let shared = (group.tokens / self.kv.page_size) as usize;
            let first = batch[group.sequences[0] as usize];
            for &member in &group.sequences {
                assert!(!std::mem::replace(&mut grouped[member as usize], true), "{member} is in two groups");
                let seq = batch[member as usize];
                assert_eq!(
                    pool.pages(seq).expect("it lives")[..shared],
                    pool.pages(first).expect("it lives")[..shared]
                );
                assert!(self.sequences[&seq].len() as u32 >= group.tokens);
            }
        }
    }
}

/// A pool of any size, which no model holds: nothing panics, and what fails changes nothing.
fn huge(source: &mut Source<'_>, mut pool: PagePool) -> Verdict {
    let mut seqs = vec![pool.add()];
    for _ in 0..source.between(1, 20) {
        let (seq, tokens) = (source.pick(&seqs), source.hostile());
        let before = (pool.num_free_pages(), pool.len(seq));
        let failed = match source.below(5) {
            0 => pool.append(seq, tokens).is_err(),
            1 => pool.append_batch(&[(seq, tokens), (seq, source.hostile())]).is_err(),
            2 => pool.fork_prefix(seq, tokens).map(|fork| seqs.push(fork)).is_err(),
            3 => pool.truncate(seq, tokens).is_err(),
            _ => pool.slot_mapping(&[(seq, source.hostile()..tokens)]).is_err(),
        };
        if failed {
            assert_eq!(before, (pool.num_free_pages(), pool.len(seq)));
        }
        let len = pool.len(seq).expect("it lives");
        assert_eq!(pool.pages(seq).expect("it lives").len() as u32, pool.spec().pages_for(len));
    }
    Verdict::Ran
}
