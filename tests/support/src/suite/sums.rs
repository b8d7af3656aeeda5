//! Sums over very many tokens, splits or sets, and merges of large logits.
//!
//! A sum of equal terms is the hardest: each addition may round in the same direction, so a running sum of `n` of them is off by
//! about `n` times 1.25e-8.

use wgpu_mla::{
    Backend, Dtype, Error, LseBase, Mask, MergeStates, MergeStatesArgs, MlaPrefill, MlaPrefillArgs,
    PrefillSequence, SplitPolicy, View,
};

use super::memory::upload;
use super::prefill::{forced, variants};
use super::run::{How, Layout, Output};
use super::{Cases, Session};
use crate::close::{Tolerance, close};
use crate::paint::{Make, POISON, Problem, Sees, sequences};

/// A latent, or a value, of the long sums.
fn value(column: usize) -> f32 {
    0.1 + 0.0137 * column as f32
}

fn text(error: Error) -> String {
    error.to_string()
}

const PAGE: u32 = 64;

/// What a page's tokens weigh, by the logit of each: all alike, or the first more than the others.
const LOGITS: [[f32; 2]; 2] = [[0.0, 0.0], [0.7, 0.0]];

/// The LSE of `pages` such pages.
fn lse_of_pages(pages: u32, [first, others]: [f32; 2]) -> f64 {
    let page = f64::from(first).exp() + f64::from(PAGE - 1) * f64::from(others).exp();
    (f64::from(pages) * page).ln()
}

/// A query of two heads over one sequence of f32, whose elements the caller replaces.
fn one_query(tokens: u32) -> Problem {
    let make = Make {
        dims: (256, 32),
        heads: 2,
        page_size: PAGE,
        cache: Dtype::F32,
        query: Dtype::F32,
        sequences: sequences(&[(tokens, 1)]),
        sees: Sees::Full,
        ..Make::default()
    };
    make.build()
}

/// One sequence of `pages` pages of `num_pages`, all alike: latents are the same in every token, logits are in the last column.
fn repeated_page(num_pages: u32, pages: u32, [first, others]: [f32; 2]) -> Problem {
    let mut problem = one_query(PAGE);
    let row = |value: &dyn Fn(usize) -> f32, last: f32| {
        let mut row: Vec<f32> =
            (0..288).map(|column| if column < 256 { value(column) } else { 0.0 }).collect();
        row[287] = last;
        Dtype::F32.encode_all(&row)
    };
    let mut page = row(&value, first);
    page.extend(row(&value, others).repeat(PAGE as usize - 1));
    problem.kv = page.repeat(num_pages as usize);
    problem.q = row(&|_| 0.0, 1.0).repeat(2);
    problem.softmax_scale = 1.0;
    problem.spec.kv.num_pages = num_pages;
    (problem.block_table, problem.max_pages) = ((0..pages as i32).collect(), pages as usize);
    problem.seq_lens = vec![(pages * PAGE) as i32];
    problem.name = format!("{} tokens, logits {first} and {others}", pages * PAGE);
    problem
}

/// Mesa 22's llvmpipe ends the loops of an invocation, all of them together, after 65,535 iterations, without a word: what is longer
/// cannot be tested on it.
fn ends_long_loops<B: Backend>(session: &Session<'_, B>) -> bool {
    session.backend.name().contains("llvmpipe")
}

fn check_pages<B: Backend>(session: &Session<'_, B>, num_pages: u32, pages: u32, policies: &[SplitPolicy]) {
    for logits in LOGITS {
        let problem = repeated_page(num_pages, pages, logits);
        if !session.serves(&problem.spec) {
            session.leave_out();
            continue;
        }
        let out: Vec<f64> = (0..512).map(|i| value(i % 256).into()).collect();
        let lse = vec![lse_of_pages(pages, logits); 2];
        for &policy in policies {
            let how = How { policy, ..How::default() };
            let result = session.compare(&problem, &how, &out, &lse);
            session.note(&format!("{}, {policy:?}", problem.name), result);
        }
    }
}

/// The output is the row that all tokens hold, within the 1e-5 of f32, in one split: of 400,000 tokens with `MLA_FULL=1`, a cache of
/// 460 MB.
pub fn long_sums<B: Backend>(session: &Session<'_, B>) {
    let cases = Cases::asked_for();
    let longest = if cases == Cases::Representative { 160 } else { 512 };
    for pages in [16, 125, longest] {
        check_pages(session, longest, pages, &[SplitPolicy::OneSplit, SplitPolicy::Auto]);
    }
    // Shorter ones are near enough without what the CPU carries in f64.
    if cases == Cases::Representative && session.cases == Cases::Full && session.place == 0 {
        check_pages(session, 512, 512, &[SplitPolicy::OneSplit]);
    }
    if cases == Cases::Full && !ends_long_loops(session) {
        check_pages(session, 6250, 6250, &[SplitPolicy::OneSplit, SplitPolicy::FixedTokens(16)]);
    }
    session.finish("long sums");
}

