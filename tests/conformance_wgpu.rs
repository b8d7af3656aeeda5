//! The conformance suite on wgpu, each row of its ladder, on the adapter that `Gpu::new` picks.
#![cfg(feature = "wgpu")]

mod common;

use std::sync::OnceLock;

use wgpu_mla::gpu::Gpu;

/// One device for all tests, so that each pipeline is compiled once.
fn gpu() -> Option<Gpu> {
    static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
    GPU.get_or_init(common::gpu_or_say_why).clone()
}

mod subgroup {
    crate::common::suite::conformance_tests!(crate::gpu, Some("subgroup"));
}

mod coop {
    crate::common::suite::conformance_tests!(crate::gpu, Some("coop"));
}

mod coop_small {
    crate::common::suite::conformance_tests!(crate::gpu, Some("coop_small"));
}

mod shared {
    crate::common::suite::conformance_tests!(crate::gpu, Some("shared"));
}
