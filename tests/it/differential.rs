//! Random uses against a reference of a few dozen lines that shares nothing with the suite: `docs/verification.md`.
//!
//! ```text
//! cargo test --features cuda --test it differential::     in the check: 270 on the CPU, 30 on lavapipe; 240 on a card
//!
//! MLA_DIFFERENTIAL_SECONDS=120        as many as run in that time, each on every variant of the device
//! MLA_DIFFERENTIAL_CASES=5000         so many on each device; MLA_FULL=1 runs 10,000 in all
//! MLA_DIFFERENTIAL_FROM=1000000       others than the first ones
//! MLA_DIFFERENTIAL_SEED=0x1234        the case of a seed alone, as a failure prints it
//! ```
//! A seed's upper half alone draws what kernels are compiled for; the whole seed draws all else.

mod cache_ops;
mod data;
mod decode;
mod draw;
mod expanded;
mod judge;
mod layer;
mod layer_lists;
mod lists;
mod merges;
mod place;
mod ranks;
mod reference;
mod rotation;
mod run;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use mla_support::{Ignored, Outcome};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::{AnyBackend, Backend, Kernel, Op};

use crate::harness::{Test, count};
use draw::Draw;

/// A device under test: an [`AnyBackend`] everywhere, so that this is compiled once.
pub struct Under<'a, B: Backend> {
    pub backend: &'a B,
    /// About how many pairs of a query row and a key a case has at most.
    pub work: usize,
    /// Runs each case on every variant; else on one, which the case draws.
    pub every_variant: bool,
    /// Compiles whatever a case draws; else only what its spec says.
    pub every_shape: bool,
    /// The reference leaves a key out: a test of this test.
    pub drops_key: bool,
    ran: RefCell<BTreeMap<String, usize>>,
}

impl<'a, B: Backend> Under<'a, B> {
    fn new(backend: &'a B) -> Self {
        let ran = RefCell::default();
        Self { backend, work: 3000, every_variant: true, every_shape: true, drops_key: false, ran }
    }

    /// The variants that serve an op and that a case runs on.
    pub fn variants<O: Op>(&self, op: &O, draw: &mut Draw) -> Vec<&'static str>
    where
        B: Kernel<O>,
    {
        let all = self.backend.variants(op);
        let served: Vec<_> =
            all.iter().filter(|found| found.lacks.is_none()).map(|found| found.name).collect();
        let one = draw.below(served.len().max(1));
        if self.every_variant { served } else { served.get(one).copied().into_iter().collect() }
    }

    pub fn count(&self, what: &str) {
        *self.ran.borrow_mut().entry(what.to_owned()).or_default() += 1;
    }

    /// What the case of a seed is of, and what draws its spec.
    fn kind(&self, seed: u64) -> (&'static str, Case<B>, Draw) {
        let mut spec = Draw::new(seed >> 32);
        let (name, run) = spec.pick(&Self::KINDS);
        (name, run, spec)
    }

    /// Runs the case of a seed.
    fn case(&self, seed: u64) -> Result<(), String> {
        let (name, run, mut spec) = self.kind(seed);
        run(self, &mut spec, &mut Draw::new(seed)).map_err(|error| format!("{name} {error}"))
    }