/// Logits that rise slowly over thousands of tokens of different values: sums that were put aside weigh less and less, and so do the first
/// of many partial results. In [`long_sums`] all tokens have one value, and a wrong weight does not show.
pub fn rising_sums<B: Backend>(session: &Session<'_, B>) {
    const TOKENS: u32 = 5000;
    let mut problem = one_query(TOKENS);
    if !session.serves(&problem.spec) {
        session.leave_out();
        return session.finish("rising sums");
    }
    // The last column has the logit, the others are the value.
    for token in 0..TOKENS {
        let page = problem.block_table[(token / PAGE) as usize] as u32;
        let mut key: Vec<f32> = (0..288u32).map(|column| ((token * 31 + column * 7) % 199) as f32).collect();
        key.iter_mut().for_each(|x| *x = *x / 100.0 - 1.0);
        key[287] = 3.0 * token as f32 / TOKENS as f32;
        let at = ((page * PAGE + token % PAGE) * 288 * 4) as usize;
        problem.kv[at..at + 288 * 4].copy_from_slice(&Dtype::F32.encode_all(&key));
    }
    let mut query = vec![0.0; 288];
    query[287] = 1.0;
    problem.q = Dtype::F32.encode_all(&query.repeat(2));
    problem.softmax_scale = 1.0;
    for policy in [SplitPolicy::OneSplit, SplitPolicy::FixedTokens(4)] {
        session.check(&problem, &How { policy, ..How::default() });
    }
    session.finish("rising sums");
}

/// A row that sees a part of a long item has the bits that it has in an item of its own: sums that were moved to totals, and nothing
/// after them, are the same sums.
pub fn bits_of_long_sums<B: Backend>(session: &Session<'_, B>) {
    let pages = if Cases::asked_for() == Cases::Representative { 160 } else { 512 };
    let with_bounds = |bounds: [u32; 2]| {
        let mut problem = repeated_page(pages, pages, LOGITS[1]);
        problem.q = problem.q.repeat(2);
        problem.query_start_loc = vec![0, 2];
        problem.sees = Sees::Bounds(bounds.into());
        problem
    };
    if !session.serves(&with_bounds([0, 0]).spec) {
        session.leave_out();
        return session.finish("bits of long sums");
    }
    let how = How { policy: SplitPolicy::OneSplit, query_tokens: 2, ..How::default() };
    // Around the tokens after which sums move: 1024 on the CPU, 2048 on wgpu.
    for bound in [0, 1, 1000, 1024, 1025, 2047, 2048, 2049, 3000, 4096, 9000] {
        let first_row = |other: u32| {
            let answer = session.run_decode(&with_bounds([bound, other]), &how)?;
            Ok::<_, String>(answer.bits.map(|bytes| bytes[..bytes.len() / 2].to_vec()))
        };
        let same = first_row(bound).and_then(|alone| Ok(alone == first_row(pages * PAGE)?));
        let result = same.and_then(|same| if same { Ok(()) } else { Err("other bits".to_owned()) });
        session.note(&format!("{bound} tokens of {}", pages * PAGE), result);
    }
    session.finish("bits of long sums");
}

/// [`long_sums`] where the merge has the long sum: up to 32,768 partial results.
pub fn sums_of_many_splits<B: Backend>(session: &Session<'_, B>) {
    check_pages(session, 512, 512, &[SplitPolicy::FixedTokens(1), SplitPolicy::FixedTokens(48)]);
    session.finish("sums of many splits");
}

/// Equal logits, of which each split has another number: a partial result weighs by how many it has, which an LSE in f32 has lost.
pub fn equal_large_logits<B: Backend>(session: &Session<'_, B>) {
    let all = [
        (Dtype::F32, Dtype::F32),
        (Dtype::Bf16, Dtype::Bf16),
        (Dtype::F16, Dtype::F32),
        (Dtype::E4m3, Dtype::F16),
    ];
    // Few rows and many are merged by kernels of two shapes.
    for (cache, query) in session.one_in(2, all) {
        for (heads, q_len) in [(2, 1), (40, 4)] {
            // Many rows take long for each token.
            for len in [45, if heads == 2 { 4099 } else { 259 }] {
                equal_logits(session, [cache, query], [heads, q_len, len]);
            }
        }
    }
    session.finish("equal large logits");
}

