//! One batch on several devices: each holds a share of every sequence's tokens, decodes it, and the ranks join their results.
//!
//! What a rank does is generic over its device and over what joins the ranks, so that threads (`main.rs`), processes with NCCL
//! (`main.rs`) and processes under `mpirun` (`examples/mpi`) run the same.

pub mod args;
pub mod bench;
pub mod devices;
pub mod model;
#[cfg(feature = "nccl")]
pub mod nccl;
pub mod problems;
pub mod rank;
pub mod report;
pub mod threads;
pub mod timed;

/// An error as text; the first that ends a rank.
pub type Result<T, E = String> = std::result::Result<T, E>;

/// The error as text.
pub fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
