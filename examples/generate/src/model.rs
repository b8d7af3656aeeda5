//! The whole model: embedding, layers, head.

use std::ops::Range;
use std::path::Path;

use candle_core::{Device, Tensor};

use crate::attention::{Attention, Rows};
use crate::bytes::Bytes;
use crate::experts::Experts;
use crate::index_projections::IndexNorm;
use crate::kv_b::KvB;
use crate::layer::{Mlp, Norm, Projections, values};
use crate::matrix::Matrix;
use crate::weights::{Dim, Weights};
use crate::{Config, Result};

pub struct Model {
    pub config: Config,
    /// `kv_b_proj` of each layer: the attention's.
    pub kv_b: Vec<KvB>,
    /// The norm of index keys of each layer that has an indexer: the attention's too.
    pub index_norms: Vec<Option<IndexNorm>>,
    pub embed: Matrix,
    pub layers: Vec<Layer>,
    pub norm: Norm,
    pub head: Matrix,
    /// What of the files is weights.
    parts: Vec<(Bytes, Range<usize>)>,
}

pub struct Layer {
    pub input_norm: Norm,
    pub projections: Projections,
    pub post_norm: Norm,
    pub mlp: Either,
}

pub enum Either {
    Dense(Mlp),
    Experts(Experts),
}

impl Model {
    /// Opens a checkpoint's config and weights, which are checked, and read when they are first used. [`Model::read`] reads them.
    ///
    /// # Errors
    /// [`crate::Error::File`].
    pub fn open(dir: &Path) -> Result<Self> {
        let config = Config::open(dir)?;
        let weights = Weights::open(dir, &config)?;
        Self::load(config, weights)
    }

    /// A model of a config whose weights are noise, to measure its speed.
    ///
    /// # Errors
    /// [`crate::Error::File`] for a config that asks for tensors of which there is no noise.
    pub fn noise(config: Config) -> Result<Self> {
        let weights = Weights::noise(&config);
        Self::load(config, weights)
    }

    pub(crate) fn load(config: Config, mut weights: Weights) -> Result<Self> {
        let hidden = Dim(config.hidden_size, "hidden_size");
        let vocab = Dim(config.vocab_size, "vocab_size");
        let embed = weights.matrix("model.embed_tokens.weight", vocab, hidden)?;
        // Tied, the head is the embedding; a checkpoint that has a head all the same means that one, as in transformers.
        let head = match config.tie_word_embeddings {
            true => weights.matrix_if_there("lm_head.weight", &[vocab, hidden])?.unwrap_or(embed.clone()),
            false => weights.matrix("lm_head.weight", vocab, hidden)?,
        };
        let (mut layers, mut kv_b, mut index_norms) = (Vec::new(), Vec::new(), Vec::new());
        for layer in 0..config.num_layers {
            layers.push(Layer::take(&mut weights, &config, layer)?);
            kv_b.push(KvB::take(&mut weights, &config, layer)?);
            let name = format!("model.layers.{layer}.self_attn.indexer");
            let norm = config.indexer_of(layer).map(|_| IndexNorm::take(&mut weights, &name));
            index_norms.push(norm.transpose()?);
        }
        let norm = Norm::take(&mut weights, "model.norm", hidden, config.rms_norm_eps)?;
        let parts = weights.finish()?;
        Ok(Self { kv_b, index_norms, embed, layers, norm, head, parts, config })
    }

