//! The page pool against a model that knows tokens and no pages.

mod model;

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
    KvSpec { layout: Dtype::F16.into(), page_size, num_pages }
}

fn grown(pool: &mut PagePool, tokens: u32) -> SeqId {
    let seq = pool.add();
    pool.append(seq, tokens).unwrap();
    seq
}

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

fn truncate_gives_pages_back_and_copies_what_is_shared() {
    let mut pool = pool(4, 8);
    let seq = grown(&mut pool, 10);
    pool.truncate(seq, 5).unwrap();
    assert_eq!((pool.pages(seq).unwrap(), pool.num_free_pages()), (&[0, 1][..], 6));
    assert_eq!(pool.append(seq, 5).unwrap().copy, None);
    assert_eq!(pool.pages(seq).unwrap(), [0, 1, 2]);

    let fork = pool.fork(seq).unwrap();
    pool.truncate(fork, 5).unwrap();
    assert_eq!(pool.append(fork, 1).unwrap().copy, Some((1, 3)));
    pool.truncate(seq, 0).unwrap();
    assert_eq!(pool.pages(seq).unwrap(), [0u32; 0]);
    assert_eq!(pool.len(seq).unwrap(), 0);
    assert_eq!(pool.num_free_pages(), 6);
    // The fork still owns page 0; page 1 was freed last.
    assert_eq!(pool.append(seq, 9).map(|a| a.tokens), Ok(0..9));
    assert_eq!(pool.pages(seq).unwrap(), [1, 2, 4]);
}

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

    // A third owner keeps the page, so both writers copy.
    assert_eq!(two.append_batch(&[(b, 1), (a, 1), (c, 0)]).unwrap().copies, [(0, 1), (0, 2)]);
}

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

    // Another pool's first sequence has the number of this one's.
    let foreign = PagePool::new(*pool.spec()).unwrap().add();
    let error = pool.append_batch_into(&[(a, 1), (foreign, 1)], &mut batch).unwrap_err();
    assert_eq!(error, Error::OtherPool { number: a.number() });
    assert_eq!(error.to_string(), "sequence 0 is of another pool: use it with the pool that made it");
    assert_eq!(pool, before);

    // The exact need fits, though each of the two would copy if the other did not.
    pool.append_batch_into(&[(a, 1), (b, 1)], &mut batch).unwrap();
    assert_eq!(batch.copies, [(1, 2)]);
    assert_eq!(pool.num_free_pages(), 0);
}

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

fn sizes_past_u32_are_out_of_pages() {
    let mut pool = pool(1, 8);
    let a = grown(&mut pool, 4);
    let before = pool.clone();
    let want = |error: Error| matches!(error, Error::OutOfPages { free: 4, total: 8, .. });
    assert!(want(pool.append(a, u32::MAX).unwrap_err()));
    assert!(want(pool.append_batch(&[(a, u32::MAX), (a, u32::MAX)]).unwrap_err()));
    assert_eq!(pool, before);
    // The largest pool takes no memory before it is used.
    let mut large = PagePool::new(spec(1, i32::MAX as u32)).unwrap();
    assert_eq!(large.num_free_pages(), i32::MAX as u32);
    let first = large.add();
    assert_eq!(large.append(first, 1).unwrap().tokens, 0..1);
    assert!(matches!(PagePool::new(spec(0, 1)), Err(Error::Shape { what: "page_size", .. })));
    assert!(matches!(PagePool::new(spec(4, 0)), Err(Error::Shape { what: "num_pages", .. })));
}

