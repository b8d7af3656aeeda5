//! The interface between a model and its attention.

use std::time::{Duration, Instant};

use wgpu_mla::{LayerGuard, SeqId};

use crate::{Pages, Result};

/// The output of a layer's projections for a step's tokens, row by row.
#[derive(Clone)]
pub struct Rows {
    /// Queries `[T, H, P + R]`, the rotary part last and not yet rotated.
    pub q: Vec<f32>,
    /// Latents `[T, L]`, normed.
    pub kv_c: Vec<f32>,
    /// Rotary keys `[T, R]`, not yet rotated.
    pub k_pe: Vec<f32>,
    /// For a layer with an indexer.
    pub index: Option<IndexRows>,
}

/// The output of an indexer's projections.
#[derive(Clone)]
pub struct IndexRows {
    /// Index queries `[T, Hi, 128]`, not yet rotated.
    pub q: Vec<f32>,
    /// Index keys `[T, 128]`, neither normed nor rotated yet.
    pub k: Vec<f32>,
    /// The weight of each head, `[T, Hi]`, not yet scaled.
    pub weights: Vec<f32>,
}

/// All layers' attention over one paged cache: rope, append, absorb, attend, `v_up`.
pub trait Attention {
    /// For a person: the adapter, and how it attends.
    fn describe(&self) -> String;

    /// The pages of each sequence.
    fn pages(&self) -> &Pages;

    /// To add, fork and free sequences between steps.
    fn pages_mut(&mut self) -> &mut Pages;

    /// Begins a step: each sequence grows by so many new tokens, which come one after the other in this order.
    ///
    /// # Errors
    /// [`wgpu_mla::Error::OutOfPages`] where the pool is too small.
    fn begin(&mut self, batch: &[(SeqId, u32)]) -> Result<()>;

    /// One layer of the step, layers in order: stores the new rows, then attends, causally. Gives `[T, H, V]`.
    ///
    /// # Errors
    /// The errors of the backend.
    fn attend(&mut self, layer: usize, rows: &Rows) -> Result<Vec<f32>>;

    /// All of the step, by an engine that has the model's layers too: the logits that follow the tokens at `wanted`,
    /// `[wanted, vocab_size]`. `None` of one that only attends.
    ///
    /// # Errors
    /// The errors of the engine.
    fn step(&mut self, _tokens: &[u32], _wanted: &[u32]) -> Result<Option<Vec<f32>>> {
        Ok(None)
    }

    /// Bytes that the cache has in the device's memory now.
    fn cache_bytes(&self) -> u64;

    /// What each layer's rounding lost since the last call; nothing where it is not counted.
    ///
    /// # Errors
    /// The errors of the backend.
    fn losses(&mut self) -> Result<Vec<LayerGuard>> {
        Ok(Vec::new())
    }
}

/// An attention that measures its time.
pub struct Timed<'a> {
    inner: &'a mut dyn Attention,
    spent: Duration,
}

impl<'a> Timed<'a> {
    pub fn new(inner: &'a mut dyn Attention) -> Self {
        Self { inner, spent: Duration::ZERO }
    }

    /// The time spent since the last call.
    pub fn take(&mut self) -> Duration {
        std::mem::take(&mut self.spent)
    }

    fn timed<T>(&mut self, call: impl FnOnce(&mut dyn Attention) -> T) -> T {
        let start = Instant::now();
        let result = call(self.inner);
        self.spent += start.elapsed();
        result
    }
}

impl Attention for Timed<'_> {
    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn pages(&self) -> &Pages {
        self.inner.pages()
    }

    fn pages_mut(&mut self) -> &mut Pages {
        self.inner.pages_mut()
    }

    fn cache_bytes(&self) -> u64 {
        self.inner.cache_bytes()
    }

    fn begin(&mut self, batch: &[(SeqId, u32)]) -> Result<()> {
        self.timed(|attention| attention.begin(batch))
    }

    fn attend(&mut self, layer: usize, rows: &Rows) -> Result<Vec<f32>> {
        self.timed(|attention| attention.attend(layer, rows))
    }

    /// Not timed: who computes all layers attends while the host does something else.
    fn step(&mut self, tokens: &[u32], wanted: &[u32]) -> Result<Option<Vec<f32>>> {
        self.inner.step(tokens, wanted)
    }
}
