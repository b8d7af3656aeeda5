//! Every row of the ladder x dims x cache dtype x query dtype x head count, on small lengths, against the oracle.
//!
//! The conformance suite goes deep on a few shapes; this goes wide. What costs is the compile of each pipeline on a
//! software device, so the head counts of one tile share it.
#![cfg(feature = "wgpu")]

mod common;

use std::sync::OnceLock;

use common::paint::{Make, sequences};
use common::suite::Session;
use common::suite::run::{How, Slicing};
use wgpu_mla::gpu::Gpu;
use wgpu_mla::{Dtype, Policy};

fn gpu() -> Option<Gpu> {
    static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
    GPU.get_or_init(common::gpu_or_say_why).clone()
}

fn matrix(variant: &str, dims: (u32, u32)) {
    let Some(gpu) = gpu() else { return };
    let session = Session::forced(&gpu, variant);
    for (turn, cache) in Dtype::ALL.into_iter().enumerate() {
        for query in Dtype::ALL {
            for heads in [1, 6, 16, 20, 40, 128] {
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
    subgroup_512_64: "subgroup", (512, 64);
    subgroup_256_64: "subgroup", (256, 64);
    subgroup_256_32: "subgroup", (256, 32);
    subgroup_512_0: "subgroup", (512, 0);
    shared_512_64: "shared", (512, 64);
    shared_256_64: "shared", (256, 64);
    shared_256_32: "shared", (256, 32);
    shared_512_0: "shared", (512, 0);
}
