//! What must not change a single bit of a result, on one device.

use wgpu_mla::{Backend, Dtype, SplitPolicy};

use super::Session;
use super::run::{Answer, How};
use crate::paint::{Make, Problem, Sequence, sequences};

const FIXED: How = How {
    policy: SplitPolicy::FixedTokens(32),
    slicing: super::run::Slicing::Whole,
    layout: super::run::Layout::Dense,
    lse_base: wgpu_mla::LseBase::E,
    csr: false,
    unshared: false,
    grow: false,
    query_tokens: 0,
    slab_pages: 0,
    tiling: None,
    spare_entries: 0,
};

/// Cache and query dtypes that together run every kind of kernel.
const PAIRS: [(Dtype, Dtype); 3] =
    [(Dtype::F32, Dtype::F32), (Dtype::Bf16, Dtype::Bf16), (Dtype::E4m3, Dtype::Bf16)];

/// The order of pages and their size; and the same run twice.
pub fn bits_of_pages<B: Backend>(session: &Session<'_, B>) {
    for (cache, query) in session.one_in(2, PAIRS) {
        let make = Make { cache, query, ..Make::default() };
        for how in [How::default(), FIXED] {
            let problem = make.build();
            same(session, "twice", (&problem, &how), (&problem, &how));
            for (page_size, page_seed) in [(16, 2), (1, 3), (3, 4), (64, 5), (256, 6)] {
                let other = Make { page_size, page_seed, ..make.clone() }.build();
                same(session, "pages", (&problem, &how), (&other, &how));
            }
        }
    }
    session.finish("bits: pages");
}

/// The width of the block table, its unused entries, and its form.
pub fn bits_of_tables<B: Backend>(session: &Session<'_, B>) {
    let make = Make { spare_entries: 0, ..Make::default() };
    for how in [How::default(), FIXED] {
        let problem = make.build();
        let padded = Make { spare_entries: 37, ..make.clone() }.build();
        same(session, "padding", (&problem, &how), (&padded, &how));
        same(session, "CSR", (&problem, &how), (&padded, &How { csr: true, ..how }));
        same(session, "growth", (&problem, &how), (&padded, &How { grow: true, ..how }));
    }
    session.finish("bits: tables");
}

/// Other sequences of the batch and their order, with fixed splits.
pub fn bits_of_batch_position<B: Backend>(session: &Session<'_, B>) {
    for (cache, query) in session.one_in(2, PAIRS) {
        for heads in [6, 16] {
            let make = Make { cache, query, heads, ..Make::default() };
            let batch = sequences(&[(37, 1), (90, 2), (0, 1), (150, 1), (64, 3)]);
            let mut turned = batch.clone();
            turned.reverse();
            turned.extend(sequences(&[(0, 0); 7]).into_iter().skip(5).map(|s| Sequence {
                len: 77,
                q_len: 1,
                ..s
            }));
            let all = Make { sequences: batch.clone(), ..make.clone() }.build();
            let other = Make { sequences: turned.clone(), ..make.clone() }.build();
            for (index, &sequence) in batch.iter().enumerate() {
                let alone = Make { sequences: vec![sequence], ..make.clone() }.build();
                let place = turned.iter().position(|s| s.id == sequence.id).expect("in both");
                let tokens = |problem: &Problem, at: usize| {
                    problem.query_start_loc[at] as usize..problem.query_start_loc[at + 1] as usize
                };
                same_tokens(session, "alone", (&alone, tokens(&alone, 0)), (&all, tokens(&all, index)));
                same_tokens(session, "turned", (&alone, tokens(&alone, 0)), (&other, tokens(&other, place)));
            }
        }
    }
    session.finish("bits: position in the batch");
}

/// A token of a long query, and the same token as a query of its own.
pub fn bits_of_tile_mates<B: Backend>(session: &Session<'_, B>) {
    for (cache, query) in session.one_in(2, PAIRS) {
        for (heads, query_tokens) in [(1, 1), (16, 1), (16, 2)] {
            let how = How { query_tokens, ..FIXED };
            let make = Make { cache, query, heads, ..Make::default() };
            let long = Sequence { id: 1, len: 98, q_len: 5, q_first: 0 };
            let together = Make { sequences: vec![long], ..make.clone() }.build();
            for token in 0..long.q_len {
                let len = long.len - long.q_len + token + 1;
                let single = Sequence { id: 1, len, q_len: 1, q_first: token };
                let single = Make { sequences: vec![single], ..make.clone() }.build();
                let at = token as usize;
                compare(session, "tile mates", (&single, &how, 0..1), (&together, &how, at..at + 1));
            }
        }
    }
    session.finish("bits: tile mates");
}

/// A prefix that is attended once for all, with fixed splits.
pub fn bits_of_shared_prefixes<B: Backend>(session: &Session<'_, B>) {
    for (cache, query) in session.one_in(2, PAIRS) {
        let lens = [(100, 1), (90, 2), (64, 1), (150, 1)];
        let make = Make { cache, query, prefix: 64, sequences: sequences(&lens), ..Make::default() };
        let problem = make.build();
        same(session, "shared prefix", (&problem, &FIXED), (&problem, &How { unshared: true, ..FIXED }));
    }
    session.finish("bits: shared prefixes");
}

/// Notes whether two runs give the same bits.
fn same<B: Backend>(session: &Session<'_, B>, what: &str, a: (&Problem, &How), b: (&Problem, &How)) {
    let rows = |problem: &Problem| 0..problem.total_q();
    compare(session, what, (a.0, a.1, rows(a.0)), (b.0, b.1, rows(b.0)));
}

type Tokens = std::ops::Range<usize>;

/// Notes whether some query tokens of two runs with fixed splits have the same bits.
fn same_tokens<B: Backend>(
    session: &Session<'_, B>,
    what: &str,
    a: (&Problem, Tokens),
    b: (&Problem, Tokens),
) {
    compare(session, what, (a.0, &FIXED, a.1), (b.0, &FIXED, b.1));
}

fn compare<B: Backend>(
    session: &Session<'_, B>,
    what: &str,
    a: (&Problem, &How, Tokens),
    b: (&Problem, &How, Tokens),
) {
    if !(session.serves(&a.0.spec) && session.serves(&b.0.spec)) {
        return session.leave_out();
    }
    let result = || -> Result<(), String> {
        let (left, right) = (session.run_decode(a.0, a.1)?, session.run_decode(b.0, b.1)?);
        for (array, name) in ["out", "lse"].into_iter().enumerate() {
            let (left, right) = (slice(&left, array, a.0, &a.2), slice(&right, array, b.0, &b.2));
            if let Some(at) = left.iter().zip(right).position(|(a, b)| a != b) {
                let differ = left.iter().zip(right).filter(|(a, b)| a != b).count();
                return Err(format!("{name} differs in {differ} of {} bytes, first {at}", left.len()));
            }
            if left.len() != right.len() {
                return Err(format!("{name} has {} and {} bytes", left.len(), right.len()));
            }
        }
        Ok(())
    }();
    session.note(&format!("{what}: [{}] and [{}]", a.0.name, b.0.name), result);
}

/// The bytes of some query tokens.
fn slice<'a>(answer: &'a Answer, array: usize, problem: &Problem, tokens: &Tokens) -> &'a [u8] {
    let bytes = &answer.bits[array];
    let token = bytes.len() / problem.total_q().max(1);
    &bytes[tokens.start * token..tokens.end * token]
}
