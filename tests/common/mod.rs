//! What the tests share: case files, the accuracy check, test problems and the conformance suite.
#![allow(dead_code)] // Each test binary uses a part.

pub mod case;
pub mod close;
pub mod paint;
pub mod suite;