    /// Decodes are drawn more often than others.
    const KINDS: [(&'static str, Case<B>); 14] = [
        ("mla_decode", decode::decodes),
        ("mla_decode", decode::decodes),
        ("mla_decode", decode::decodes),
        ("ranks", ranks::decodes),
        ("cache", cache_ops::append_and_gather),
        ("kv_copy_pages", cache_ops::copies),
        ("reorg_kvcache", cache_ops::reorg),
        ("rotation", rotation::ropes),
        ("merge_state", merges::two),
        ("merge_states", merges::many),
        ("correct_attn_out", merges::corrected),
        ("head_project", expanded::projections),
        ("mla_prefill", expanded::prefills),
        ("mla_layer", layer::lives),
    ];
}

/// Draws a case from what kernels depend on and from all else, runs it, and compares.
type Case<B> = fn(&Under<'_, B>, &mut Draw, &mut Draw) -> Result<(), String>;

pub fn text(error: wgpu_mla::Error) -> String {
    error.to_string()
}

fn number(variable: &str) -> Option<u64> {
    let said = std::env::var(variable).ok()?;
    let parsed = match said.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => said.parse(),
    };
    Some(parsed.unwrap_or_else(|_| panic!("{variable}={said} is no number")))
}

/// The most failures that are printed before a test ends.
const MOST_FAILURES: usize = 20;

/// Runs seeds, and panics with a line for each that failed.
fn run_all<B: Backend>(name: &str, under: &Under<'_, B>, seeds: impl Iterator<Item = u64>) -> Outcome {
    let (mut failures, end) = (0, number("MLA_DIFFERENTIAL_SECONDS").map(Duration::from_secs));
    let begin = Instant::now();
    for seed in seeds {
        if end.is_some_and(|end| begin.elapsed() >= end) || failures == MOST_FAILURES {
            break;
        }
        let case = std::panic::AssertUnwindSafe(|| under.case(seed));
        let outcome = std::panic::catch_unwind(case).unwrap_or_else(|panic| {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            Err(format!("panicked: {}", said.or(panic.downcast_ref().copied()).unwrap_or_default()))
        });
        if let Err(error) = outcome {
            failures += 1;
            println!("differential::{name}: seed {seed:#x}: {error}");
            let features = if name == "cuda" { " --features cuda" } else { "" };
            println!(
                "  again: MLA_DIFFERENTIAL_SEED={seed:#x} cargo test{features} --test it differential::{name}"
            );
        }
    }
    let ran = under.ran.borrow();
    ran.iter().for_each(|(what, cases)| count(&format!("differential {name} {what}"), *cases, 0));
    assert!(failures == 0, "{failures} cases failed");
    if ran.is_empty() { Err(Ignored("no variant serves a case here".to_owned())) } else { Ok(()) }
}

/// Seeds of any specs, or of these in turn.
fn seeds(cases: u64, specs: &[u64], salt: u64) -> impl Iterator<Item = u64> {
    let alone = number("MLA_DIFFERENTIAL_SEED");
    let cases = match (alone, number("MLA_DIFFERENTIAL_SECONDS"), number("MLA_DIFFERENTIAL_CASES")) {
        (Some(_), _, _) => 1,
        (_, Some(_), _) => u64::MAX,
        (_, _, Some(cases)) => cases,
        _ => cases,
    };
    let from = number("MLA_DIFFERENTIAL_FROM").unwrap_or(0);
    (0..cases).map(move |i| {
        alone.unwrap_or_else(|| {
            let drawn = Draw::new(salt << 40 ^ (from + i)).bits();
            match specs {
                [] => drawn,
                _ => specs[(i % specs.len() as u64) as usize] << 32 | drawn & 0xFFFF_FFFF,
            }
        })
    })
}

fn is_full() -> bool {
    std::env::var("MLA_FULL").as_deref() == Ok("1")
}

fn cpu() -> Outcome {
    let cpu = AnyBackend::from(Cpu::new());
    let mut under = Under::new(&cpu);
    // In the check a case runs on one variant, else on each.
    let asked = ["MLA_DIFFERENTIAL_SECONDS", "MLA_DIFFERENTIAL_CASES", "MLA_DIFFERENTIAL_SEED"];
    under.every_variant = is_full() || asked.iter().any(|variable| number(variable).is_some());
    run_all("cpu", &under, seeds(if is_full() { 9000 } else { 270 }, &[], 1))
}

/// Specs whose kernels take lavapipe tenths of a second: of each kind one, of decodes two.
#[cfg(feature = "wgpu")]
const QUICK_SPECS: [u64; 14] =
    [0x1C, 0x26, 0x00, 0x09, 0x05, 0x12, 0x01, 0x13, 0x0A, 0x1E, 0x0F, 0x0E, 0x04, 0x0B];

/// A software device takes seconds to compile a kernel: there the cases are of few specs, and each runs on one variant.
#[cfg(feature = "wgpu")]
fn wgpu() -> Outcome {
    let gpu = mla_support::gpu()?;
    let software = gpu.caps().kind == wgpu_mla::DeviceKind::Software;
    let gpu = AnyBackend::from(gpu);
    let mut under = Under::new(&gpu);
    if !software {
        return run_all("wgpu", &under, seeds(if is_full() { 9000 } else { 240 }, &[], 2));
    }
    (under.work, under.every_variant, under.every_shape) = (600, false, false);
    let all: Vec<u64> = (0..200).collect();
    let (cases, specs) = if is_full() { (1000, &all[..]) } else { (30, &QUICK_SPECS[..]) };
    run_all("wgpu", &under, seeds(cases, specs, 2))
}

#[cfg(feature = "cuda")]
fn cuda() -> Outcome {
    let cuda = AnyBackend::from(mla_support::cuda()?);
    let mut under = Under::new(&cuda);
    // The interpreter's card takes seconds for what a card does in microseconds.
    if wgpu_mla::Device::name(&cuda).contains("PTX interpreter") {
        (under.work, under.every_variant) = (40, false);
        return run_all("cuda", &under, seeds(12, &[], 3));
    }
    run_all("cuda", &under, seeds(if is_full() { 9000 } else { 240 }, &[], 3))
}

/// The cases find a reference that leaves out the last key that a query token sees.
fn a_key_too_few_is_found() {
    let cpu = AnyBackend::from(Cpu::new());
    let mut under = Under::new(&cpu);
    (under.work, under.every_variant, under.drops_key) = (600, false, true);
    let kinds = ["mla_decode ", "ranks ", "mla_prefill ", "mla_layer "];
    let mut found = [0; 4];
    let attends = |seed: &u64| kinds.iter().any(|kind| kind.trim() == under.kind(*seed).0);
    for seed in seeds(200, &[], 4).filter(attends) {
        if let Err(error) = under.case(seed) {
            let kind = kinds.iter().position(|kind| error.starts_with(kind)).expect("one of these");
            let what = ["expected", "got", "tolerance"];
            assert!(what.iter().all(|word| error.contains(word)) && !error.contains('\n'), "{error}");
            found[kind] += 1;
        }
    }
    let ran = under.ran.borrow().values().sum::<usize>();
    // What is left sees no key, or a last one that has no weight.
    assert!(
        found.iter().all(|&found| found >= 5) && found.iter().sum::<usize>() > 5 * ran,
        "{found:?}, not in {ran}"
    );
}

pub fn tests() -> Vec<Test> {
    vec![
        Test::new("differential::formats", draw::formats_round_to_nearest_even),
        Test::new("differential::a_key_too_few_is_found", a_key_too_few_is_found),
        Test::new("differential::cpu", cpu),
        #[cfg(feature = "wgpu")]
        Test::new("differential::wgpu", wgpu),
        #[cfg(feature = "cuda")]
        Test::new("differential::cuda", cuda),
    ]
}
