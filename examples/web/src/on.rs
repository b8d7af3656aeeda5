//! Attention on one device, awaited.

use generate::attention::Attention;
use generate::look::Layer;
use generate::{Model, Paged, Result, Setup, Stored};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::gpu::{self, Gpu};
use wgpu_mla::{Backend, Device, Dtype, SeqId};

/// The result of a step.
#[derive(Default)]
pub struct Step {
    pub logits: Vec<f32>,
    /// What was awaited for the attention.
    pub attention_ms: f64,
    /// The last token in each layer.
    pub layers: Vec<Layer>,
}

/// A device whose memory can be awaited.
pub trait Reads: Backend {
    /// The first bytes of a buffer of f32, once all that was submitted is done.
    async fn read(&self, buffer: &Self::Buffer, bytes: u64) -> Result<Vec<f32>>;
}

impl Reads for Gpu {
    async fn read(&self, buffer: &Self::Buffer, bytes: u64) -> Result<Vec<f32>> {
        let read = gpu::read(self.device(), self.queue(), buffer, bytes).await;
        // A lost device fails in other words than those of its loss.
        self.check_lost()?;
        Ok(Dtype::F32.decode_all(&read?))
    }
}

impl Reads for Cpu {
    async fn read(&self, buffer: &Self::Buffer, bytes: u64) -> Result<Vec<f32>> {
        Ok(Dtype::F32.decode_all(&self.download(buffer, bytes)?))
    }
}

pub struct On<D: Reads> {
    pub device: D,
    pub paged: Paged<D>,
    stored: Stored<D>,
}

impl<D: Reads> On<D> {
    pub fn new(device: D, model: &Model, setup: &Setup) -> Result<Self> {
        let paged = Paged::new(&device, model, setup)?;
        let stored = Stored::new(&device, &paged, setup.step_tokens)?;
        Ok(Self { device, paged, stored })
    }

    /// Computes a sequence's next tokens.
    pub async fn step(&mut self, model: &Model, sequence: SeqId, tokens: &[u32]) -> Result<Step> {
        self.paged.begin(&[(sequence, tokens.len() as u32)])?;
        let mut step = Step::default();
        let mut pass = model.pass(tokens, &self.paged.pages().positions)?;
        while let Some(rows) = pass.rows()? {
            let start = crate::now();
            self.paged.submit(pass.layer, &rows)?;
            let (out, bytes) = self.paged.out();
            let out = self.device.read(out, bytes).await?;
            step.attention_ms += crate::now() - start;
            step.layers.push(Layer::last(&rows.q, &out, tokens.len()));
            pass.attended(out)?;
        }
        step.logits = pass.logits(&[tokens.len() as u32 - 1])?;
        Ok(step)
    }

    /// What the cache holds of the sequence's tokens from `begin` to `end`, `[tokens, layers, L + R]`.
    pub async fn stored(&mut self, begin: u32, end: u32) -> Result<Vec<f32>> {
        let mut rows = Vec::new();
        let mut at = begin;
        while at < end {
            let tokens = (end - at).min(self.stored.max_tokens());
            let (buffer, bytes) = self.stored.submit(&self.paged, at, tokens)?;
            rows.extend(self.device.read(buffer, bytes).await?);
            at += tokens;
        }
        Ok(rows)
    }
}
