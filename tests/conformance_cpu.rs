//! The conformance suite on the CPU backend, each row of its ladder.

mod common;

use wgpu_mla::cpu::Cpu;

common::suite::conformance_tests!(|| Some(Cpu::new()));

mod portable {
    use super::Cpu;

    crate::common::suite::conformance_tests!(|| Some(Cpu::new()), Some("portable"), true);
}
