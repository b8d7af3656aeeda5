//! The tables of a step: the same words for every form of page table, and no page outside of the pool.

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use wgpu_mla::plan::tables::{HEADER_WORDS, Header};
use wgpu_mla::plan::{Merge, QueryToken, WorkItem};
use wgpu_mla::{
    Batch, Capacity, Dtype, Error, KvSpec, MlaDecode, MlaShape, PageTable, Plan, SharedPrefix, SplitPolicy,
    Tiling, csr_seq_lens, write_tables,
};

const NUM_PAGES: u32 = 500;

fn spec(page_size: u32) -> MlaDecode {
    MlaDecode {
        shape: MlaShape { num_heads: 6, kv_lora_rank: 256, qk_rope_head_dim: 32 },
        kv: KvSpec { layout: Dtype::F16.into(), page_size, num_pages: NUM_PAGES },
        query: Dtype::F16,
        out: Dtype::F32,
    }
}

const TILING: Tiling = Tiling {
    rows_per_tile: 6,
    tokens_per_block: 16,
    target_items: 8,
    min_split_tokens: 16,
    single_sequence_items: 0,
    item_overhead_tokens: 8,
};

/// One query token a sequence.
fn plan(spec: &MlaDecode, seq_lens: &[i32]) -> Plan {
    let starts: Vec<i32> = (0..=seq_lens.len() as i32).collect();
    Plan::new(spec, &TILING, &Batch::new(seq_lens, &starts), SplitPolicy::Auto).unwrap()
}

fn tables(plan: &Plan, pages: PageTable<'_>, spec: &MlaDecode) -> Result<(Header, Vec<u32>), Error> {
    let mut words = Vec::new();
    write_tables(&mut words, &Capacity::of(plan), plan, pages, &spec.kv).map(|header| (header, words))
}

fn section<T: bytemuck::Pod>(words: &[u32], at: u32, count: usize) -> Vec<T> {
    bytemuck::cast_slice(&words[at as usize..][..count * size_of::<T>() / 4]).to_vec()
}

