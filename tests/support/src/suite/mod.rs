//! One conformance suite for every backend.
//!
//! A group is a function that takes a [`Session`]: it runs all of its checks and then panics with every failure. [`groups`] lists
//! them by op.

pub mod changed;
pub mod context_parallel;
pub mod correct_attn_out;
pub mod decode;
pub mod errors;
pub mod extremes;
pub mod factors;
pub mod guard;
pub mod index_problem;
pub mod indexer_append;
pub mod indexer_logits;
pub mod indexer_query;
pub mod invariance;
pub mod kv_append;
mod kv_b_proj;
pub mod kv_calibrate;
pub mod kv_gather;
mod layer;
mod layer_batches;
mod layer_codes;
pub mod layer_lists;
pub mod layer_range;
pub mod layer_rig;
pub mod lists;
pub mod memory;
pub mod merge_states;
mod mixed;
pub mod non_finite;
pub mod ops;
pub mod prefill;
pub mod project;
pub mod ranks;
pub mod records;
pub mod reorg_kvcache;
pub mod rope;
pub mod run;
pub mod selecting;
pub mod selecting_arrays;
pub mod slabs;
pub mod sparse;
mod sparse_errors;
pub mod sums;
#[cfg(not(target_arch = "wasm32"))]
mod threads;
pub mod top_k;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use wgpu_mla::{Backend, Compiled, DecodeOptions, Dtype, Error, MlaDecode, Result, Shares, Tiling};

use super::case::{Case, DcpDecodeCase};
use super::close::{Report, Tolerance, close};
use super::paint::Problem;
use run::{Answer, How};

/// What a decode is compiled from: its spec and options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Request {
    spec: MlaDecode,
    query_tokens: u32,
    topk: u32,
    attn_sink: bool,
    tiling: Option<Tiling>,
}

/// Decodes, each with what it is compiled from.
type Decodes<B> = Vec<(Request, Rc<Compiled<MlaDecode, B>>)>;

/// Decodes a problem elsewhere: what it wrote, and whether the variant rounds weights.
pub type Elsewhere<'a> = &'a dyn Fn(&Problem, &How) -> Result<(Answer, bool), String>;

/// A backend under test, with the kernels that it has compiled so far: a software device spends its time compiling.
pub struct Session<'a, B: Backend> {
    pub backend: &'a B,
    /// Forces a decode variant. Specs that it does not serve are left out, and counted.
    pub variant: Option<&'a str>,
    /// How much of each group is taken.
    pub cases: Cases,
    /// Cuts every decode that [`Session::check`] runs into each of these numbers of ranks; none: decodes are left whole.
    pub ranks: &'a [u32],
    /// Decodes the parts of odd ranks, on another device; `None`: this one decodes all.
    pub odd_ranks: Option<Elsewhere<'a>>,
    /// The variant's index in the backend's table: each variant has other representatives.
    pub place: usize,
    decodes: RefCell<Decodes<B>>,
    checks: Cell<usize>,
    left_out: Cell<usize>,
    /// The sums over all groups: checks, and checks that were left out.
    totals: Cell<(usize, usize)>,
    failures: RefCell<Vec<String>>,
}

impl<'a, B: Backend> Session<'a, B> {
    pub fn new(backend: &'a B) -> Self {
        Self {
            backend,
            variant: None,
            cases: Cases::Full,
            ranks: &[],
            odd_ranks: None,
            place: 0,
            decodes: RefCell::default(),
            checks: Cell::default(),
            left_out: Cell::default(),
            totals: Cell::default(),
            failures: RefCell::default(),
        }
    }

    /// Whether a group takes a pair of a cache and a query dtype, by their places in [`Dtype::ALL`]. One that does not take
    /// every pair meets each cache dtype with one query dtype, another one for each `turn`.
    pub fn takes(&self, turn: usize, cache: usize, query: usize) -> bool {
        let all = Dtype::ALL.len();
        match self.cases {
            Cases::Full => true,
            Cases::Product => (cache + query + turn).is_multiple_of(all),
            // One pair: over the dims, which are the turns, each dtype of a cache and of a query is taken once.
            Cases::Representative => cache == (turn + self.place) % all && query == (3 * turn + 1) % all,
        }
    }