/// Latents are 1 for two thirds of the tokens, the first ones, then -1.
fn equal_logits<B: Backend>(
    session: &Session<'_, B>,
    [cache, query]: [Dtype; 2],
    [heads, q_len, len]: [u32; 3],
) {
    let make = Make {
        dims: (256, 32),
        heads,
        cache,
        query,
        sequences: sequences(&[(len, q_len)]),
        sees: Sees::Full,
        ..Make::default()
    };
    let mut problem = make.build();
    if !session.serves(&problem.spec) {
        return session.leave_out();
    }
    let (row, latent, page) = (288, 256, make.page_size as usize);
    (problem.k_scale, problem.q_scale) = (1.0, 1.0);
    let more = (len / 3 * 2) as usize;
    for token in 0..len as usize {
        let slot = problem.block_table[token / page] as usize * page + token % page;
        let mut key = vec![if token < more { 1.0f32 } else { -1.0 }; latent];
        key.resize(row, 0.0);
        key[row - 1] = 1.0;
        let key = cache.encode_all(&key);
        problem.kv[slot * key.len()..][..key.len()].copy_from_slice(&key);
    }
    let mut one = vec![0.0; row];
    one[row - 1] = 1.0;
    problem.q = query.encode_all(&one.repeat((heads * q_len) as usize));
    let mean = (2.0 * more as f64 - f64::from(len)) / f64::from(len);
    let rows = (heads * q_len) as usize;
    // The last is as large as a scale may be.
    for logit in [-1e6f32, -3001.7, 1.0, 3001.7, 1e5, 1e6, 1e10, 5e29] {
        // The logit is `softmax_scale * q . k`, and scales are above 0.
        let mut problem = problem.clone();
        problem.softmax_scale = logit.abs();
        if logit < 0.0 {
            let minus: Vec<f32> = one.iter().map(|x| -x).collect();
            problem.q = query.encode_all(&minus.repeat(rows));
        }
        problem.name =
            format!("{len} tokens of logit {logit:e}, {heads} heads x {q_len}, kv {cache} q {query}");
        let lse = vec![f64::from(logit) + f64::from(len).ln(); rows];
        let policies = match len {
            45 => [SplitPolicy::FixedTokens(16), SplitPolicy::OneSplit],
            259 => [SplitPolicy::FixedTokens(64), SplitPolicy::Auto],
            _ => [SplitPolicy::FixedTokens(512), SplitPolicy::Auto],
        };
        for policy in policies {
            let how = How { policy, query_tokens: q_len, ..How::default() };
            let result = session.compare(&problem, &how, &vec![mean; rows * latent], &lse);
            session.note(&format!("{}, {policy:?}", problem.name), result);
        }
    }
}

/// Like [`long_sums`], for a prefill over expanded keys. Strides of 0 make all rows of keys and values one row.
pub fn prefill_long_sums<B: Backend>(session: &Session<'_, B>) {
    let spec = MlaPrefill {
        num_heads: 1,
        qk_nope_head_dim: 16,
        qk_rope_head_dim: 32,
        v_head_dim: 64,
        dtype: Dtype::F32,
        out: Dtype::F32,
    };
    for variant in variants(session, &spec) {
        if variant.rounds_weights {
            session.leave_out();
            continue;
        }
        let most = if ends_long_loops(session) { 512 } else { 6250 };
        for (pages, logits) in [(16, LOGITS[1]), (512, LOGITS[1]), (most, LOGITS[0])] {
            let run = prefill_repeated_page(session.backend, &spec, variant.name, pages, logits);
            let result = run.and_then(|(out, lse)| {
                let want: Vec<f64> = (0..64).map(|column| value(column).into()).collect();
                let tolerance = Tolerance::decode(Dtype::F32, Dtype::F32, Dtype::F32, false, 1.0, 64);
                close("lse", &lse, &[lse_of_pages(pages, logits)], &Tolerance::lse()).into_result()?;
                close("out", &out, &want, &tolerance).into_result().map(drop)
            });
            session.note(&format!("{} {} keys, logits {logits:?}", variant.name, pages * PAGE), result);
        }
    }
    session.finish("prefill: long sums");
}

