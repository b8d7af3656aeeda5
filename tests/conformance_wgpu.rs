//! The conformance suite on wgpu, each row of its ladder, on the adapter that `Gpu::new` picks.
//!
//! A kernel takes seconds to compile on a software device, so the groups of dtypes take every pair only where `MLA_FULL=1`.
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
    crate::common::suite::conformance_tests!(crate::gpu, Some("subgroup"), crate::common::suite::full());
}

mod coop {
    crate::common::suite::conformance_tests!(crate::gpu, Some("coop"), crate::common::suite::full());
}

mod coop_small {
    crate::common::suite::conformance_tests!(crate::gpu, Some("coop_small"), crate::common::suite::full());
}

mod shared {
    crate::common::suite::conformance_tests!(crate::gpu, Some("shared"), crate::common::suite::full());
}
