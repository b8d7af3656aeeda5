//! `indexer_logits` against the oracle, on every variant that runs: dtypes, heads, pages, masks, what is not finite, slabs, refusals.

use std::ops::Range;

use crate::reference::{IndexRow, indexer_logit};
use wgpu_mla::{
    Backend, Binding, Compiled, Dtype, Error, IndexFormat, IndexSpec, IndexerLogits, IndexerLogitsArgs,
    IndexerLogitsBatch, IndexerLogitsExtent, KvView, Mask, OpOptions, PageTable, Step, View,
};

use super::Session;
use super::memory::{Pages, download, gather, page_dims, scatter, stored_elems, upload};
use super::run::Layout;
use crate::case::IndexLogitsCase;
use crate::paint::{POISON, Rng, WILD};

/// The allowed error, as a share of `k_scale sum_h |w_h| sum_d |q_hd k_d|`.
const SHARE: f64 = 3e-5;

/// Arrays of a batch, dense; slots that no query token sees are poison, as are their scales, and page ids behind a sequence's are wild.
#[derive(Clone)]
pub struct Problem {
    pub spec: IndexerLogits,
    pub seq_lens: Vec<i32>,
    pub starts: Vec<i32>,
    pub block_table: Vec<i32>,
    pub max_pages: usize,
    pub cache: Vec<u8>,
    /// Encoded, `[tokens, heads, 128]`.
    pub q: Vec<u8>,
    /// `[tokens, heads]`.
    pub weights: Vec<f32>,
}

/// Which rows a step scores, and how its arrays lie.
struct How<'a> {
    mask: Mask<'a>,
    tokens: Range<u32>,
    fill: u32,
    layout: Layout,
    csr: bool,
}

impl Problem {
    /// Sequences of so many tokens and query tokens.
    pub fn new(spec: IndexerLogits, sequences: &[(u32, u32)]) -> Self {
        let index = spec.index;
        let mut rng = Rng(u64::from(index.page_size) << 8 | u64::from(spec.num_heads));
        let (page_bytes, page_size) = (index.page_bytes() as usize, index.page_size as usize);
        let mut cache = vec![POISON; index.cache_bytes() as usize];
        let max_pages =
            sequences.iter().map(|s| s.0.div_ceil(index.page_size)).max().unwrap_or(0) as usize + 1;
        let mut block_table: Vec<i32> = (0..sequences.len() * max_pages).map(|i| WILD[i % 4]).collect();
        let mut free: Vec<i32> = (0..index.num_pages as i32).collect();
        rng.shuffle(&mut free);
        let key = index.format.dtype;
        let (mut starts, mut seq_lens) = (vec![0], Vec::new());
        for (seq, &(len, q_len)) in sequences.iter().enumerate() {
            seq_lens.push(len as i32);
            starts.push(starts[seq] + q_len as i32);
            for token in 0..len as usize {
                let (block, slot) = (token / page_size, token % page_size);
                if slot == 0 {
                    block_table[seq * max_pages + block] = free.pop().expect("a page");
                }
                let page = block_table[seq * max_pages + block] as usize * page_bytes;
                let elements: Vec<f32> = (0..128).map(|_| rng.randn() * size_of(key)).collect();
                let bytes = key.encode_all(&elements);
                cache[page + slot * bytes.len()..][..bytes.len()].copy_from_slice(&bytes);
                if key == Dtype::E4m3 {
                    let scale = (0.002 + rng.unit() as f32 * 0.01).to_le_bytes();
                    cache[page + page_size * 128 + slot * 4..][..4].copy_from_slice(&scale);
                }
            }
        }
        let rows = starts.last().map_or(0, |&end| end as usize) * spec.num_heads as usize;
        let q: Vec<f32> = (0..rows * 128).map(|_| rng.randn() * size_of(spec.query)).collect();
        let weights = (0..rows).map(|_| rng.randn()).collect();
        Self { spec, seq_lens, starts, block_table, max_pages, cache, q: spec.query.encode_all(&q), weights }
    }

    /// The arrays of a case file.
    pub fn of_case(case: &IndexLogitsCase) -> Self {
        Self {
            spec: case.spec,
            seq_lens: case.seq_lens.clone(),
            starts: case.query_start_loc.clone(),
            block_table: case.block_table.clone(),
            max_pages: case.max_pages,
            cache: case.index_cache.clone(),
            q: case.q.clone(),
            weights: case.weights.clone(),
        }
    }