fn prefill_repeated_page<B: Backend>(
    backend: &B,
    spec: &MlaPrefill,
    variant: &str,
    pages: u32,
    [first, others]: [f32; 2],
) -> Result<(Vec<f32>, Vec<f32>), String> {
    let keys = pages * PAGE;
    let array = |row: &[f32]| upload(backend, &Dtype::F32.encode_all(row)).map_err(text);
    let mut one = [0.0; 32];
    one[31] = 1.0;
    let (q_nope, q_pe, k_nope) = (array(&[0.0; 16])?, array(&one)?, array(&[0.0; 16])?);
    // Only logits that differ need a row a key.
    let alike = first == others;
    let mut k_pe = vec![0.0; if alike { 32 } else { keys as usize * 32 }];
    for (key, row) in k_pe.chunks_mut(32).enumerate() {
        row[31] = if key % PAGE as usize == 0 { first } else { others };
    }
    let (k_pe, v) = (array(&k_pe)?, array(&(0..64).map(value).collect::<Vec<_>>())?);
    let (out, lse) =
        (upload(backend, &[POISON; 64 * 4]).map_err(text)?, upload(backend, &[POISON; 4]).map_err(text)?);
    let args = MlaPrefillArgs {
        q_nope: View::dense(&q_nope, 1, 16),
        q_pe: View::dense(&q_pe, 1, 32),
        k_nope: View { token_stride: 0, ..View::dense(&k_nope, 1, 16) },
        k_pe: View { head_stride: 0, token_stride: if alike { 0 } else { 32 }, ..View::dense(&k_pe, 1, 32) },
        v: View { token_stride: 0, ..View::dense(&v, 1, 64) },
        out: View::dense(&out, 1, 64),
        lse: View::dense(&lse, 1, 1),
        softmax_scale: 1.0,
        v_scale: 1.0,
    };
    let batch = [PrefillSequence { mask: Mask::Full, ..PrefillSequence::full(0, 1, 0, keys) }];
    backend.once_with(*spec, &forced(variant), &batch, &args).map_err(text)?;
    Ok((floats(backend, 64, &out)?, floats(backend, 1, &lse)?))
}

/// The floats of an array, behind which nothing may be written.
fn floats<B: Backend>(backend: &B, count: usize, buffer: &B::Buffer) -> Result<Vec<f32>, String> {
    let array = Output::new([1, 1, count], Dtype::F32, Layout::Dense, 1);
    Ok(Dtype::F32.decode_all(&array.read(backend, buffer)?))
}

/// A merge of up to 65,536 equal sets is the set. By quads, and by words where rows are no multiple of 8 elements.
pub fn merges_of_many_sets<B: Backend>(session: &Session<'_, B>) {
    let most = if ends_long_loops(session) { 20_000 } else { 65_536 };
    for head_size in [64, 37] {
        for sets in [100, 1000, most] {
            for base in [LseBase::E, LseBase::Two] {
                let run = merge_equal_sets(session.backend, head_size, sets, base);
                let result = run.and_then(|(out, lse)| {
                    let want: Vec<f64> = (0..head_size).map(|column| value(column).into()).collect();
                    let ln = f64::from(sets).ln();
                    let want_lse = 1.5 + if base == LseBase::E { ln } else { ln / std::f64::consts::LN_2 };
                    close("output_lse", &lse, &[want_lse], &Tolerance::merge_lse()).into_result()?;
                    close("output", &out, &want, &Tolerance::merge(Dtype::F32)).into_result().map(drop)
                });
                session.note(&format!("{sets} sets of {head_size}, base {base:?}"), result);
            }
        }
    }
    session.finish("merges of many sets");
}

fn merge_equal_sets<B: Backend>(
    backend: &B,
    head_size: usize,
    sets: u32,
    lse_base: LseBase,
) -> Result<(Vec<f32>, Vec<f32>), String> {
    let row: Vec<f32> = (0..head_size).map(value).collect();
    let states = upload(backend, &Dtype::F32.encode_all(&row.repeat(sets as usize))).map_err(text)?;
    let lses = upload(backend, &Dtype::F32.encode_all(&vec![1.5; sets as usize])).map_err(text)?;
    let (output, output_lse) = (
        upload(backend, &vec![POISON; head_size * 4]).map_err(text)?,
        upload(backend, &[POISON; 4]).map_err(text)?,
    );
    let args = MergeStatesArgs {
        states: View::dense(&states, 1, head_size as u32),
        set_stride: head_size as u64,
        lse: View::dense(&lses, 1, 1),
        lse_set_stride: 1,
        output: View::dense(&output, 1, head_size as u32),
        output_lse: Some(View::dense(&output_lse, 1, 1)),
        lse_base,
        num_heads: 1,
        output_scale: 1.0,
    };
    backend
        .once(MergeStates { dtype: Dtype::F32, head_size: head_size as u32 }, (0..1, sets), &args)
        .map_err(text)?;
    Ok((floats(backend, head_size, &output)?, floats(backend, 1, &output_lse)?))
}