    /// All of a list whose entries each compile a kernel; as representatives only every `n`th, other ones for the next variant.
    pub fn one_in<T>(&self, n: usize, list: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
        let (n, first) = match self.cases {
            Cases::Representative => (n, self.place % n),
            _ => (1, 0),
        };
        list.into_iter().skip(first).step_by(n)
    }

    /// Checks that ran since the session began, and that were left out as not served.
    pub fn totals(&self) -> (usize, usize) {
        let unfinished = self.checks.get() + self.left_out.get();
        assert!(unfinished == 0, "the group ends with {unfinished} checks after its last `finish`");
        self.totals.get()
    }

    /// The decode of a spec, compiled once.
    pub fn decode(&self, spec: &MlaDecode) -> Result<Rc<Compiled<MlaDecode, B>>> {
        self.decode_for(spec, 1)
    }

    /// Like [`Session::decode`], made for that many query tokens a sequence.
    pub fn decode_for(&self, spec: &MlaDecode, query_tokens: u32) -> Result<Rc<Compiled<MlaDecode, B>>> {
        let options = DecodeOptions { query_tokens, ..DecodeOptions::default() };
        self.compiled(spec, options)
    }

    /// The decode of a problem, with the lists and sinks that it has.
    pub fn decode_of(&self, problem: &Problem, how: &How) -> Result<Rc<Compiled<MlaDecode, B>>> {
        let topk = problem.lists.as_ref().map_or(0, |lists| lists.topk as u32 + how.spare_entries);
        let (attn_sink, tiling) = (problem.attn_sink.is_some(), how.tiling);
        let query_tokens = how.query_tokens;
        self.compiled(
            &problem.spec,
            DecodeOptions { query_tokens, topk, attn_sink, tiling, ..DecodeOptions::default() },
        )
    }

    fn compiled(&self, spec: &MlaDecode, options: DecodeOptions) -> Result<Rc<Compiled<MlaDecode, B>>> {
        let DecodeOptions { query_tokens, topk, attn_sink, tiling, .. } = options;
        let query_tokens = query_tokens.max(1);
        let key = Request { spec: *spec, query_tokens, topk, attn_sink, tiling };
        if let Some((_, decode)) = self.decodes.borrow().iter().find(|(request, _)| *request == key) {
            return Ok(decode.clone());
        }
        let options = DecodeOptions { variant: self.variant.map(str::to_owned), ..options };
        let decode = Rc::new(self.backend.compile_with(*spec, &options)?);
        self.decodes.borrow_mut().push((key, decode.clone()));
        Ok(decode)
    }

    /// Whether a problem is served: its spec by the forced variant, and its lists, sinks and records by a variant of the backend. What is
    /// not served is left out; that the refusal says what is missing is a check.
    pub fn takes_inputs(&self, problem: &Problem, how: &How) -> bool {
        if !self.serves(&problem.spec) {
            self.leave_out();
            return false;
        }
        let is_usual =
            problem.lists.is_none() && problem.attn_sink.is_none() && problem.spec.kv.layout.is_plain();
        if is_usual {
            return true;
        }
        let Err(error) = self.decode_of(problem, how) else { return true };
        let asked = [
            (problem.lists.is_some(), "lists of slots (topk)"),
            (problem.attn_sink.is_some(), "attention sinks"),
        ];
        let says = match &error {
            Error::LayoutUnsupported { .. } => !problem.spec.kv.layout.is_plain(),
            Error::VariantUnavailable { why, .. } | Error::NoVariant { why } => {
                why.contains("it does not serve")
                    && asked.iter().any(|(is_asked, name)| *is_asked && why.contains(name))
            }
            _ => false,
        };
        if !says {
            self.note(&problem.name, Err(format!("it is not served, for no good reason: {error}")));
        } else if self.checks.get() == 0 {
            self.note("what is not served is refused by its name", Ok(()));
        } else {
            self.leave_out();
        }
        false
    }

    /// Whether the forced variant serves a spec.
    pub fn serves(&self, spec: &MlaDecode) -> bool {
        let runs = |variant: &str| {
            let all = self.backend.variants(spec);
            all.iter().any(|candidate| candidate.name == variant && candidate.lacks.is_none())
        };
        self.variant.is_none_or(runs)
    }