    fn tokens(&self) -> u32 {
        self.starts.last().map_or(0, |&end| end as u32)
    }

    /// The place of an element of a key in the cache, in bytes.
    fn element(&self, seq: usize, key: usize, d: usize) -> usize {
        let index = self.spec.index;
        let page = self.block_table[seq * self.max_pages + key / index.page_size as usize] as usize;
        let at = key % index.page_size as usize * 128 + d;
        page * index.page_bytes() as usize + at * index.format.dtype.bytes()
    }

    fn set_key(&mut self, seq: usize, key: usize, d: usize, value: f32) {
        let (at, bytes) = (self.element(seq, key, d), self.spec.index.format.dtype.encode_all(&[value]));
        self.cache[at..][..bytes.len()].copy_from_slice(&bytes);
    }

    fn set_query(&mut self, token: usize, head: usize, d: usize, value: f32) {
        let bytes = self.spec.query.encode_all(&[value]);
        let at = ((token * self.spec.num_heads as usize + head) * 128 + d) * bytes.len();
        self.q[at..][..bytes.len()].copy_from_slice(&bytes);
    }

    fn csr(&self) -> (Vec<i32>, Vec<i32>) {
        let (mut indptr, mut indices) = (vec![0], Vec::new());
        for (row, &len) in self.block_table.chunks(self.max_pages).zip(&self.seq_lens) {
            indices.extend_from_slice(&row[..(len as usize).div_ceil(self.spec.index.page_size as usize)]);
            indptr.push(indices.len() as i32);
        }
        (indptr, indices)
    }

    /// The sequence of a query token, and how many keys it sees.
    fn sees(&self, mask: Mask<'_>, token: u32) -> (usize, usize) {
        let seq = self.starts.iter().skip(1).position(|&end| token < end as u32).expect("a sequence");
        let (len, begin, end) = (i64::from(self.seq_lens[seq]), self.starts[seq], self.starts[seq + 1]);
        let i = i64::from(token) - i64::from(begin);
        let seen = match mask {
            Mask::Causal => len - i64::from(end - begin) + i + 1,
            Mask::CausalFrom(first) => first.saturating_add(i),
            Mask::Full => len,
            Mask::Bounds(bounds) => bounds[token as usize].into(),
        };
        (seq, seen.clamp(0, len) as usize)
    }

    /// The oracle's view of a query token of a sequence, by its decoded queries.
    fn row<'a>(&'a self, seq: usize, token: usize, q: &'a [f32]) -> IndexRow<'a> {
        let heads = self.spec.num_heads as usize;
        IndexRow {
            cache: &self.cache,
            index: self.spec.index,
            pages: &self.block_table[seq * self.max_pages..][..self.max_pages],
            q: &q[token * heads * 128..][..heads * 128],
            weights: &self.weights[token * heads..][..heads],
        }
    }

    /// Compares the logits of a step, dense rows of `columns`, encoded.
    fn compare(&self, how: &How<'_>, columns: usize, got: &[u8]) -> Result<(), String> {
        let q = self.spec.query.decode_all(&self.q);
        for (row, token) in how.tokens.clone().enumerate() {
            let (seq, seen) = self.sees(how.mask, token);
            let oracle = self.row(seq, token as usize, &q);
            for column in 0..columns {
                let bytes = &got[(row * columns + column) * 4..][..4];
                let bits = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                let wrong =
                    |want: &str| Err(format!("token {token} key {column}: {bits:#x} instead of {want}"));
                if column >= seen {
                    let want = if column < how.fill as usize {
                        0xFF80_0000
                    } else {
                        u32::from_le_bytes([POISON; 4])
                    };
                    if bits != want {
                        return wrong(&format!("{want:#x}, which it does not see"));
                    }
                    continue;
                }
                let [want, size] = indexer_logit(&oracle, column);
                let logit = f64::from(f32::from_bits(bits));
                let is_close = if want.is_finite() {
                    (logit - want).abs() <= SHARE * size + 1e-37
                } else {
                    logit == want || logit.is_nan() && want.is_nan()
                };
                if !is_close {
                    return wrong(&format!("{want} ({logit}, of {size})"));
                }
            }
        }
        Ok(())
    }
}

