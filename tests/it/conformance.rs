//! The conformance suite on each backend and each decode variant of it, a test a group: `conformance::wgpu::shared::decode::heads`.
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
use mla_support::suite::{Cases, Group, Session, groups};
use mla_support::{Ignored, Outcome};

/// The best variant that this processor runs, and each that it would be without: of `avx512`, `avx2` and `portable`.
fn cpu_variants() -> Vec<Option<&'static str>> {
    let candidates = Cpu::new().variants(&mla_support::paint::Make::default().build().spec);
    let run_here = candidates.iter().filter(|candidate| candidate.lacks.is_none());
    [None].into_iter().chain(run_here.skip(1).map(|candidate| Some(candidate.name))).collect()
}

pub fn tests() -> Vec<Test> {
    let here = || Ok(Cpu::new());
    let once = |place: usize, group: &Group<_>| place == 0 || group.by_variant;
    let mut tests = of_backend("cpu", here, &cpu_variants(), Cases::Full, once);
    let any = || Ok(AnyBackend::from(Cpu::new()));
    tests.extend(of_backend("any_cpu", any, &[None], Cases::Full, |_, _| true));
    tests.extend(in_ranks("cpu", here, Cases::Full, &CUT));
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
fn in_ranks<B: Backend + 'static>(
    name: &'static str,
    open: impl Fn() -> Result<B, Ignored> + Copy + Send + 'static,
    cases: Cases,
    names: &'static [&'static str],
) -> Vec<Test> {
    let cut = groups::<B>().into_iter().filter(|group| names.contains(&group.name));
    let test = |group: Group<B>| {
        let Group { op, name: group_name, run, .. } = group;
        Test::new(format!("conformance::{name}::ranks::{op}::{group_name}"), move || {
            let backend = open()?;
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
    use mla_support::gpu;
    let cases = Cases::asked_for();
    let variants = WGPU_VARIANTS.map(Some);
    let by_variant = move |_: usize, group: &Group<_>| group.by_variant || cases != Cases::Representative;
    let mut tests = of_backend("wgpu", gpu, &variants, cases, by_variant);
    if cases == Cases::Representative {
        tests.extend(of_backend("wgpu", gpu, &[None], cases, |_, group| !group.by_variant));
    }
    // A sample, unless more was asked for.
    let cut = if cases == Cases::Representative { &CUT[..1] } else { &CUT[..] };
    tests.extend(in_ranks("wgpu", gpu, cases, cut));
    tests.extend(in_mixed_ranks(cases, cut));
    // Only a part: the tests above run every group on wgpu.
    let some = |_: usize, group: &Group<_>| {
        ["varlen", "merges", "page_copies", "refuses_layers", "refuses_ops"].contains(&group.name)
    };
    tests.push(Test::new("conformance::wgpu::the_lists_name_every_variant", the_lists_name_every_variant));
    let any = || gpu().map(AnyBackend::from);
    tests.extend(of_backend("any_wgpu", any, &[Some("shared")], cases, some));
    tests
}

/// Even ranks on wgpu, odd ones on the CPU.
#[cfg(feature = "wgpu")]
fn in_mixed_ranks(cases: Cases, names: &'static [&'static str]) -> Vec<Test> {
    let cut = groups::<wgpu_mla::gpu::Gpu>().into_iter().filter(|group| names.contains(&group.name));
    let test = |group: Group<_>| {
        let Group { op, name: group_name, run, .. } = group;
        Test::new(format!("conformance::wgpu_and_cpu::ranks::{op}::{group_name}"), move || {
            let (gpu, cpu) = (mla_support::gpu()?, Cpu::new());
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
    use mla_support::cuda;
    let variants: Vec<_> = [None].into_iter().chain(wgpu_mla::cuda::decode_variants().map(Some)).collect();
    let mut tests = of_backend("cuda", cuda, &variants, Cases::Full, |_, _| true);
    let any = || cuda().map(AnyBackend::from);
    tests.extend(in_ranks("cuda", cuda, Cases::Full, &CUT));
    tests.extend(of_backend("any_cuda", any, &[None], Cases::Full, |_, _| true));
    tests
}

fn of_backend<B: Backend + 'static>(
    name: &'static str,
    open: impl Fn() -> Result<B, Ignored> + Copy + Send + 'static,
    variants: &[Option<&'static str>],
    cases: Cases,
    wanted: impl Fn(usize, &Group<B>) -> bool,
) -> Vec<Test> {
    let mut tests = Vec::new();
    for (place, &variant) in variants.iter().enumerate() {
        for group in groups::<B>().into_iter().filter(|group| wanted(place, group)) {
            let Group { op, name: group_name, run, .. } = group;
            let test = format!("conformance::{name}::{}::{op}::{group_name}", variant.unwrap_or("best"));
            tests.push(Test::new(test, move || {
                let backend = open()?;
                let mut session = Session::new(&backend);
                (session.variant, session.place, session.cases) = (variant, place, cases);
                run(&session);
                ended(name, &session)
            }));
        }
    }
    tests
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