fn tables_of_a_batch() {
    let mut pool = pool(4, 8);
    let a = grown(&mut pool, 9);
    let empty = pool.add();
    let b = grown(&mut pool, 4);

    let mut table = BlockTable { entries: vec![5; 40], max_pages: 40, page_size: 9, slab_pages: 3 };
    pool.block_table_into(&[b, a, empty], 77, &mut table).unwrap();
    assert_eq!(table.entries, [3, 77, 77, 0, 1, 2, 77, 77, 77]);
    assert_eq!(table.max_pages, 3);
    assert!(matches!(table.page_table(), PageTable::Pool { max_pages: 3, page_size: 4, .. }));

    let mut csr = Csr { kv_indptr: vec![1], kv_indices: vec![1], kv_last_page_len: vec![1], page_size: 9 };
    pool.csr_into(&[b, a, empty], &mut csr).unwrap();
    assert_eq!(csr.kv_indptr, [0, 1, 4, 4]);
    assert_eq!(csr.kv_indices, [3, 0, 1, 2]);
    assert_eq!(csr.kv_last_page_len, [4, 1, 0]);
    assert!(matches!(csr.page_table(), PageTable::PoolCsr { kv_indptr: [0, ..], page_size: 4, .. }));

    assert_eq!(pool.seq_lens(&[b, a, empty]).unwrap(), [4, 9, 0]);
    assert_eq!(pool.slot_mapping(&[(a, 3..5), (empty, 0..0), (b, 2..4)]).unwrap(), [3, 4, 14, 15]);
    assert_eq!(
        pool.block_table(&[], 0).unwrap(),
        BlockTable { page_size: 4, slab_pages: 8, ..BlockTable::default() }
    );
    assert_eq!(pool.csr(&[]).unwrap().kv_indptr, [0]);
}

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

fn unknown_handles_and_tokens_are_errors() {
    let mut pool = pool(4, 8);
    let freed = grown(&mut pool, 5);
    pool.free(freed).unwrap();
    let live = grown(&mut pool, 5);
    assert_ne!(freed, live);
    let before = pool.clone();
    let unknown = Error::UnknownSequence { number: freed.number() };
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

fn a_sequence_stays_in_a_slab_while_it_has_room() {
    // Slabs of pages 0 to 3, 4 to 7, 8 and 9.
    let mut pool = PagePool::in_slabs(spec(4, 10), 4).unwrap();
    let [a, b, c] = [8, 4, 4].map(|tokens| grown(&mut pool, tokens));
    assert_eq!([a, b, c].map(|seq| pool.pages(seq).unwrap().to_vec()), [vec![0, 1], vec![4], vec![5]]);
    pool.append(b, 12).unwrap();
    assert_eq!(
        pool.pages(b).unwrap(),
        [4, 6, 7, 2],
        "the rest of its slab, then that with the most free pages"
    );
    // The copy of a shared page is in its slab.
    pool.truncate(a, 6).unwrap();
    let fork = pool.fork(a).unwrap();
    assert_eq!(pool.append(fork, 1).unwrap().copies(), [(1, 3)]);
    let table = pool.block_table(&[a], -1).unwrap();
    assert_eq!((table.slab_pages, pool.slab_pages()), (4, 4));
    pool.append(c, 8).unwrap();
    assert_eq!(pool.pages(c).unwrap(), [5, 8, 9]);
    assert!(matches!(pool.append(c, 4), Err(Error::OutOfPages { wanted: 1, free: 0, total: 10 })));
}

fn slabs_have_pages_and_are_not_too_many() {
    for (slab_pages, is_good) in [(0, false), (1, false), (2, true), (128, true), (u32::MAX, true)] {
        let made = PagePool::in_slabs(spec(4, 128), slab_pages);
        match made {
            Err(error) => {
                assert!(!is_good && error.to_string().contains("slab_pages"), "{slab_pages}: {error}")
            }
            Ok(_) => assert!(is_good, "{slab_pages}"),
        }
    }
}

crate::tests![
    (in model)
    a_fork_copies_its_partial_page_when_it_writes,
    a_full_shared_page_is_not_copied,
    a_prefix_that_ends_inside_a_full_page_is_copied,
    truncate_gives_pages_back_and_copies_what_is_shared,
    the_last_owner_of_a_batch_writes_in_place,
    a_batch_is_all_or_nothing,
    a_sequence_may_stand_in_a_batch_twice,
    sizes_past_u32_are_out_of_pages,
    tables_of_a_batch,
    tables_reuse_their_memory,
    unknown_handles_and_tokens_are_errors,
    prefixes_count_full_pages_only,
    a_short_prefix_does_not_spoil_a_long_one,
    a_sequence_stays_in_a_slab_while_it_has_room,
    slabs_have_pages_and_are_not_too_many,
];