/// A fixed seed: the same draws in every run.
fn config() -> ProptestConfig {
    ProptestConfig {
        cases: 256,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(1),
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    fn dense_and_csr_give_the_same_words_and_garbage_none(
        page_size in 1..=256u32,
        seq_lens in proptest::collection::vec(0..=NUM_PAGES as i32, 0..6),
        spare in 0..4usize,
        ids in proptest::collection::vec(0..NUM_PAGES as i32, 64),
        garbage in any::<i32>(),
    ) {
        let spec = spec(page_size);
        let plan = plan(&spec, &seq_lens);
        let used: Vec<_> = seq_lens.iter().map(|&len| spec.kv.pages_for(len as u32) as usize).collect();
        let max_pages = used.iter().max().unwrap_or(&0) + spare;
        let page = |seq: usize, block: usize| ids[(seq * 31 + block) % ids.len()];

        let mut block_table = vec![garbage; seq_lens.len() * max_pages];
        let (mut kv_indptr, mut kv_indices) = (vec![0], Vec::new());
        for (seq, &used) in used.iter().enumerate() {
            for block in 0..used {
                block_table[seq * max_pages + block] = page(seq, block);
                kv_indices.push(page(seq, block));
            }
            // A row may hold pages that its tokens have not reached.
            kv_indices.extend(vec![garbage; spare]);
            kv_indptr.push(kv_indices.len() as i32);
        }
        let dense = PageTable::Dense { block_table: &block_table, max_pages: max_pages as u32 };
        let (header, words) = tables(&plan, dense, &spec).unwrap();
        let csr = PageTable::Csr { kv_indptr: &kv_indptr, kv_indices: &kv_indices };
        prop_assert_eq!(&tables(&plan, csr, &spec).unwrap(), &(header, words.clone()));

        for (seq, &used) in used.iter().enumerate() {
            let got: Vec<u32> = section(&words, header.pages + plan.page_begin[seq], used);
            let want: Vec<_> = (0..used).map(|block| page(seq, block) as u32).collect();
            prop_assert_eq!(got, want);
        }
        prop_assert_eq!(section::<Header>(&words, 0, 1), vec![header]);
        prop_assert_eq!((header.page_size, header.num_pages), (page_size, NUM_PAGES));
        prop_assert_eq!(section::<WorkItem>(&words, header.items, header.num_items as usize), plan.items);
        prop_assert_eq!(section::<QueryToken>(&words, header.queries, plan.queries.len()), plan.queries);
        prop_assert_eq!(section::<Merge>(&words, header.merges, header.num_merges as usize), plan.merges);
        let partials: Vec<u32> = section(&words, header.merge_partials, plan.merge_partials.len());
        prop_assert_eq!(partials, plan.merge_partials);
    }

    fn sections_are_aligned_and_apart(counts in any::<[u16; 6]>()) {
        let [items, queries, pages, merges, merge_partials, partials] = counts.map(u32::from);
        let capacity = Capacity { items, queries, pages, merges, merge_partials, partials };
        let header = capacity.header(&spec(16).kv);
        let begins = [header.items, header.queries, header.merges, header.merge_partials, header.pages, header.end];
        let words = [items * 8, queries * 2, merges * 3, merge_partials, pages];
        prop_assert_eq!(header.items, HEADER_WORDS);
        for (begin, words) in begins.windows(2).zip(words) {
            prop_assert!(begin[0].is_multiple_of(4), "{:?}", header);
            prop_assert!(begin[1] >= begin[0] + words, "{:?}", header);
        }
    }

    fn a_grown_capacity_holds_both(have in any::<[u32; 6]>(), want in any::<[u32; 6]>()) {
        let of = |[items, queries, pages, merges, merge_partials, partials]: [u32; 6]| Capacity {
            items, queries, pages, merges, merge_partials, partials,
        };
        let (have, want) = (of(have), of(want));
        let grown = have.grown_to(want);
        prop_assert!(grown.holds(have) && grown.holds(want));
        prop_assert_eq!(grown.grown_to(want), grown, "what fits does not grow again");
    }
}

fn a_wild_page_is_named() {
    let spec = spec(16);
    let plan = plan(&spec, &[20, 40]);
    for wild in [-1, i32::MIN, NUM_PAGES as i32, i32::MAX] {
        let block_table = [0, 1, wild, 4, wild, 6];
        let dense = PageTable::Dense { block_table: &block_table, max_pages: 3 };
        let csr = PageTable::Csr { kv_indptr: &[0, 2, 5], kv_indices: &[0, 1, 4, wild, 6] };
        for pages in [dense, csr] {
            let error = tables(&plan, pages, &spec).unwrap_err();
            let want = Error::PageOutOfRange { seq: 1, block: 1, page: wild.into(), num_pages: NUM_PAGES };
            assert_eq!(error, want);
        }
    }
}

fn a_table_of_another_size_is_refused() {
    let spec = spec(16);
    let plan = plan(&spec, &[20, 40]);
    for (entries, max_pages) in [(5, 3), (7, 3), (0, 3), (6, 4), (6, u32::MAX)] {
        let pages = PageTable::Dense { block_table: &[0; 7][..entries], max_pages };
        let error = tables(&plan, pages, &spec).unwrap_err();
        assert!(
            matches!(error, Error::Length { what: "block_table", got, .. } if got == entries as u64),
            "{error}"
        );
    }
    let narrow = PageTable::Dense { block_table: &[0; 4], max_pages: 2 };
    let error = tables(&plan, narrow, &spec).unwrap_err();
    let text = "seq_lens[1] = 40: must be 0 to 32: its row of the block table has no more pages: append pages to it before the step, or correct seq_lens";
    assert_eq!(error.to_string(), text);

    let lost_row = PageTable::Csr { kv_indptr: &[0, 2], kv_indices: &[0; 2] };
    let error = tables(&plan, lost_row, &spec).unwrap_err();
    assert!(matches!(error, Error::Length { what: "kv_indptr", got: 2, want: 3, .. }), "{error}");
    // A short row, a row past the indices, rows that go down, and a negative offset.
    for kv_indptr in [[0, 2, 4], [0, 2, 6], [0, 2, 1], [0, 2, i32::MAX], [-1, 2, 5]] {
        let pages = PageTable::Csr { kv_indptr: &kv_indptr, kv_indices: &[0; 5] };
        let error = tables(&plan, pages, &spec).unwrap_err();
        match kv_indptr {
            [0, 2, 4] => assert!(matches!(error, Error::SeqLen { seq: 1, .. }), "{error}"),
            [first, _, last] => {
                let (index, got) = if first < 0 { (0, first) } else { (2, last) };
                let text =
                    format!("kv_indptr[{index}] = {got}: must be {} to 5", if index == 0 { 0 } else { 2 });
                assert!(error.to_string().starts_with(&text), "{kv_indptr:?}: {error}");
            }
        }
    }
}

fn a_capacity_that_is_too_small_is_refused() {
    let spec = spec(16);
    let plan = plan(&spec, &[300, 300]);
    let exact = Capacity::of(&plan);
    let pages = PageTable::Dense { block_table: &[7; 38], max_pages: 19 };
    assert!(write_tables(&mut Vec::new(), &exact, &plan, pages, &spec.kv).is_ok());
    for (what, capacity) in [
        ("Capacity::items", Capacity { items: exact.items - 1, ..exact }),
        ("Capacity::queries", Capacity { queries: exact.queries - 1, ..exact }),
        ("Capacity::pages", Capacity { pages: exact.pages - 1, ..exact }),
        ("Capacity::merges", Capacity { merges: exact.merges - 1, ..exact }),
        ("Capacity::merge_partials", Capacity { merge_partials: exact.merge_partials - 1, ..exact }),
        ("Capacity::partials", Capacity { partials: exact.partials - 1, ..exact }),
        ("Capacity::items", Capacity::default()),
    ] {
        let error = write_tables(&mut Vec::new(), &capacity, &plan, pages, &spec.kv).unwrap_err();
        assert!(matches!(error, Error::Capacity { what: named, .. } if named == what), "{what}: {error}");
    }
}

/// Counts whose words pass 2^32 must not wrap into a small table.
fn a_capacity_past_32_bits_is_told() {
    let kv = spec(16).kv;
    for capacity in [
        Capacity { items: u32::MAX, ..Capacity::default() },
        Capacity { merges: 1 << 31, ..Capacity::default() },
        Capacity { pages: u32::MAX, ..Capacity::default() },
        Capacity { queries: 1 << 30, merge_partials: 1 << 31, ..Capacity::default() },
    ] {
        assert_eq!(capacity.header(&kv).end, u32::MAX, "{capacity:?}");
    }
}

fn a_prefix_on_other_pages_is_refused() {
    let spec = spec(16);
    let shared = [SharedPrefix { sequences: vec![0, 1, 2], tokens: 48 }];
    let batch = Batch { shared_prefixes: &shared, ..Batch::new(&[60, 70, 80], &[0, 1, 2, 3]) };
    // One tile for all three, which a prefix is shared for.
    let tiling = Tiling { rows_per_tile: 18, ..TILING };
    let plan = Plan::new(&spec, &tiling, &batch, SplitPolicy::FixedTokens(16)).unwrap();
    let same = [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2, 3, 8, 9];
    assert!(tables(&plan, PageTable::Dense { block_table: &same, max_pages: 5 }, &spec).is_ok());
    let mut other = same;
    other[12] = 10;
    let error = tables(&plan, PageTable::Dense { block_table: &other, max_pages: 5 }, &spec).unwrap_err();
    assert_eq!(error, Error::PrefixNotShared { first: 0, other: 2, block: 2 });
    // The same plan without a shared prefix takes any pages.
    let apart =
        Plan::new(&spec, &TILING, &Batch::new(&[60, 70, 80], &[0, 1, 2, 3]), SplitPolicy::Auto).unwrap();
    assert!(tables(&apart, PageTable::Dense { block_table: &other, max_pages: 5 }, &spec).is_ok());
}

fn csr_form_gives_lengths() {
    assert_eq!(csr_seq_lens(&[0, 2, 2, 3], &[5, 0, 16], 16), Ok(vec![21, 0, 16]));
    // Without a page, the last page's length is not looked at.
    assert_eq!(csr_seq_lens(&[0, 0], &[99], 16), Ok(vec![0]));
    assert_eq!(csr_seq_lens(&[0], &[], 16), Ok(vec![]));
    for (indptr, last) in [([0, 2], 0), ([0, 2], 17), ([0, 2], -1), ([2, 1], 1), ([0, i32::MAX], 1)] {
        let error = csr_seq_lens(&indptr, &[last], 16).unwrap_err();
        assert!(matches!(error, Error::SeqLen { seq: 0, .. }), "{indptr:?} {last}: {error}");
    }
    for page_size in [0, 1, 1 << 31, u32::MAX] {
        for indptr in [[i32::MIN, i32::MAX], [i32::MAX, i32::MIN], [0, i32::MAX]] {
            for last in [i32::MIN, -1, 0, 1, i32::MAX] {
                if let Ok(lens) = csr_seq_lens(&indptr, &[last], page_size) {
                    assert_eq!((page_size, lens), (1, vec![i32::MAX]), "{indptr:?} {last}");
                }
            }
        }
    }
    for indptr in [&[][..], &[0], &[0, 1, 2]] {
        let error = csr_seq_lens(indptr, &[1], 16).unwrap_err();
        assert!(matches!(error, Error::Length { what: "kv_indptr", want: 2, .. }), "{error}");
    }
}

crate::tests![
    dense_and_csr_give_the_same_words_and_garbage_none,
    sections_are_aligned_and_apart,
    a_grown_capacity_holds_both,
    a_wild_page_is_named,
    a_table_of_another_size_is_refused,
    a_capacity_that_is_too_small_is_refused,
    a_capacity_past_32_bits_is_told,
    a_prefix_on_other_pages_is_refused,
    csr_form_gives_lengths,
];