/// Compares logits with those of a case file: the largest error as a share of what is allowed.
///
/// # Errors
/// The first logit that is further away.
pub fn close_logits(case: &IndexLogitsCase, got: &[f32]) -> Result<f64, String> {
    let problem = Problem::of_case(case);
    let q = case.spec.query.decode_all(&case.q);
    let mask = if case.causal { Mask::Causal } else { Mask::Full };
    if got.len() != case.logits.len() {
        return Err(format!("{} logits instead of {}", got.len(), case.logits.len()));
    }
    let mut worst = 0.0;
    for (i, (&got, &want)) in got.iter().zip(&case.logits).enumerate() {
        let (token, key) = (i / case.columns, i % case.columns);
        let (seq, seen) = problem.sees(mask, token as u32);
        let [_, size] = if key < seen { indexer_logit(&problem.row(seq, token, &q), key) } else { [0.0; 2] };
        let (error, allowed) = ((f64::from(got) - f64::from(want)).abs(), SHARE * size + 1e-37);
        // A NaN is never within what is allowed.
        if got != want && (error.is_nan() || error > allowed) {
            return Err(format!("token {token} key {key}: {got} instead of {want}, of {size}"));
        }
        worst = if got == want { worst } else { f64::max(worst, error / allowed) };
    }
    Ok(worst)
}

/// Runs a case on the best variant.
///
/// # Errors
/// What is wrong.
pub fn check_logits_case<B: Backend>(backend: &B, case: &IndexLogitsCase) -> Result<(), String> {
    let problem = Problem::of_case(case);
    let mask = if case.causal { Mask::Causal } else { Mask::Full };
    let (tokens, fill) = (0..problem.tokens(), case.columns as u32);
    let how = How { mask, tokens, fill, layout: Layout::Dense, csr: false };
    let text = |error: Error| error.to_string();
    let op = backend.compile(case.spec).map_err(text)?;
    let step = op.step(Default::default()).map_err(text)?;
    Rig { backend, op, step }.check(&problem, &how, None)
}

/// Elements of a size that uses a dtype's range.
fn size_of(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::E4m3 => 90.0,
        Dtype::F16 => 3.0,
        Dtype::Bf16 => 1e3,
        Dtype::F32 => 0.1,
    }
}

fn spec(key: Dtype, query: Dtype, num_heads: u32, page_size: u32) -> IndexerLogits {
    let format = IndexFormat { dtype: key, ..IndexFormat::DEEPSEEK_V32 };
    let num_pages = 900u32.div_ceil(page_size) + 3;
    IndexerLogits { index: IndexSpec { format, page_size, num_pages }, num_heads, query }
}

/// A compiled op with a step.
struct Rig<'a, B: Backend> {
    backend: &'a B,
    op: Compiled<IndexerLogits, B>,
    step: Step<IndexerLogits, B>,
}

impl<'a, B: Backend> Rig<'a, B> {
    fn new(backend: &'a B, spec: IndexerLogits, variant: &str) -> Result<Self, Error> {
        let op = backend.compile_with(spec, &OpOptions { variant: Some(variant.to_owned()) })?;
        let step = op.step(Default::default())?;
        Ok(Self { backend, op, step })
    }

