//! One conformance suite for every backend.
//!
//! Each `pub fn` of [`decode`], [`invariance`], [`ops`], [`rope`] and [`errors`] that takes a [`Session`] is one group of
//! checks; it runs all of them and then panics with every failure. [`conformance`] runs all groups.

pub mod decode;
pub mod errors;
pub mod invariance;
pub mod kv_calibrate;
pub mod kv_gather;
pub mod layer;
pub mod memory;
pub mod merge_states;
pub mod ops;
pub mod prefill;
pub mod project;
pub mod rope;
pub mod run;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use wgpu_mla::{Backend, Dtype, MlaSpec, Result};

use super::case::Case;
use super::close::{Report, Tolerance, close};
use super::paint::Problem;
use run::How;

/// What a decode is compiled for: a spec, and query tokens of a sequence.
type Compiled = (MlaSpec, u32);

/// A backend under test, with the kernels that it has compiled so far: on a software device they are what costs.
pub struct Session<'a, B: Backend> {
    pub backend: &'a B,
    /// Forces a decode variant. Specs that it does not serve are left out, and counted.
    pub variant: Option<&'a str>,
    /// Whether the groups of dtypes take every pair of a cache and a query dtype, or one for each cache dtype.
    pub every_pair: bool,
    decodes: RefCell<HashMap<Compiled, Rc<B::Decode>>>,
    checks: Cell<usize>,
    left_out: Cell<usize>,
    failures: RefCell<Vec<String>>,
}

impl<'a, B: Backend> Session<'a, B> {
    pub fn new(backend: &'a B) -> Self {
        Self {
            backend,
            variant: None,
            every_pair: true,
            decodes: RefCell::default(),
            checks: Cell::default(),
            left_out: Cell::default(),
            failures: RefCell::default(),
        }
    }

    /// A session that forces a variant.
    pub fn forced(backend: &'a B, variant: &'a str) -> Self {
        Self { variant: Some(variant), ..Self::new(backend) }
    }

    /// Whether a group takes a pair of a cache and a query dtype, by their places in [`Dtype::ALL`]. One that does not take
    /// every pair meets each cache dtype with one query dtype, another one for each `turn`.
    pub fn takes(&self, turn: usize, cache: usize, query: usize) -> bool {
        self.every_pair || (cache + query + turn).is_multiple_of(Dtype::ALL.len())
    }

    /// The decode of a spec, compiled once.
    pub fn decode(&self, spec: &MlaSpec) -> Result<Rc<B::Decode>> {
        self.decode_for(spec, 1)
    }

    /// As [`Session::decode`], made for that many query tokens a sequence.
    pub fn decode_for(&self, spec: &MlaSpec, query_tokens: u32) -> Result<Rc<B::Decode>> {
        let key = (*spec, query_tokens.max(1));
        if let Some(decode) = self.decodes.borrow().get(&key) {
            return Ok(decode.clone());
        }
        let decode = Rc::new(self.backend.decode_for(spec, self.variant, query_tokens)?);
        self.decodes.borrow_mut().insert(key, decode.clone());
        Ok(decode)
    }

    /// Whether the forced variant serves a spec.
    pub fn serves(&self, spec: &MlaSpec) -> bool {
        self.variant.is_none_or(|variant| self.backend.variants(spec).contains(&variant))
    }

    /// The allowed error of a problem's output on the variant that runs it.
    pub fn tolerance(&self, problem: &Problem, query_tokens: u32) -> Tolerance {
        let spec = problem.spec;
        let rounds_p =
            self.decode_for(&spec, query_tokens).is_ok_and(|decode| self.backend.rounds_weights(&decode));
        let latent = spec.shape.kv_lora_rank as usize;
        Tolerance::decode(spec.kv.dtype, spec.query, spec.out, rounds_p, problem.largest_latent(), latent)
    }

