//! Fuzz targets of wgpu-mla: plain functions on bytes. README.md says how to run them.

pub mod coverage;
pub mod memory;
pub mod mutate;
pub mod run;
pub mod source;
pub mod targets;

/// What became of an input. A failure panics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The code under test took it and gave a right result.
    Ran,
    /// The code under test refused it with an error.
    Refused,
}

/// A function on bytes, and how it is run.
#[derive(Clone, Copy)]
pub struct Target {
    /// Its name, which is also its folder's in `corpus`.
    pub name: &'static str,
    /// What it feeds, in a few words.
    pub about: &'static str,
    /// Runs one input.
    pub run: fn(&[u8]) -> Verdict,
    /// Inputs to begin with beside the committed ones, such as files of the repository.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// The least share of inputs that must run, in percent.
    pub least_ran: u64,
    /// The most bytes of an input.
    pub longest: usize,
    /// Bytes that an input may allocate.
    pub memory: usize,
}
