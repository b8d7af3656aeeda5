//! Writes text, a token at a time.

use generate::attention::Attention;
use generate::look::{Cached, Layer};
use generate::{Checkpoint, Error, Furthest, Pages, Result, Sampler, Sampling, Setup, Text, softmax_weights};
use serde_json::{Value, json};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::gpu::{Gpu, checked};
use wgpu_mla::{Device, Dtype, SeqId};

use crate::on::{On, Step};

/// Small pages, since a page of the cache is something to look at here.
const PAGE_SIZE: u32 = 16;
const STEP_TOKENS: u32 = 256;

pub struct Writer {
    checkpoint: Checkpoint,
    pub text: Text,
    /// Kept from one dtype to the next.
    gpu: Option<Gpu>,
    attention: Option<Either>,
    kv: Dtype,
    sequence: Option<SeqId>,
    sampler: Sampler,
    /// The prompt's and the new ones; the last is not in the cache yet.
    pub tokens: Vec<u32>,
    pub prompt_tokens: usize,
    pub attention_ms: f64,
    pub cache_bytes: f64,
    /// The last token of the cache in each layer.
    last: Vec<Layer>,
    cached: Cached,
}

enum Either {
    Gpu(Box<On<Gpu>>),
    Cpu(Box<On<Cpu>>),
}

/// The same call on whichever device attends.
macro_rules! on {
    ($either:expr, $on:ident => $call:expr) => {
        match $either {
            Either::Gpu($on) => $call,
            Either::Cpu($on) => $call,
        }
    };
}

impl Either {
    fn pages(&self) -> &Pages {
        on!(self, on => on.paged.pages())
    }

    fn pages_mut(&mut self) -> &mut Pages {
        on!(self, on => on.paged.pages_mut())
    }
}

impl Writer {
    pub fn new(config: &str, weights: Vec<u8>, tokenizer: &str, scales: &str) -> Result<Self> {
        Ok(Self {
            checkpoint: Checkpoint::parse(config, weights, scales)?,
            text: Text::parse(tokenizer)?,
            gpu: None,
            attention: None,
            kv: Dtype::F16,
            sequence: None,
            sampler: Sampler::new(Sampling { temperature: 0.0, seed: 0, ..Sampling::default() }, 0),
            tokens: Vec::new(),
            prompt_tokens: 0,
            attention_ms: 0.0,
            cache_bytes: 0.0,
            last: Vec::new(),
            cached: Cached::default(),
        })
    }

    pub async fn open(&mut self, kv: &str, on_gpu: bool) -> Result<()> {
        self.kv = dtype(kv)?;
        self.forget();
        self.attention = None;
        let model = &self.checkpoint.model;
        let setup = Setup {
            kv: self.kv.into(),
            page_size: PAGE_SIZE,
            tokens: model.config.max_position_embeddings as u32,
            step_tokens: STEP_TOKENS,
            workspace_bytes: 8 << 20,
            k_scales: self.checkpoint.k_scales.clone(),
            ..Setup::default()
        };
        if !on_gpu {
            self.gpu = None;
            self.attention = Some(Either::Cpu(Box::new(On::new(Cpu::new(), model, &setup)?)));
            return Ok(());
        }
        let gpu = match self.gpu.take().filter(|gpu| gpu.check_lost().is_ok()) {
            Some(gpu) => gpu,
            None => Gpu::request().await?,
        };
        let mut wrong = None;
        let make = || match On::new(gpu.clone(), model, &setup) {
            Ok(on) => Ok(Some(on)),
            Err(Error::Mla(error)) => Err(error),
            // Such as candle's, which is no error of the device.
            Err(other) => {
                wrong = Some(other);
                Ok(None)
            }
        };
        let on = checked(gpu.device(), "the kernels", make).await?;
        if let Some(wrong) = wrong {
            return Err(wrong);
        }
        self.attention = on.map(|on| Either::Gpu(Box::new(on)));
        self.gpu = Some(gpu);
        Ok(())
    }

    pub fn describe(&self) -> Value {
        let Some(attention) = &self.attention else { return Value::Null };
        let config = &self.checkpoint.model.config;
        let (layer, device) = on!(attention, on => ((on.paged.layer().variant(), on.paged.layer().why().to_owned()), on.device.name()));
        json!({
            "device": device,
            "gpu": matches!(attention, Either::Gpu(_)),
            "variant": layer.0,
            "why": layer.1,
            "kv": self.kv.to_string(),
            "layers": config.num_layers,
            "heads": config.shape.num_heads,
            "row_bytes": config.shape.row_elems() as usize * self.kv.bytes(),
            "page_size": PAGE_SIZE,
            "num_pages": attention.pages().spec().num_pages,
            "positions": config.max_position_embeddings,
        })
    }

    pub fn vocabulary(&self) -> Result<Vec<String>> {
        (0..self.checkpoint.model.config.vocab_size as u32).map(|token| self.text.decode(&[token])).collect()
    }

    pub fn lost(&self) -> Option<String> {
        self.gpu.as_ref()?.check_lost().err().map(|error| error.to_string())
    }

