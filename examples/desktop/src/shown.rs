//! What the window shows, as plain data: written by the threads that know it, read by each frame.

use std::sync::Arc;

use generate::Furthest;
use wgpu_mla::Dtype;

/// All of it.
#[derive(Clone, Default)]
pub struct Shown {
    pub phase: Phase,
    /// What a person should know, and what to do about it.
    pub notice: Option<String>,
    pub about: Option<About>,
    pub dtypes: Vec<DtypeShown>,
    pub sequences: Vec<SequenceShown>,
    /// The text of each token by itself.
    pub vocabulary: Arc<Vec<String>>,
    pub pages: PagesShown,
    pub weights: Option<Arc<Weights>>,
    pub check: Check,
    pub speed: Speed,
}

/// What is going on.
#[derive(Clone, Default, PartialEq)]
pub enum Phase {
    #[default]
    Loading,
    /// Kernels compile on a thread of their own; `compiled.rs` knows how far they are.
    Compiling,
    Reading {
        done: usize,
        all: usize,
    },
    Writing,
    /// Stopped by a person.
    Paused,
    /// Every text is at its end.
    Done,
    /// Nothing goes on until a person does something; the notice says what.
    Failed,
}

impl Phase {
    /// Whether frames carry slices of attention.
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Reading { .. } | Self::Writing)
    }
}

/// Who attends.
#[derive(Clone)]
pub struct About {
    /// The adapter's name and API, and with its driver.
    pub name: String,
    pub adapter: String,
    pub variant: &'static str,
    /// Whether the variant rounds softmax weights to 16 bits.
    pub rounds: bool,
    pub why: String,
    pub kv: Dtype,
    /// What is to be told of the cache's scales.
    pub scales: Option<&'static str>,
    pub slice: String,
}

/// A dtype of the cache, and what keeps this device from it.
#[derive(Clone)]
pub struct DtypeShown {
    pub dtype: Dtype,
    pub lacks: Option<String>,
}

/// A sequence.
#[derive(Clone)]
pub struct SequenceShown {
    /// From 1, never given twice in one text: it chooses the colour too.
    pub number: usize,
    /// The sequence that it was forked from, and how many tokens both have.
    pub forked: Option<(usize, usize)>,
    pub tokens: Arc<Vec<u32>>,
    /// How many of them are the prompt's.
    pub prompt_tokens: usize,
    /// What it had at first, the prompt or the parent's text, and what it wrote itself.
    pub given: String,
    pub written: String,
    /// Where it has come to its end, why.
    pub ended: Option<&'static str>,
}

/// The cache.
#[derive(Clone, Default)]
pub struct PagesShown {
    pub page_size: usize,
    pub num_pages: usize,
    /// For each sequence its number, its tokens in the cache, and its pages in order.
    pub tables: Vec<(usize, usize, Vec<u32>)>,
}

/// Softmax weights of a sequence's last token, `[layers, heads, tokens]`.
pub struct Weights {
    pub number: usize,
    pub layers: usize,
    pub heads: usize,
    pub tokens: usize,
    pub values: Vec<f32>,
}

/// A decode against the f64 oracle.
#[derive(Clone, Default)]
pub enum Check {
    #[default]
    NotYet,
    Running,
    Done {
        furthest: Furthest,
        tokens: usize,
    },
}

/// The largest error that an element of a decode may have: of f32 sums, whose elements are up to about 4.
pub const TOLERANCE: f64 = 1e-4;
/// Like [`TOLERANCE`], for a variant that rounds softmax weights to 16 bits.
pub const ROUNDED_TOLERANCE: f64 = 2e-2;

/// The speed over the last second or so.
#[derive(Clone, Copy, Default)]
pub struct Speed {
    pub tokens_per_second: f64,
    /// Bytes of the cache that attention read, in 1e9 a second of its own time.
    pub gigabytes_per_second: f64,
    /// A layer's attention.
    pub layer_ms: f64,
    /// New tokens of all sequences since the window opened.
    pub tokens: u64,
}