    /// Prepares, binds, runs and compares. The logits have a column more than the step reaches, the binding's room is the step's.
    fn check(&mut self, problem: &Problem, how: &How<'_>, slab_pages: Option<u32>) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let spec = problem.spec;
        let (indptr, indices) = problem.csr();
        let pages = if how.csr {
            PageTable::Csr { kv_indptr: &indptr, kv_indices: &indices }
        } else {
            PageTable::Dense { block_table: &problem.block_table, max_pages: problem.max_pages as u32 }
        };
        let batch = IndexerLogitsBatch {
            pages,
            seq_lens: &problem.seq_lens,
            query_start_loc: &problem.starts,
            mask: how.mask,
            tokens: how.tokens.clone(),
            fill: how.fill,
        };
        self.op.prepare(&mut self.step, batch).map_err(text)?;
        let used = self.step.used();
        let most = how.tokens.clone().map(|token| problem.sees(how.mask, token).1 as u32).max();
        let rows = how.tokens.len();
        let want = most.map_or(IndexerLogitsExtent::default(), |most| IndexerLogitsExtent {
            tokens: how.tokens.end,
            rows: rows as u32,
            columns: most.max(how.fill),
        });
        if used != want {
            return Err(format!("it reaches {used:?} instead of {want:?}"));
        }

        let (heads, columns) = (spec.num_heads as usize, used.columns as usize + 1);
        let q_dims = [problem.tokens() as usize, heads, 128];
        let q_at = how.layout.strides(q_dims, 8);
        let q = upload(self.backend, &scatter(&problem.q, q_dims, spec.query.bytes(), q_at)).map_err(text)?;
        let w_dims = [problem.tokens() as usize, heads, 1];
        let w_at = how.layout.strides(w_dims, 1);
        let weights = Dtype::F32.encode_all(&problem.weights);
        let weights = upload(self.backend, &scatter(&weights, w_dims, 4, w_at)).map_err(text)?;
        let dims = [rows, 1, columns];
        let logits_at = how.layout.strides(dims, 1);
        let before = vec![POISON; logits_at.end(dims) * 4];
        let logits = upload(self.backend, &before).map_err(text)?;

        let kv = spec.index.kv();
        let row = stored_elems(&kv, &spec.index.copies().shape);
        let places = if how.layout == Layout::Dense { Pages::dense(&kv, row) } else { Pages::gaps(&kv, row) };
        let bytes = kv.dtype().bytes();
        let (mut buffers, mut slabs) = (Vec::new(), Vec::new());
        let whole = scatter(&problem.cache, page_dims(&kv, row), bytes, places.strides());
        for slab in
            problem.cache.chunks(slab_pages.unwrap_or(u32::MAX) as usize * spec.index.page_bytes() as usize)
        {
            let bytes = if slab_pages.is_some() { slab } else { &whole };
            buffers.push(upload(self.backend, bytes).map_err(text)?);
        }
        slabs.extend(&buffers);
        let cache = match slab_pages {
            Some(pages) => spec.index.view_in_slabs(&slabs, pages, 0).map_err(text)?,
            None => places.view(&buffers[0]),
        };
        let args = IndexerLogitsArgs {
            q: q_at.view(&q),
            weights: w_at.view(&weights),
            cache,
            logits: logits_at.view(&logits),
        };
        let bound: Binding<_, B> = self.op.bind(&args, used).map_err(text)?;
        self.op.run(&self.step, &bound).map_err(text)?;
        let bytes = download(self.backend, &logits, before.len()).map_err(text)?;
        let (got, intact) = gather(&bytes, dims, 4, logits_at);
        intact?;
        problem.compare(how, columns, &got)
    }
}