    pub async fn begin(&mut self, prompt: &str, temperature: f32, seed: u32) -> Result<u32> {
        let tokens = self.text.encode(prompt)?;
        let most = self.checkpoint.model.config.max_position_embeddings;
        if tokens.is_empty() || tokens.len() >= most {
            let got = tokens.len();
            return Err(Error::Input(format!("the prompt has {got} tokens: give it 1 to {}", most - 1)));
        }
        self.forget();
        let sampling = Sampling { temperature, seed: seed.into(), ..Sampling::default() };
        self.sampler = Sampler::new(sampling, 0);
        (self.attention_ms, self.cache_bytes) = (0.0, 0.0);
        let sequence = self.attention()?.pages_mut().add();
        self.sequence = Some(sequence);
        self.prompt_tokens = tokens.len();
        let mut next = 0;
        for piece in tokens.chunks(STEP_TOKENS as usize) {
            let step = self.step(sequence, piece).await?;
            self.tokens.extend_from_slice(piece);
            next = self.sampler.next(&step.logits);
            self.last = step.layers;
        }
        self.tokens.push(next);
        Ok(next)
    }

    pub async fn next(&mut self) -> Result<Option<u32>> {
        let config = &self.checkpoint.model.config;
        let (Some(sequence), Some(&token)) = (self.sequence, self.tokens.last()) else {
            return Err(Error::Input("there is no text to go on with: begin one".into()));
        };
        if config.eos.contains(&token) || self.tokens.len() >= config.max_position_embeddings {
            return Ok(None);
        }
        let row = config.shape.row_elems() as usize * self.kv.bytes() * config.num_layers;
        let step = self.step(sequence, &[token]).await?;
        self.attention_ms += step.attention_ms;
        self.cache_bytes += (self.tokens.len() * row) as f64;
        let next = self.sampler.next(&step.logits);
        self.last = step.layers;
        self.tokens.push(next);
        Ok(Some(next))
    }

    async fn step(&mut self, sequence: SeqId, tokens: &[u32]) -> Result<Step> {
        let model = &self.checkpoint.model;
        let attention = self.attention.as_mut().ok_or_else(unopened)?;
        on!(attention, on => on.step(model, sequence, tokens).await)
    }

    pub fn pages(&self) -> Vec<i32> {
        let (Some(attention), true) = (&self.attention, self.sequence.is_some()) else { return Vec::new() };
        attention.pages().of_first().to_vec()
    }

    pub async fn weights(&mut self) -> Result<Vec<f32>> {
        self.look().await?;
        let mut all = Vec::new();
        for (layer, token) in self.last.iter().enumerate() {
            let (config, kv_b) = (&self.checkpoint.model.config, self.checkpoint.model.kv_b_proj(layer)?);
            let q_pe = token.rotated(config, self.cached.tokens() - 1)?;
            all.extend(softmax_weights(config, &self.cached, layer, token, &q_pe, &kv_b));
        }
        Ok(all)
    }

    pub async fn check(&mut self) -> Result<Value> {
        self.look().await?;
        if self.last.is_empty() {
            return Err(Error::Input("there is no token to check yet: begin a text".into()));
        }
        let mut furthest = Furthest::default();
        for (layer, token) in self.last.iter().enumerate() {
            let (config, kv_b) = (&self.checkpoint.model.config, self.checkpoint.model.kv_b_proj(layer)?);
            let q_pe = token.rotated(config, self.cached.tokens() - 1)?;
            furthest.compare(config, &self.cached, layer, token, &q_pe, &kv_b);
        }
        let Furthest { error, layer, head, largest, elements } = furthest;
        let error = if error.is_finite() { json!(error) } else { Value::Null };
        Ok(json!({
            "error": error, "layer": layer, "head": head, "largest": largest, "elements": elements,
            "tokens": self.cached.tokens(),
        }))
    }

    /// Reads what the cache has got since.
    async fn look(&mut self) -> Result<()> {
        if self.cached.tokens() == 0 {
            self.cached = Cached::new(&self.checkpoint.model.config);
        }
        let (begin, end) = (self.cached.tokens() as u32, self.tokens.len().saturating_sub(1) as u32);
        if self.sequence.is_some() && begin < end {
            let attention = self.attention.as_mut().ok_or_else(unopened)?;
            let rows = on!(attention, on => on.stored(begin, end).await)?;
            self.cached.rows.extend(rows);
        }
        Ok(())
    }

    /// Leaves the text, and gives its pages back.
    fn forget(&mut self) {
        if let (Some(sequence), Some(attention)) = (self.sequence.take(), &mut self.attention) {
            // It fails only for a sequence that is not there.
            let _ = attention.pages_mut().free(sequence);
        }
        self.tokens.clear();
        self.last.clear();
        self.cached = Cached::default();
    }

    fn attention(&mut self) -> Result<&mut Either> {
        self.attention.as_mut().ok_or_else(unopened)
    }
}

fn unopened() -> Error {
    Error::Input("there is no device: open one".into())
}

fn dtype(name: &str) -> Result<Dtype> {
    let all = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::E4m3];
    let named = all.into_iter().find(|dtype| dtype.to_string() == name);
    named.ok_or_else(|| Error::Input(format!("cache dtype {name}: must be f32, f16, bf16 or e4m3")))
}
