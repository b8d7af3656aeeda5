//! Every decode variant x dims x cache dtype x query dtype x head count on wgpu, on small lengths, against the oracle.
//!
//! The conformance suite goes deep on a few shapes; this goes wide. What costs is the compile of each pipeline on a
//! software device, so the head counts of one tile share it, and not every pair of dtypes is taken: see [`Session::takes`].

use crate::common::paint::{Make, sequences};
use crate::common::suite::run::{How, Slicing};
use crate::common::suite::{Cases, Session};
use crate::common::{Outcome, gpu};
use crate::conformance::{WGPU_VARIANTS, ended};
use crate::harness::Test;
use wgpu_mla::{Dtype, Policy, SUPPORTED_DIMS};

const HEADS: [u32; 6] = [1, 6, 16, 20, 40, 128];

/// One test a variant and dims: `matrix::subgroup::512_64`.
pub fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for (place, variant) in WGPU_VARIANTS.into_iter().enumerate() {
        for (turn, (latent, rope, _)) in SUPPORTED_DIMS.into_iter().enumerate() {
            let name = format!("matrix::{variant}::{latent}_{rope}");
            tests.push(Test::new(name, move || matrix((place, variant), (turn, (latent, rope)))));
        }
    }
    tests
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
                let policy = [Policy::FixedTokens(32), Policy::OneSplit][cache_turn % 2];
                let slicing = [Slicing::Split, Slicing::Whole][cache_turn / 2];
                let sequences = sequences(&[(45, 1), (7, 2)]);
                let problem = Make { dims, cache, query, heads, sequences, ..Make::default() }.build();
                session.check(&problem, &How { policy, slicing, ..How::default() });
            }
        }
    }
    session.finish(&format!("every dtype and head count of {}/{}", dims.0, dims.1));
    ended("wgpu", &session)
}