    /// Runs a decode and compares it with the oracle; a failure is kept for [`Session::finish`].
    pub fn check(&self, problem: &Problem, how: &How) {
        if !self.serves(&problem.spec) {
            return self.leave_out();
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
        checked(close("out", &answer.out, out, &self.tolerance(problem, how.query_tokens)))?;
        // The tolerance knows nothing of empty rows: they are exactly 0.
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

    /// Says what ran, and panics if something failed.
    pub fn finish(&self, group: &str) {
        let (checks, left_out) = (self.checks.take(), self.left_out.take());
        let failures = self.failures.take();
        let (name, variant) = (self.backend.name(), self.variant.unwrap_or("best variant"));
        println!("{name}, {variant}, {group}: {checks} checks, {left_out} left out as not served");
        assert!(
            failures.is_empty(),
            "{name}, {variant}, {group}: {} of {checks} failed\n{}",
            failures.len(),
            failures.join("\n")
        );
    }
}

/// Whether `MLA_FULL=1` asks for the slow suites whole.
pub fn full() -> bool {
    std::env::var("MLA_FULL").as_deref() == Ok("1")
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
    }
}

/// Runs every file of `cases/`.
pub fn case_files<B: Backend>(session: &Session<'_, B>) {
    // cargo runs tests in the package's root, scripts/bench-device.sh in a folder that holds the same.
    let folder = std::path::Path::new("cases");
    let mut ran = 0;
    for entry in std::fs::read_dir(folder).expect("cases/ is part of the repository") {
        let path = entry.expect("readable").path();
        if path.extension().is_some_and(|ext| ext == "safetensors") {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let case = Case::load(&path).expect("a case file");
            ran += 1;
            match &case {
                Case::Decode(decode) if !session.serves(&decode.spec) => session.leave_out(),
                _ => session.note(&name, run_case(session, &name, &case)),
            }
        }
    }
    assert!(ran > 0, "no case files");
    session.finish("case files");
}

/// Every group, one after the other.
pub fn conformance<B: Backend>(backend: &B) {
    let session = Session::new(backend);
    case_files(&session);
    decode::all(&session);
    invariance::all(&session);
    ops::all(&session);
    merge_states::all(&session);
    kv_gather::all(&session);
    project::all(&session);
    prefill::all(&session);
    kv_calibrate::all(&session);
    layer::all(&session);
    rope::all(&session);
    errors::all(&session);
}

/// One `#[test]` for each group, so that they run side by side and fail one by one.
///
/// `$backend` is a function that gives a backend, or `None` once it has said why there is none here. The second
/// form forces a variant and says whether to take every pair of dtypes.
#[allow(unused_macros)]
macro_rules! conformance_tests {
    ($backend:expr) => {
        $crate::common::suite::conformance_tests!($backend, None, true);
    };
    ($backend:expr, $variant:expr, $every_pair:expr) => {
        $crate::common::suite::conformance_tests!(@groups $backend, $variant, $every_pair,
            case_files: case_files,
            dtypes_of_512_64: decode::dtypes_of_512_64,
            dtypes_of_256_64: decode::dtypes_of_256_64,
            dtypes_of_256_32: decode::dtypes_of_256_32,
            dtypes_of_512_0: decode::dtypes_of_512_0,
            heads: decode::heads,
            page_sizes: decode::page_sizes,
            lengths: decode::lengths,
            varlen: decode::varlen,
            query_tokens: decode::query_tokens,
            visibility: decode::visibility,
            policies: decode::policies,
            layouts: decode::layouts,
            hard_data: decode::hard_data,
            rising_logits: decode::rising_logits,
            shared_prefixes: decode::shared_prefixes,
            empty_batches: decode::empty_batches,
            a_step_serves_batch_after_batch: decode::a_step_serves_batch_after_batch,
            bits_of_pages: invariance::pages,
            bits_of_tables: invariance::tables,
            bits_of_batch_position: invariance::batch_position,
            bits_of_tile_mates: invariance::tile_mates,
            bits_of_shared_prefixes: invariance::shared_prefixes,
            merges: ops::merges,
            state_merges: merge_states::state_merges,
            refuses_state_merges: merge_states::refuses_state_merges,
            appends: ops::appends,
            page_copies: ops::page_copies,
            gathers: kv_gather::gathers,
            refuses_gathers: kv_gather::refuses_gathers,
            projections: project::projections,
            kv_b_proj: project::kv_b_proj,
            refuses_projections: project::refusals,
            prefill_shapes: prefill::shapes,
            prefill_hard_data: prefill::hard_data,
            prefill_errors: prefill::errors,
            calibrations: kv_calibrate::calibrations,
            refuses_calibrations: kv_calibrate::refuses_calibrations,
            layers: layer::layers,
            layer_workspaces: layer::layer_workspaces,
            cascades: layer::cascades,
            rotations: rope::rotations,
            rotated_appends: rope::rotated_appends,
            refuses_specs: errors::specs,
            refuses_pages: errors::pages,
            refuses_layers: errors::layers,
            refuses_ops: errors::ops,
            refuses_rotations: rope::refusals,
        );
    };
    (@groups $backend:expr, $variant:expr, $every_pair:expr, $($name:ident: $($group:ident)::+,)*) => {$(
        #[test]
        fn $name() {
            if let Some(backend) = $backend() {
                let mut session = $crate::common::suite::Session::new(&backend);
                session.variant = $variant;
                session.every_pair = $every_pair;
                $crate::common::suite::$($group)::+(&session);
            }
        }
    )*};
}
#[allow(unused_imports)]
pub(crate) use conformance_tests;
