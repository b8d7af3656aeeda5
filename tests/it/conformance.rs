//! The conformance suite on each backend and each decode variant of it, a test a group: `conformance::wgpu::shared::decode::heads`.
//!
//! All groups run through an [`AnyBackend`], so that the suite is compiled once and not for every backend; a sample of them runs on each
//! backend itself (`conformance::direct_wgpu`).
//!
//! On wgpu, where kernels take seconds to compile, and on the CPU, groups that do not depend on the decode variant run once; on wgpu
//! `MLA_CASES=product` asks for the product.

use wgpu_mla::cpu::Cpu;
use wgpu_mla::{AnyBackend, Backend, Device};

use crate::harness::{Test, count};
#[cfg(feature = "wgpu")]
use mla_support::paint::Problem;
#[cfg(feature = "wgpu")]
use mla_support::suite::run::How;
use mla_support::suite::{Cases, Group, Session, groups, sample};
use mla_support::{Ignored, Outcome};

/// The best variant that this processor runs, and each that it would be without: of `avx512`, `avx2`, `neon` and `portable`.
fn cpu_variants() -> Vec<Option<&'static str>> {
    let candidates = Cpu::new().variants(&mla_support::paint::Make::default().build().spec);
    let run_here = candidates.iter().filter(|candidate| candidate.lacks.is_none());
    [None].into_iter().chain(run_here.skip(1).map(|candidate| Some(candidate.name))).collect()
}

pub fn tests() -> Vec<Test> {
    let any = |_| Ok(AnyBackend::from(Cpu::new()));
    let once = |place: usize, group: &Group<_>| place == 0 || group.by_variant;
    let mut tests = of_backend("cpu", any, &cpu_variants(), Cases::Full, once);
    tests.extend(sample_of("direct_cpu", || Ok(Cpu::new()), None, Cases::Full));
    tests.extend(in_ranks("cpu", any, Cases::Full, &CUT));
    #[cfg(feature = "wgpu")]
    tests.extend(on_wgpu());
    #[cfg(feature = "cuda")]
    tests.extend(on_cuda());
    tests
}

/// Groups of decodes that [`Session::check`] runs, so that they can be cut into ranks.
const CUT: [&str; 11] = [
    "varlen",
    "masks",
    "lengths",
    "layouts",
    "heads",
    "page_sizes",
    "query_tokens",
    "policies",
    "hard_data",
    "shared_prefixes",
    "dtypes_of_256_32",
];

/// Every decode of these groups cut into 2, 3 and 4 ranks, whose results are combined.
fn in_ranks(
    name: &'static str,
    open: impl Fn(usize) -> Result<AnyBackend, Ignored> + Copy + Send + 'static,
    cases: Cases,
    names: &'static [&'static str],
) -> Vec<Test> {
    let cut = groups().into_iter().filter(|group| names.contains(&group.name));
    let test = |group: Group<_>| {
        let Group { op, name: group_name, run, .. } = group;
        Test::new(format!("conformance::{name}::ranks::{op}::{group_name}"), move || {
            let backend = open(0)?;
            let mut session = Session::new(&backend);
            (session.cases, session.ranks) = (cases, &[2, 3, 4]);
            run(&session);
            ended(name, &session)
        })
    };
    cut.map(test).collect()
}

/// The decode variants on wgpu, in dispatch order.
#[cfg(feature = "wgpu")]
pub const WGPU_VARIANTS: [&str; 4] = ["coop", "coop_small", "subgroup", "shared"];

#[cfg(feature = "wgpu")]
fn the_lists_name_every_variant() -> Outcome {
    let variants = mla_support::gpu()?.variants(&mla_support::paint::Make::default().build().spec);
    assert_eq!(variants.iter().map(|variant| variant.name).collect::<Vec<_>>(), WGPU_VARIANTS);
    Ok(())
}

#[cfg(feature = "wgpu")]
fn on_wgpu() -> Vec<Test> {
    // A variant's tests have one device, and other variants' another.
    let of_variant = |place| mla_support::gpu_of(place).map(AnyBackend::from);
    let gpu = |_| mla_support::gpu().map(AnyBackend::from);
    let cases = Cases::asked_for();
    let variants = WGPU_VARIANTS.map(Some);
    let by_variant = move |_: usize, group: &Group<_>| group.by_variant || cases != Cases::Representative;
    let mut tests = of_backend("wgpu", of_variant, &variants, cases, by_variant);
    if cases == Cases::Representative {
        tests.extend(best_on_wgpu(cases));
    }
    // A sample, unless more was asked for.
    let cut = if cases == Cases::Representative { &CUT[..1] } else { &CUT[..] };
    tests.extend(in_ranks("wgpu", gpu, cases, cut));
    tests.extend(in_mixed_ranks(cases, cut));
    tests.push(Test::new("conformance::wgpu::the_lists_name_every_variant", the_lists_name_every_variant));
    tests.extend(sample_of("direct_wgpu", mla_support::gpu, Some("shared"), cases));
    tests
}

