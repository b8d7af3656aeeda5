//! The conformance suite on the CUDA backend, each row of its ladder. Without a card it says so; with `MLA_REQUIRE_CUDA=1` it fails.

mod common;

use std::sync::OnceLock;

use wgpu_mla::cuda::Cuda;

fn cuda() -> Option<Cuda> {
    static CUDA: OnceLock<Option<Cuda>> = OnceLock::new();
    let cuda = CUDA.get_or_init(|| match Cuda::new(0) {
        Ok(cuda) => Some(cuda),
        Err(error) => {
            assert!(std::env::var("MLA_REQUIRE_CUDA").is_err(), "{error}");
            eprintln!("NOT RUN: {error}");
            None
        }
    });
    cuda.clone()
}

common::suite::conformance_tests!(crate::cuda);

mod rows32 {
    crate::common::suite::conformance_tests!(crate::cuda, Some("rows32"), true);
}

mod rows64 {
    crate::common::suite::conformance_tests!(crate::cuda, Some("rows64"), true);
}

mod rows16_small {
    crate::common::suite::conformance_tests!(crate::cuda, Some("rows16_small"), true);
}

mod simple {
    crate::common::suite::conformance_tests!(crate::cuda, Some("simple"), true);
}
