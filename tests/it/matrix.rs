//! Every decode variant x dims x cache dtype x query dtype x head count on wgpu, on small lengths, against the oracle.
//!
//! The conformance suite tests a few shapes thoroughly, this test many shapes briefly. A software device spends its time compiling
//! pipelines, so head counts with the same tile share one, and not every pair of dtypes is run: see [`Session::takes`].

use crate::conformance::{WGPU_VARIANTS, ended};
use crate::harness::Test;
use mla_support::paint::{Make, sequences};
use mla_support::suite::run::{How, Slicing};
use mla_support::suite::{Cases, Session};
use mla_support::{Outcome, gpu};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::{Dtype, SUPPORTED_DIMS, SplitPolicy};

const HEADS: [u32; 6] = [1, 6, 16, 20, 40, 128];

/// One test a variant and dims: `matrix::subgroup::512_64`.
pub fn tests() -> Vec<Test> {
    let name = "matrix::representatives_take_every_dims_and_dtype";
    let mut tests = vec![Test::new(name, representatives_take_every_dims_and_dtype)];
    for (place, variant) in WGPU_VARIANTS.into_iter().enumerate() {
        for (turn, (latent, rope, _)) in SUPPORTED_DIMS.into_iter().enumerate() {
            let name = format!("matrix::{variant}::{latent}_{rope}");
            tests.push(Test::new(name, move || matrix((place, variant), (turn, (latent, rope)))));
        }
    }
    tests
}

/// `scripts/check.sh` relies on it: the representatives run each variant with every dims, and every dtype of cache and query.
fn representatives_take_every_dims_and_dtype() {
    let cpu = Cpu::new();
    let all = 0..Dtype::ALL.len();
    for place in 0..WGPU_VARIANTS.len() {
        let mut session = Session::new(&cpu);
        (session.place, session.cases) = (place, Cases::Representative);
        let mut taken =
            [vec![false; SUPPORTED_DIMS.len()], vec![false; Dtype::ALL.len()], vec![false; Dtype::ALL.len()]];
        for turn in 0..SUPPORTED_DIMS.len() {
            for (cache, query) in all.clone().flat_map(|cache| all.clone().map(move |query| (cache, query))) {
                if session.takes(turn, cache, query) {
                    (taken[0][turn], taken[1][cache], taken[2][query]) = (true, true, true);
                }
            }
        }
        assert!(taken.iter().flatten().all(|&is| is), "variant {place}: dims, caches, queries: {taken:?}");
    }
}

fn matrix((place, variant): (usize, &'static str), (turn, dims): (usize, (u32, u32))) -> Outcome {
    let gpu = gpu()?;
    let mut session = Session::new(&gpu);
    (session.variant, session.place, session.cases) = (Some(variant), place, Cases::asked_for());
    for (cache_turn, cache) in Dtype::ALL.into_iter().enumerate() {
        for (query_turn, query) in Dtype::ALL.into_iter().enumerate() {
            if !session.takes(turn, cache_turn, query_turn) {
                continue;
            }
            for heads in session.one_in(2, HEADS) {
                let policy = [SplitPolicy::FixedTokens(32), SplitPolicy::OneSplit][cache_turn % 2];
                let slicing = [Slicing::Split, Slicing::Whole][cache_turn / 2 % 2];
                let sequences = sequences(&[(45, 1), (7, 2)]);
                let problem = Make { dims, cache, query, heads, sequences, ..Make::default() }.build();
                session.check(&problem, &How { policy, slicing, ..How::default() });
            }
        }
    }
    session.finish(&format!("every dtype and head count of {}/{}", dims.0, dims.1));
    ended("wgpu", &session)
}