/// Groups that no variant of the decode affects: on one device those of layers, which share kernels, on the other those of ops, in turn.
#[cfg(feature = "wgpu")]
fn best_on_wgpu(cases: Cases) -> Vec<Test> {
    let all = groups().into_iter().filter(|group| !group.by_variant);
    let is_of_layers = |group: &Group<_>| ["layer", "slabs", "threads"].contains(&group.op);
    let (of_layers, of_ops): (Vec<_>, Vec<_>) = all.partition(is_of_layers);
    let open = |number| mla_support::gpu_of(number).map(AnyBackend::from);
    let test = |number: usize| {
        move |group: &Group<_>| of_group("wgpu", move |_| open(number), 0, None, cases, group)
    };
    let mut of_layers = of_layers.iter().map(test(1));
    let in_turn = of_ops.iter().map(test(0)).flat_map(|test| [Some(test), of_layers.next()]);
    let mut tests: Vec<_> = in_turn.flatten().collect();
    tests.extend(of_layers);
    tests
}

/// Even ranks on wgpu, odd ones on the CPU.
#[cfg(feature = "wgpu")]
fn in_mixed_ranks(cases: Cases, names: &'static [&'static str]) -> Vec<Test> {
    let cut = groups().into_iter().filter(|group| names.contains(&group.name));
    let test = |group: Group<_>| {
        let Group { op, name: group_name, run, .. } = group;
        Test::new(format!("conformance::wgpu_and_cpu::ranks::{op}::{group_name}"), move || {
            let (gpu, cpu) = (AnyBackend::from(mla_support::gpu()?), AnyBackend::from(Cpu::new()));
            let on_cpu = Session::new(&cpu);
            let odd_ranks = |part: &Problem, how: &How| on_cpu.run_part(part, how);
            let mut session = Session::new(&gpu);
            (session.cases, session.ranks) = (cases, &[2, 3, 4]);
            session.odd_ranks = Some(&odd_ranks);
            run(&session);
            ended("wgpu_and_cpu", &session)
        })
    };
    cut.map(test).collect()
}

/// CUDA kernels are compiled already, so everything runs, except what is left out under a sanitizer.
#[cfg(feature = "cuda")]
fn on_cuda() -> Vec<Test> {
    let cuda = |_| mla_support::cuda().map(AnyBackend::from);
    let variants: Vec<_> = [None].into_iter().chain(wgpu_mla::cuda::decode_variants().map(Some)).collect();
    let mut tests = of_backend("cuda", cuda, &variants, Cases::Full, |_, _| true);
    tests.extend(sample_of("direct_cuda", mla_support::cuda, None, Cases::Full));
    tests.extend(in_ranks("cuda", cuda, Cases::Full, &CUT));
    tests
}

fn of_backend(
    name: &'static str,
    open: impl Fn(usize) -> Result<AnyBackend, Ignored> + Copy + Send + 'static,
    variants: &[Option<&'static str>],
    cases: Cases,
    wanted: impl Fn(usize, &Group<AnyBackend>) -> bool,
) -> Vec<Test> {
    let mut tests = Vec::new();
    // A group on one variant after another: software devices of two variants then compile at the same time.
    for group in &groups() {
        for (place, &variant) in variants.iter().enumerate() {
            if wanted(place, group) {
                tests.push(of_group(name, open, place, variant, cases, group));
            }
        }
    }
    tests
}

/// A few groups on a backend itself.
fn sample_of<B: Backend + 'static>(
    name: &'static str,
    open: impl Fn() -> Result<B, Ignored> + Copy + Send + 'static,
    variant: Option<&'static str>,
    cases: Cases,
) -> Vec<Test> {
    sample().iter().map(|group| of_group(name, move |_| open(), 0, variant, cases, group)).collect()
}

/// A group on a variant, or on the best one of each spec.
fn of_group<B: Backend + 'static>(
    name: &'static str,
    open: impl Fn(usize) -> Result<B, Ignored> + Copy + Send + 'static,
    place: usize,
    variant: Option<&'static str>,
    cases: Cases,
    group: &Group<B>,
) -> Test {
    let &Group { op, name: group_name, run, .. } = group;
    let test = format!("conformance::{name}::{}::{op}::{group_name}", variant.unwrap_or("best"));
    Test::new(test, move || {
        let backend = open(place)?;
        let mut session = Session::new(&backend);
        (session.variant, session.place, session.cases) = (variant, place, cases);
        run(&session);
        ended(name, &session)
    })
}

/// Counts what a session ran. One that ran nothing, as its variant is not served here, is ignored; if nothing was left out
/// either, the test has no case, which is a failure.
pub fn ended<B: Backend>(backend: &str, session: &Session<'_, B>) -> Outcome {
    let (checks, left_out) = session.totals();
    let variant = session.variant.unwrap_or("best");
    count(&format!("{backend} {variant}"), checks, left_out);
    assert!(checks + left_out > 0, "no case ran");
    if checks > 0 {
        Ok(())
    } else {
        Err(Ignored(format!("{variant} serves none of its {left_out} checks here")))
    }
}