    /// The allowed error of a problem's output on the variant that runs it.
    pub fn tolerance(&self, problem: &Problem, query_tokens: u32) -> Tolerance {
        self.tolerance_of(problem, &How { query_tokens, ..How::default() })
    }

    fn tolerance_of(&self, problem: &Problem, how: &How) -> Tolerance {
        let spec = problem.spec;
        let rounds_p = self.decode_of(problem, how).is_ok_and(|decode| decode.rounds_weights());
        let latent = spec.shape.kv_lora_rank as usize;
        Tolerance::decode(spec.kv.dtype(), spec.query, spec.out, rounds_p, problem.largest_latent(), latent)
    }

    /// Runs a decode and compares it with the oracle; a failure is kept for [`Session::finish`].
    pub fn check(&self, problem: &Problem, how: &How) {
        if !self.takes_inputs(problem, how) {
            return;
        }
        for &world in self.ranks {
            // In turn by tokens, by some that no page size divides, by pages, and unevenly.
            let turn = self.checks.get() / self.ranks.len();
            let shares = match [1, 7, 16, 3][turn % 4] {
                3 => Shares::weighted(&[5, 2, 1, 4][..world.min(4) as usize], 3),
                interleave => Shares::even(world, interleave),
            };
            self.check_ranks(problem, how, &shares.expect("shares"));
        }
        if !self.ranks.is_empty() {
            return;
        }
        let (out, lse) = problem.expected();
        self.note(&format!("{}, {how:?}", problem.name), self.compare(problem, how, &out, &lse));
    }

    /// Runs a decode and compares it with what is expected.
    pub fn compare(&self, problem: &Problem, how: &How, out: &[f64], lse: &[f64]) -> Result<(), String> {
        let answer = self.run_decode(problem, how).map_err(|error| error.to_string())?;
        let latent = problem.spec.shape.kv_lora_rank as usize;
        let checked = |report: Report| report.into_result().map(drop);
        checked(close("lse", &answer.lse, lse, &Tolerance::lse()))?;
        checked(close("out", &answer.out, out, &self.tolerance_of(problem, how)))?;
        // Empty rows are exactly 0, whatever the tolerance.
        let empty = |(row, _): &(usize, &f64)| answer.out[row * latent..][..latent].iter().any(|&x| x != 0.0);
        match lse.iter().enumerate().filter(|(_, lse)| **lse == f64::NEG_INFINITY).find(empty) {
            Some((row, _)) => Err(format!("row {row} sees no key: its out must be exactly 0")),
            None => Ok(()),
        }
    }

    /// Counts a check that the forced variant does not serve.
    pub fn leave_out(&self) {
        self.left_out.set(self.left_out.get() + 1);
    }

    /// Counts a check, and keeps it if it failed.
    pub fn note(&self, what: &str, result: Result<(), String>) {
        self.checks.set(self.checks.get() + 1);
        if let Err(error) = result {
            self.failures.borrow_mut().push(format!("{what}: {error}"));
        }
    }

    /// Counts what ran, and panics if something failed.
    pub fn finish(&self, group: &str) {
        let (checks, left_out) = (self.checks.take(), self.left_out.take());
        let failures = self.failures.take();
        let (name, variant) = (self.backend.name(), self.variant.unwrap_or("best variant"));
        let (ran, not_served) = self.totals.get();
        self.totals.set((ran + checks, not_served + left_out));
        assert!(
            failures.is_empty(),
            "{name}, {variant}, {group}: {} of {checks} failed\n{}",
            failures.len(),
            failures.join("\n")
        );
    }
}

/// How much of a group is taken where kernels take seconds to compile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cases {
    /// Each variant, dtype and dims at least once.
    Representative,
    /// Each variant by each group; of the pairs of a cache and a query dtype one for each cache dtype.
    Product,
    /// Every pair of dtypes too.
    Full,
}

impl Cases {
    /// What `MLA_FULL=1` or `MLA_CASES=product` asks for; representatives without them.
    pub fn asked_for() -> Self {
        let is = |name: &str, value: &str| std::env::var(name).as_deref() == Ok(value);
        match (is("MLA_FULL", "1"), is("MLA_CASES", "product")) {
            (true, _) => Self::Full,
            (_, true) => Self::Product,
            _ => Self::Representative,
        }
    }
}

