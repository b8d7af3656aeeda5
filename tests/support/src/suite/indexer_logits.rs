//! `indexer_logits` against the oracle, on every variant that runs: dtypes, heads, pages, masks, what is not finite, slabs, refusals.

use wgpu_mla::{
    Backend, Binding, Compiled, Dtype, Error, IndexFormat, IndexSpec, IndexerLogits, IndexerLogitsArgs,
    IndexerLogitsBatch, IndexerLogitsExtent, KvView, Mask, OpOptions, PageTable, Step, View,
};

use super::Session;
use super::index_problem::{How, Problem};
use super::memory::{Pages, download, gather, page_dims, scatter, stored_elems, upload};
use super::run::Layout;
use crate::case::IndexLogitsCase;
use crate::paint::POISON;

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
