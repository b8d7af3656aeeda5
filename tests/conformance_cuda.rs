//! The conformance suite on the CUDA backend, each row of its ladder. Without a card it says so; with `MLA_REQUIRE_CUDA=1` it fails.

mod common;

use common::cuda_or_say_why as cuda;

common::suite::conformance_tests!(crate::cuda);

mod rows32 {
    crate::common::suite::conformance_tests!(crate::cuda, Some("rows32"), true);
}

mod rows64 {
    crate::common::suite::conformance_tests!(crate::cuda, Some("rows64"), true);
}

mod rows64_wgmma {
    crate::common::suite::conformance_tests!(crate::cuda, Some("rows64_wgmma"), true);
}

mod rows32_wgmma {
    crate::common::suite::conformance_tests!(crate::cuda, Some("rows32_wgmma"), true);
}

mod rows16_wgmma {
    crate::common::suite::conformance_tests!(crate::cuda, Some("rows16_wgmma"), true);
}

mod rows16 {
    crate::common::suite::conformance_tests!(crate::cuda, Some("rows16"), true);
}

mod rows16_tma {
    crate::common::suite::conformance_tests!(crate::cuda, Some("rows16_tma"), true);
}

mod rows64_small {
    crate::common::suite::conformance_tests!(crate::cuda, Some("rows64_small"), true);
}

mod rows32_small {
    crate::common::suite::conformance_tests!(crate::cuda, Some("rows32_small"), true);
}

mod rows16_small {
    crate::common::suite::conformance_tests!(crate::cuda, Some("rows16_small"), true);
}

mod simple {
    crate::common::suite::conformance_tests!(crate::cuda, Some("simple"), true);
}
