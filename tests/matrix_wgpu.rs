//! Every row of the ladder x dims x cache dtype x query dtype x head count, on small lengths, against the oracle.
//!
//! The conformance suite goes deep on a few shapes; this goes wide. What costs is the compile of each pipeline on a
//! software device, so the head counts of one tile share it, and `MLA_FULL=1` asks for every pair of dtypes.
#![cfg(feature = "wgpu")]

mod common;

use std::sync::OnceLock;

use common::paint::{Make, sequences};
use common::suite::run::{How, Slicing};
use common::suite::{Session, full};
use wgpu_mla::gpu::Gpu;
use wgpu_mla::{Dtype, Policy, SUPPORTED_DIMS};

fn gpu() -> Option<Gpu> {
    static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
    GPU.get_or_init(common::gpu_or_say_why).clone()
}

const HEADS: [u32; 6] = [1, 6, 16, 20, 40, 128];

fn matrix(variant: &str, dims: (u32, u32)) {
    let Some(gpu) = gpu() else { return };
    let mut session = Session::forced(&gpu, variant);
    // Without MLA_FULL=1 each cache dtype meets one query dtype, another one for each cache, and other ones in the next dims.
    session.every_pair = full();
    let place = SUPPORTED_DIMS.iter().position(|&(latent, rope, _)| (latent, rope) == dims);
    let place = place.expect("rows! names supported dims");
    for (turn, cache) in Dtype::ALL.into_iter().enumerate() {
        for (query_turn, query) in Dtype::ALL.into_iter().enumerate() {
            if !session.takes(place, turn, query_turn) {
                continue;
            }
            for heads in HEADS {
                let policy = [Policy::FixedTokens(32), Policy::OneSplit][turn % 2];
                let slicing = [Slicing::Split, Slicing::Whole][turn / 2];
                let sequences = sequences(&[(45, 1), (7, 2)]);
                let problem = Make { dims, cache, query, heads, sequences, ..Make::default() }.build();
                session.check(&problem, &How { policy, slicing, ..How::default() });
            }
        }
    }
    session.finish(&format!("every dtype and head count of {}/{}", dims.0, dims.1));
}

macro_rules! rows {
    ($($name:ident: $variant:literal, $dims:expr;)*) => {$(
        #[test]
        fn $name() {
            matrix($variant, $dims);
        }
    )*};
}

rows! {
    coop_512_64: "coop", (512, 64);
    coop_256_64: "coop", (256, 64);
    coop_256_32: "coop", (256, 32);
    coop_512_0: "coop", (512, 0);
    coop_small_512_64: "coop_small", (512, 64);
    coop_small_256_64: "coop_small", (256, 64);
    coop_small_256_32: "coop_small", (256, 32);
    coop_small_512_0: "coop_small", (512, 0);
    subgroup_512_64: "subgroup", (512, 64);
    subgroup_256_64: "subgroup", (256, 64);
    subgroup_256_32: "subgroup", (256, 32);
    subgroup_512_0: "subgroup", (512, 0);
    shared_512_64: "shared", (512, 64);
    shared_256_64: "shared", (256, 64);
    shared_256_32: "shared", (256, 32);
    shared_512_0: "shared", (512, 0);
}