/// Runs a case file and compares with what it expects.
pub fn run_case<B: Backend>(session: &Session<'_, B>, name: &str, case: &Case) -> Result<(), String> {
    match case {
        Case::Decode(case) => {
            let problem = Problem::of_case(name, case);
            let wide = |xs: &[f32]| xs.iter().map(|&x| x.into()).collect::<Vec<f64>>();
            session.compare(&problem, &How::default(), &wide(&case.out), &wide(&case.lse))
        }
        Case::Merge(case) => ops::check_merge_case(session.backend, case),
        Case::Append(case) => ops::check_append_case(session.backend, case),
        Case::Sparse(case) => {
            let wide = |xs: &[f32]| xs.iter().map(|&x| x.into()).collect::<Vec<f64>>();
            let problem = Problem::of_sparse_case(name, case);
            session.compare(&problem, &How::default(), &wide(&case.out), &wide(&case.lse))
        }
        Case::TopK(case) => top_k::check_case(session.backend, case),
        Case::DcpDecode(case) => ranks::check_dcp_decode(session, name, case),
        Case::DcpCombine(case) => ranks::check_dcp_combine(session.backend, case),
        Case::IndexAppend(case) => indexer_append::check_case(session.backend, case),
        Case::IndexQuery(case) => indexer_query::check_case(session.backend, case),
        Case::IndexLogits(case) => indexer_logits::check_logits_case(session.backend, case),
    }
}

/// Runs every file of `tests/cases`.
pub fn case_files<B: Backend>(session: &Session<'_, B>) {
    // cargo runs tests in the package's root, scripts/bench-device.sh in a folder that holds the same.
    let folder = std::path::Path::new("tests/cases");
    let mut ran = 0;
    for entry in std::fs::read_dir(folder).expect("tests/cases is part of the repository") {
        let path = entry.expect("readable").path();
        if path.extension().is_some_and(|ext| ext == "safetensors") {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let case = Case::load(&path).expect("a case file");
            ran += 1;
            match &case {
                Case::Decode(decode) | Case::DcpDecode(DcpDecodeCase { decode, .. })
                    if !session.serves(&decode.spec) =>
                {
                    session.leave_out();
                }
                Case::Sparse(sparse)
                    if !session.takes_inputs(&Problem::of_sparse_case(&name, sparse), &How::default()) => {}
                Case::Append(append) if !records::serves_layout(session, append.spec) => session.leave_out(),
                _ => session.note(&name, run_case(session, &name, &case)),
            }
        }
    }
    assert!(ran > 0, "no case files");
    session.finish("case files");
}