/// Runs a problem on every variant that runs here.
fn each_variant<B: Backend>(
    session: &Session<'_, B>,
    spec: IndexerLogits,
    mut check: impl FnMut(&mut Rig<'_, B>) -> Vec<(String, Result<(), String>)>,
) {
    for candidate in session.backend.variants(&spec).into_iter().filter(|found| found.lacks.is_none()) {
        let what = format!("{} {spec:?}", candidate.name);
        match Rig::new(session.backend, spec, candidate.name) {
            Ok(mut rig) => {
                check(&mut rig)
                    .into_iter()
                    .for_each(|(how, result)| session.note(&format!("{what}, {how}"), result));
            }
            Err(error) => session.note(&what, Err(error.to_string())),
        }
    }
}

/// Lengths around pages and blocks, several query tokens, a sequence without any, and one that is shorter than its query tokens.
const SEQUENCES: [(u32, u32); 6] = [(200, 1), (0, 1), (37, 3), (130, 0), (64, 1), (2, 4)];

/// Every dtype of keys and queries, heads that fill no tile, pages of any size, dense and with gaps.
pub fn index_logits<B: Backend>(session: &Session<'_, B>) {
    let mut specs = vec![
        spec(Dtype::E4m3, Dtype::E4m3, 64, 64),
        spec(Dtype::E4m3, Dtype::E4m3, 32, 7),
        spec(Dtype::F16, Dtype::F16, 20, 16),
        spec(Dtype::Bf16, Dtype::Bf16, 64, 1),
    ];
    let more: Vec<_> = Dtype::ALL
        .into_iter()
        .flat_map(|key| Dtype::ALL.map(|query| (key, query)))
        .enumerate()
        .map(|(i, (key, query))| spec(key, query, [1, 5, 33, 48, 64, 9, 16][i % 7], [3, 64, 256, 12][i % 4]))
        .collect();
    specs.extend(session.one_in(5, more));
    for spec in specs {
        let problem = Problem::new(spec, &SEQUENCES);
        each_variant(session, spec, |rig| {
            [Layout::Dense, Layout::Gaps]
                .into_iter()
                .map(|layout| {
                    let csr = layout == Layout::Gaps;
                    let how = How { mask: Mask::Causal, tokens: 0..10, fill: 0, layout, csr };
                    (format!("csr {csr}"), rig.check(&problem, &how, None))
                })
                .collect()
        });
    }
    session.finish("index logits");
}

/// Masks, parts of the query tokens, and columns that are filled.
pub fn index_logits_of_masks<B: Backend>(session: &Session<'_, B>) {
    let spec = spec(Dtype::E4m3, Dtype::E4m3, 64, 64);
    let problem = Problem::new(spec, &SEQUENCES);
    let bounds = [7, 0, 37, 0, 99, 64, 1, 2, 0, 2];
    each_variant(session, spec, |rig| {
        let masks = [
            Mask::Causal,
            Mask::Full,
            Mask::CausalFrom(-1),
            Mask::CausalFrom(i64::MAX),
            Mask::Bounds(&bounds),
        ];
        let mut results = Vec::new();
        for (mask, (tokens, fill)) in masks.into_iter().flat_map(|mask| {
            [(0..10, 0), (0..10, 260), (2..7, 40), (2..7, 38), (2..7, 2), (3..3, 9)].map(|how| (mask, how))
        }) {
            let how = How { mask, tokens: tokens.clone(), fill, layout: Layout::Dense, csr: false };
            results.push((format!("{mask:?} {tokens:?} fill {fill}"), rig.check(&problem, &how, None)));
        }
        results
    });
    session.finish("index logits of masks");
}

/// NaN and infinity in keys, queries and weights, and heads that fill no tile beside them.
pub fn index_logits_not_finite<B: Backend>(session: &Session<'_, B>) {
    let specs = [
        spec(Dtype::E4m3, Dtype::E4m3, 20, 64),
        spec(Dtype::F16, Dtype::F16, 64, 16),
        spec(Dtype::Bf16, Dtype::Bf16, 9, 16),
        spec(Dtype::F32, Dtype::F32, 20, 16),
    ];
    for spec in session.one_in(2, specs) {
        let mut problem = Problem::new(spec, &[(150, 1), (40, 2), (30, 1)]);
        let infinity = if spec.index.format.dtype == Dtype::E4m3 { 3.0 } else { f32::INFINITY };
        problem.set_key(0, 17, 3, f32::NAN);
        problem.set_key(0, 149, 127, f32::NAN);
        problem.set_key(0, 64, 0, infinity);
        problem.set_key(0, 65, 100, -infinity);
        problem.set_key(0, 66, 5, infinity);
        problem.set_key(0, 66, 6, -infinity);
        // What token 1 does not see.
        problem.set_key(1, 39, 77, f32::NAN);
        // A query of NaN, and a weight of infinity.
        problem.set_query(3, spec.num_heads as usize - 1, 9, f32::NAN);
        let mut infinite = problem.clone();
        infinite.weights[spec.num_heads as usize - 1] = f32::NEG_INFINITY;
        // Infinite keys then give an infinity, and no NaN that would hide one of a head that is not there.
        let mut positive = problem.clone();
        positive.weights.iter_mut().for_each(|weight| *weight = weight.abs());
        each_variant(session, spec, |rig| {
            let how = How { mask: Mask::Causal, tokens: 0..4, fill: 0, layout: Layout::Dense, csr: false };
            [("keys", &problem), ("a weight", &infinite), ("weights of one sign", &positive)]
                .map(|(what, problem)| (what.to_owned(), rig.check(problem, &how, None)))
                .into()
        });
    }
    session.finish("index logits that are not finite");
}

/// Caches in slabs: each scores its own keys.
pub fn index_logits_in_slabs<B: Backend>(session: &Session<'_, B>) {
    let spec = spec(Dtype::E4m3, Dtype::E4m3, 64, 64);
    let problem = Problem::new(spec, &SEQUENCES);
    each_variant(session, spec, |rig| {
        let how = How { mask: Mask::Causal, tokens: 0..10, fill: 210, layout: Layout::Dense, csr: true };
        [4, 17].map(|pages| (format!("{pages} pages a slab"), rig.check(&problem, &how, Some(pages)))).into()
    });
    session.finish("index logits in slabs");
}

/// One step serves batches of other lengths and rows.
pub fn index_logits_of_batches<B: Backend>(session: &Session<'_, B>) {
    let spec = spec(Dtype::E4m3, Dtype::E4m3, 64, 64);
    each_variant(session, spec, |rig| {
        let batches: [&[(u32, u32)]; 4] = [&SEQUENCES, &[(700, 2)], &[(3, 1)], &[(0, 1), (129, 1), (128, 2)]];
        batches
            .map(|sequences| {
                let problem = Problem::new(spec, sequences);
                let tokens = 0..problem.tokens();
                let how = How { mask: Mask::Causal, tokens, fill: 5, layout: Layout::Dense, csr: false };
                (format!("{sequences:?}"), rig.check(&problem, &how, None))
            })
            .into()
    });
    session.finish("index logits of batches");
}

/// Specs, batches, pages and sizes.
pub fn refuses_index_logits<B: Backend>(session: &Session<'_, B>) {
    let refuses = |what: &str, result: Result<(), Error>, why: &str| {
        let checked = match result {
            Ok(()) => Err("was accepted".to_owned()),
            Err(error) if error.to_string().contains(why) => Ok(()),
            Err(error) => Err(format!("{error:?} does not name {why:?}")),
        };
        session.note(what, checked);
    };
    let result = || -> Result<(), Error> {
        let backend = session.backend;
        let spec = spec(Dtype::E4m3, Dtype::E4m3, 64, 64);
        for num_heads in [0, 65] {
            let compiled = backend.compile(IndexerLogits { num_heads, ..spec }).map(drop);
            refuses(&format!("{num_heads} heads"), compiled, "1..=64");
        }
        let op = backend.compile(spec)?;
        let (q, weights) = (backend.buffer(2 * 64 * 128)?, backend.buffer(2 * 64 * 4)?);
        let (cache, logits) = (backend.buffer(spec.index.cache_bytes())?, backend.buffer(2 * 100 * 4)?);
        let good = IndexerLogitsArgs {
            q: View::dense(&q, 64, 128),
            weights: View::dense(&weights, 64, 1),
            cache: spec.index.view(&cache),
            logits: View::dense(&logits, 1, 100),
        };
        let room = IndexerLogitsExtent { tokens: 2, rows: 2, columns: 100 };
        let bound = op.bind(&good, room)?;
        let pages = PageTable::Dense { block_table: &[3, 1, 2, -1], max_pages: 2 };
        let (seq_lens, query_start_loc) = (&[100, 64][..], &[0, 1, 2][..]);
        let batch = || IndexerLogitsBatch {
            pages,
            seq_lens,
            query_start_loc,
            mask: Mask::Causal,
            tokens: 0..2,
            fill: 0,
        };
        let run = |batch: IndexerLogitsBatch<'_>| {
            let mut step = op.step(Default::default())?;
            op.prepare(&mut step, batch)?;
            op.run(&step, &bound)
        };
        session.note("a good batch", run(batch()).map_err(|error| error.to_string()));
        let wild = IndexerLogitsBatch { seq_lens: &[100, 65], ..batch() };
        refuses("a wild page", run(wild), "page -1");
        refuses(
            "a row that is too short",
            run(IndexerLogitsBatch { seq_lens: &[129, 64], ..batch() }),
            "append pages",
        );
        refuses(
            "a token too many",
            run(IndexerLogitsBatch { tokens: 0..3, ..batch() }),
            "the end of tokens 3",
        );
        refuses("a column too many", run(IndexerLogitsBatch { fill: 101, ..batch() }), "columns");
        refuses(
            "a device table",
            run(IndexerLogitsBatch { pages: PageTable::Device, ..batch() }),
            "from the host",
        );
        let unprepared = op.step(Default::default())?;
        refuses("a step that was not prepared", op.run(&unprepared, &bound), "prepare");
        for (what, args, why) in [
            (
                "a stride of 100",
                IndexerLogitsArgs { q: View { head_stride: 100, ..good.q }, ..good.clone() },
                "multiple of 8",
            ),
            (
                "rows that overlap",
                IndexerLogitsArgs { logits: View { token_stride: 99, ..good.logits }, ..good.clone() },
                "overlap",
            ),
            (
                "weights past the buffer",
                IndexerLogitsArgs { weights: View { offset: 1, ..good.weights }, ..good.clone() },
                "weights",
            ),
            (
                "logits in the cache",
                IndexerLogitsArgs { logits: View { buffer: &cache, ..good.logits }, ..good.clone() },
                "same buffer",
            ),
            (
                "a cache past its buffer",
                IndexerLogitsArgs { cache: KvView { offset: 4, ..good.cache.clone() }, ..good.clone() },
                "kv",
            ),
            (
                "a cache between words",
                IndexerLogitsArgs { cache: KvView { offset: 2, ..good.cache.clone() }, ..good.clone() },
                "multiple of 4",
            ),
        ] {
            refuses(what, op.bind(&args, room).map(drop), why);
        }
        Ok(())
    }();
    session.note("index logits", result.map_err(|error| error.to_string()));
    session.finish("refuses index logits");
}