    /// Bytes of the weights, as the files have them.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|(_, part)| part.len() as u64).sum()
    }

    /// Reads all weights, so that the first tokens do not wait for them. `progress` is told of the bytes that are there.
    pub fn read(&self, progress: &mut dyn FnMut(u64)) {
        const AT_ONCE: usize = 8 << 20;
        let mut done = 0;
        for (file, part) in &self.parts {
            for begin in part.clone().step_by(AT_ONCE) {
                let end = part.end.min(begin + AT_ONCE);
                file.touch(begin..end);
                done += (end - begin) as u64;
                progress(done);
            }
        }
    }

    /// A step: each sequence's new tokens one after the other, as [`Attention::begin`] was told. Gives the logits that follow
    /// the tokens at `wanted`, `[wanted, vocab_size]`.
    ///
    /// # Errors
    /// [`crate::Error::Input`] for a token that the model does not have; those of the attention.
    pub fn step(&self, tokens: &[u32], wanted: &[u32], attention: &mut dyn Attention) -> Result<Vec<f32>> {
        self.config.check_tokens(tokens)?;
        if let Some(logits) = attention.step(tokens, wanted)? {
            return Ok(logits);
        }
        let mut pass = self.pass(tokens, &attention.pages().positions)?;
        while let Some(rows) = pass.rows()? {
            pass.attended(attention.attend(pass.layer, &rows)?)?;
        }
        pass.logits(wanted)
    }

    /// A step for a host that awaits its attention: [`Pass::rows`], then [`Pass::attended`], for each layer, and [`Pass::logits`].
    /// `positions` are those of the tokens, [`crate::Pages::positions`].
    ///
    /// # Errors
    /// [`crate::Error::Input`] for a token that the model does not have.
    pub fn pass(&self, tokens: &[u32], positions: &[i32]) -> Result<Pass<'_>> {
        self.config.check_tokens(tokens)?;
        let x = self.embed.select(tokens)?;
        let factors = self
            .config
            .rope
            .query_scaling
            .map(|scaling| positions.iter().map(|&at| scaling.of(at)).collect());
        Ok(Pass { model: self, layer: 0, x: scaled(x, self.config.scales.embeddings)?, factors })
    }

    /// A layer's `kv_b_proj`, `[H, P + V, L]`.
    ///
    /// # Errors
    /// The errors of candle.
    pub fn kv_b_proj(&self, layer: usize) -> Result<Vec<f32>> {
        Ok(self.kv_b[layer].values())
    }
}

/// A step between two layers.
pub struct Pass<'a> {
    model: &'a Model,
    /// The next one.
    pub layer: usize,
    /// Its input, `[T, hidden]`.
    x: Tensor,
    /// What each token's queries are multiplied by.
    factors: Option<Vec<f32>>,
}

impl Pass<'_> {
    /// What the next layer's attention needs; `None` after the last.
    ///
    /// # Errors
    /// The errors of candle.
    pub fn rows(&self) -> Result<Option<Rows>> {
        let layer = self.model.layers.get(self.layer);
        let rows =
            |layer: &Layer| layer.projections.rows(&layer.input_norm.of(&self.x)?, self.factors.as_deref());
        layer.map(rows).transpose()
    }

    /// The rest of that layer, from what its attention gave: `[T, H, V]`.
    ///
    /// # Errors
    /// The errors of candle.
    pub fn attended(&mut self, attended: Vec<f32>) -> Result<()> {
        self.x =
            self.model.layers[self.layer].after(&self.x, attended, self.model.config.scales.residuals)?;
        self.layer += 1;
        Ok(())
    }

    /// The logits that follow the tokens at `wanted`, `[wanted, vocab_size]`.
    ///
    /// # Errors
    /// The errors of candle.
    pub fn logits(self, wanted: &[u32]) -> Result<Vec<f32>> {
        let x = self.model.norm.of(&self.x.index_select(&Tensor::new(wanted, &Device::Cpu)?, 0)?)?;
        values(&self.model.head.of(&scaled(x, self.model.config.scales.head)?)?)
    }
}

impl Layer {
    fn take(weights: &mut Weights, config: &Config, layer: usize) -> Result<Self> {
        let (name, hidden) = (format!("model.layers.{layer}"), Dim(config.hidden_size, "hidden_size"));
        let mut norm =
            |norm: &str| Norm::take(weights, &format!("{name}.{norm}"), hidden, config.rms_norm_eps);
        let (input_norm, post_norm) = (norm("input_layernorm")?, norm("post_attention_layernorm")?);
        let mlp = format!("{name}.mlp");
        let mlp = match config.experts_of(layer) {
            Some(experts) => Either::Experts(Experts::take(weights, &mlp, config, experts)?),
            None => {
                let inner = Dim(config.intermediate_size, "intermediate_size");
                Either::Dense(Mlp::take(weights, &mlp, hidden, inner, config.mlp_bias)?)
            }
        };
        let projections = Projections::take(weights, &format!("{name}.self_attn"), config, layer)?;
        Ok(Self { input_norm, projections, post_norm, mlp })
    }

    fn after(&self, x: &Tensor, attended: Vec<f32>, residuals: f32) -> Result<Tensor> {
        let x = (x + scaled(self.projections.back(attended, x.dim(0)?)?, residuals)?)?;
        let normed = self.post_norm.of(&x)?;
        let add = match &self.mlp {
            Either::Dense(mlp) => mlp.of(&normed)?,
            Either::Experts(experts) => experts.of(&normed)?,
        };
        Ok((x + scaled(add, residuals)?)?)
    }
}

fn scaled(x: Tensor, by: f32) -> Result<Tensor> {
    Ok(if by == 1.0 { x } else { (x * f64::from(by))? })
}
