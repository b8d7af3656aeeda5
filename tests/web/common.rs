//! What the tests of every backend share.
#![allow(dead_code)] // The generators and comparisons are used; what waits for a device is not.

#[path = "../common/cache.rs"]
pub mod cache;
#[path = "../common/case.rs"]
pub mod case;
#[path = "../common/close.rs"]
pub mod close;
#[path = "../common/paint.rs"]
pub mod paint;
#[path = "../common/suite/mod.rs"]
pub mod suite;