/// A group of checks of an op.
pub struct Group<B: Backend> {
    pub op: &'static str,
    pub name: &'static str,
    /// Whether the forced variant changes what runs.
    pub by_variant: bool,
    pub run: fn(&Session<'_, B>),
}

macro_rules! groups {
    ($($op:literal $by_variant:literal: $module:ident { $($name:ident),* })*) => {
        vec![$($(Group {
            op: $op,
            name: stringify!($name),
            by_variant: $by_variant,
            run: $module::$name,
        }),*),*]
    };
}

/// A few groups: what a backend is asked directly where [`groups`] run through an [`AnyBackend`](wgpu_mla::AnyBackend).
pub fn sample<B: Backend>() -> Vec<Group<B>> {
    groups! {
        "decode" true: decode { varlen }
        "decode" false: errors { refuses_layers }
        "merge_state" false: ops { merges }
        "kv_append" false: errors { refuses_ops }
        "kv_copy_pages" false: ops { page_copies }
    }
}

/// Every group there is.
pub fn groups<B: Backend>() -> Vec<Group<B>> {
    let mut all = groups! {
        "decode" true: decode {
            dtypes_of_512_64, dtypes_of_256_64, dtypes_of_256_32, dtypes_of_512_0, heads, page_sizes, lengths, varlen,
            query_tokens, masks, policies, layouts, hard_data, rising_logits, shared_prefixes, empty_batches,
            a_step_serves_batch_after_batch
        }
        "decode" true: invariance {
            bits_of_pages, bits_of_tables, bits_of_batch_position, bits_of_tile_mates, bits_of_shared_prefixes
        }
        "decode" true: ranks { shares, bits_of_ranks }
        "decode" false: mixed { refuses_other_specs }
        "decode" true: slabs { slabs }
        "decode" false: changed { changed_plans, plans_of_one_slab }
        "slabs" false: slabs { ops_in_slabs, layers_in_slabs, refuses_slabs }
        "decode" true: non_finite { non_finite, huge_logits }
        "decode" true: sums { equal_large_logits, long_sums, rising_sums, bits_of_long_sums, sums_of_many_splits }
        "decode" true: errors { scale_products }
        "decode" false: errors { refuses_specs, refuses_pages, refuses_layers }
        "merge_state" false: ops { merges }
        "merge_states" false: merge_states { state_merges, refuses_state_merges }
        "merge_states" false: sums { merges_of_many_sets }
        "correct_attn_out" false: correct_attn_out { corrections, refuses_corrections }
        "context_parallel" false: context_parallel { refuses_other_ranks, decode_arguments }
        "kv_append" false: ops { appends }
        "kv_append" false: kv_append { exact_appends }
        "kv_append" false: records { record_appends }
        "kv_append" false: guard { counted_appends, refuses_guards }
        "rope_append" false: guard { counted_rotations }
        "head_project" false: guard { counted_projections }
        "kv_gather" false: records { record_gathers }
        "kv_copy_pages" false: records { record_copies }
        "rope_append" false: records { record_rotated_appends }
        "decode" true: records { record_decodes }
        "decode" true: sparse {
            lists, lists_of_records, list_shapes, lists_of_all, list_orders, lists_of_batches, replayed_lists, non_finite_lists, sinks
        }
        "decode" false: sparse_errors { refuses_lists }
        "kv_append" false: errors { refuses_ops }
        "every_op" false: extremes { extreme_views }
        "every_op" false: factors { factors }
        "kv_copy_pages" false: ops { page_copies }
        "kv_gather" false: kv_gather { gathers, refuses_gathers }
        "indexer_logits" false: indexer_logits {
            index_logits, index_logits_of_masks, index_logits_not_finite, index_logits_in_slabs, index_logits_of_batches, refuses_index_logits
        }
        "reorg_kvcache" false: reorg_kvcache { reorgs, sharded_contexts, refuses_reorgs }
        "kv_calibrate" false: kv_calibrate { calibrations, refuses_calibrations }
        "head_project" false: project { projections, projected_codes, quantised_weights, refuses_projections }
        "head_project" false: kv_b_proj { kv_b_proj }
        "mla_prefill" true: prefill { prefill_shapes, prefill_repeated_rows, prefill_hard_data, prefill_errors }
        "mla_prefill" true: sums { prefill_long_sums }
        "rope" false: rope { rotations, refuses_rotations }
        "rope_append" false: rope { rotated_appends, rotated_codes }
        "indexer_append" false: indexer_append { index_appends, index_appends_in_slabs, refuses_index_appends }
        "indexer_query" false: indexer_query { index_queries_of_formats, index_scales, refuses_index_queries }
        "top_k" false: top_k { choices, long_rows, replays, refuses_top_k }
        "layer" false: mixed { refuses_layer_batches, steps_share_a_submit }
        "layer" false: layer { layers, layers_of_e4m3_weights, layer_workspaces, cascades, record_layers }
        "layer" false: layer_codes { layers_of_codes, refuses_layers_of_codes }
        "layer" false: layer_lists { layers_with_lists, refuses_selections }
        "layer" false: layer_range { loud_f16_layers, products_past_f16, refuses_scales_past_f16 }
        "layer" false: layer_batches {
            prompts_share_pages, refuses_overlaps, arrays_share_a_buffer, names_layer_arguments, refuses_shared_pages, workspace_bytes
        }
    };
    #[cfg(not(target_arch = "wasm32"))]
    all.extend(groups! { "threads" false: threads { layers_of_threads, steps_of_threads } });
    all.insert(0, Group { op: "decode", name: "case_files", by_variant: true, run: case_files });
    all
}
