//! The parts of a layer that candle computes: projections, norms, the dense MLP.

use candle_core::Tensor;
use rayon::prelude::*;

use crate::attention::Rows;
use crate::index_projections::IndexProjections;
use crate::matrix::Matrix;
use crate::weights::{Dim, Weights};
use crate::{Config, Result};

/// `x . W^T + b`.
pub struct Linear {
    pub weight: Matrix,
    pub bias: Option<Vec<f32>>,
}

impl Linear {
    pub fn take(weights: &mut Weights, name: &str, out: Dim, inner: Dim) -> Result<Self> {
        Ok(Self { weight: weights.matrix(&format!("{name}.weight"), out, inner)?, bias: None })
    }

    /// With a bias, if config.json says so.
    pub fn take_with(weights: &mut Weights, name: &str, out: Dim, inner: Dim, bias: bool) -> Result<Self> {
        let weight = weights.matrix(&format!("{name}.weight"), out, inner)?;
        let bias = bias.then(|| values(&weights.take(&format!("{name}.bias"), &[out])?)).transpose()?;
        Ok(Self { weight, bias })
    }

    pub fn of(&self, x: &Tensor) -> Result<Tensor> {
        let tokens = x.dim(0)?;
        tensor(self.apply(&values(x)?, tokens)?, tokens)
    }

    /// The same of so many tokens, row by row.
    fn apply(&self, x: &[f32], tokens: usize) -> Result<Vec<f32>> {
        let mut y = self.weight.product(x, tokens)?;
        if let Some(bias) = &self.bias {
            for row in y.chunks_exact_mut(bias.len()) {
                row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
        Ok(y)
    }
}

/// RMS norm.
pub struct Norm {
    weight: Tensor,
    pub eps: f32,
}

impl Norm {
    pub fn take(weights: &mut Weights, name: &str, size: Dim, eps: f32) -> Result<Self> {
        Ok(Self { weight: weights.take(&format!("{name}.weight"), &[size])?, eps })
    }

    /// The factors of the elements.
    pub fn weight(&self) -> Result<Vec<f32>> {
        values(&self.weight)
    }

    pub fn of(&self, x: &Tensor) -> Result<Tensor> {
        Ok(candle_nn::ops::rms_norm(&x.contiguous()?, &self.weight, self.eps)?)
    }
}

/// `down(silu(gate(x)) * up(x))`.
pub struct Mlp {
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
}

impl Mlp {
    pub fn take(weights: &mut Weights, name: &str, hidden: Dim, inner: Dim, bias: bool) -> Result<Self> {
        let mut linear =
            |part, out, inner| Linear::take_with(weights, &format!("{name}.{part}"), out, inner, bias);
        Ok(Self {
            gate: linear("gate_proj", inner, hidden)?,
            up: linear("up_proj", inner, hidden)?,
            down: linear("down_proj", hidden, inner)?,
        })
    }

    /// All experts of a layer: each has tensors of its own, or all are stacked: in two, gate and up in one, as transformers 5 has them in
    /// memory and saves them for some models, or in three, as in GGUF files.
    pub fn take_experts(
        weights: &mut Weights,
        name: &str,
        all: Dim,
        hidden: Dim,
        inner: Dim,
    ) -> Result<Vec<Self>> {
        let both = Dim(2 * inner.0, "2 * moe_intermediate_size");
        let mut stack =
            |part: &str, shape: [Dim; 3]| weights.matrix_if_there(&format!("{name}.{part}"), &shape);
        let (gate_up, gate) =
            (stack("gate_up_proj", [all, both, hidden])?, stack("gate_proj", [all, inner, hidden])?);
        let up = if gate.is_some() { stack("up_proj", [all, inner, hidden])? } else { None };
        // Rows of each expert's gate begin at a multiple of `step`, and those that it is multiplied with are `begin` rows further.
        let (gate, up, step, begin) = match (gate_up, gate, up) {
            (Some(both_in_one), ..) => (both_in_one.clone(), both_in_one, both.0, inner.0),
            (_, Some(gate), Some(up)) => (gate, up, inner.0, 0),
            (_, Some(_), None) => return Err(weights.missing(&format!("{name}.up_proj"))),
            (_, None, _) => {
                let one = |expert| Self::take(weights, &format!("{name}.{expert}"), hidden, inner, false);
                return (0..all.0).map(one).collect();
            }
        };
        let name = format!("{name}.down_proj");
        let down =
            weights.matrix_if_there(&name, &[all, hidden, inner])?.ok_or_else(|| weights.missing(&name))?;
        let part = |of: &Matrix, first: usize, rows: usize| Linear {
            weight: of.part(first..first + rows),
            bias: None,
        };
        let one = |expert| Self {
            gate: part(&gate, expert * step, inner.0),
            up: part(&up, expert * step + begin, inner.0),
            down: part(&down, expert * hidden.0, hidden.0),
        };
        Ok((0..all.0).map(one).collect())
    }

    pub fn of(&self, x: &Tensor) -> Result<Tensor> {
        let (tokens, x) = (x.dim(0)?, values(x)?);
        let mut inner = self.gate.apply(&x, tokens)?;
        let up = self.up.apply(&x, tokens)?;
        let gated = |(gate, up): (&mut [f32], &[f32])| {
            gate.iter_mut().zip(up).for_each(|(gate, up)| *gate = *gate / (1.0 + (-*gate).exp()) * up);
        };
        const AT_ONCE: usize = 4096;
        inner.par_chunks_mut(AT_ONCE).zip(up.par_chunks(AT_ONCE)).for_each(gated);
        drop(up);
        tensor(self.down.apply(&inner, tokens)?, tokens)
    }
}

/// The projections to queries and latents, and `o_proj`.
pub struct Projections {
    pub query: Query,
    pub kv_a: Linear,
    pub kv_norm: Norm,
    pub out: Linear,
    latent: usize,
    rope: usize,
}

pub enum Query {
    Direct(Linear),
    LowRank(Box<LowRank>),
}

pub struct LowRank {
    pub down: Linear,
    pub norm: Norm,
    pub up: Linear,
    index: Option<IndexProjections>,
}

/// transformers gives these two norms its default, whatever the config says.
const INNER_EPS: f32 = 1e-6;

impl Projections {
    pub fn take(weights: &mut Weights, name: &str, config: &Config, layer: usize) -> Result<Self> {
        let (heads, bias) = (config.shape.num_heads as usize, config.attention_bias);
        let (latent, rope) = (config.shape.kv_lora_rank as usize, config.shape.qk_rope_head_dim as usize);
        let hidden = Dim(config.hidden_size, "hidden_size");
        let queries = Dim(
            heads * (config.qk_nope_head_dim + rope),
            "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)",
        );
        let query = match config.q_lora_rank {
            None => Query::Direct(Linear::take(weights, &format!("{name}.q_proj"), queries, hidden)?),
            Some(rank) => {
                let rank = Dim(rank, "q_lora_rank");
                Query::LowRank(Box::new(LowRank {
                    down: Linear::take_with(weights, &format!("{name}.q_a_proj"), rank, hidden, bias)?,
                    norm: Norm::take(weights, &format!("{name}.q_a_layernorm"), rank, INNER_EPS)?,
                    up: Linear::take(weights, &format!("{name}.q_b_proj"), queries, rank)?,
                    index: config
                        .indexer_of(layer)
                        .map(|it| {
                            IndexProjections::take(weights, &format!("{name}.indexer"), config, it, rank)
                        })
                        .transpose()?,
                }))
            }
        };
        let kv = Dim(latent + rope, "kv_lora_rank + qk_rope_head_dim");
        let values = Dim(heads * config.v_head_dim, "num_attention_heads * v_head_dim");
        let norm = Dim(latent, "kv_lora_rank");
        Ok(Self {
            query,
            kv_a: Linear::take_with(weights, &format!("{name}.kv_a_proj_with_mqa"), kv, hidden, bias)?,
            kv_norm: Norm::take(weights, &format!("{name}.kv_a_layernorm"), norm, INNER_EPS)?,
            out: Linear::take_with(weights, &format!("{name}.o_proj"), hidden, values, bias)?,
            latent,
            rope,
        })
    }

    /// The attention's input from a layer's normed input `[T, hidden]`. Queries are multiplied by their tokens' factors, if any.
    pub fn rows(&self, x: &Tensor, factors: Option<&[f32]>) -> Result<Rows> {
        let (q, index) = match &self.query {
            Query::Direct(direct) => (direct.of(x)?, None),
            Query::LowRank(query) => {
                let LowRank { down, norm, up, index } = query.as_ref();
                let low_rank = norm.of(&down.of(x)?)?;
                (up.of(&low_rank)?, index.as_ref().map(|index| index.rows(x, &low_rank)).transpose()?)
            }
        };
        let kv = self.kv_a.of(x)?;
        let kv_c = self.kv_norm.of(&kv.narrow(1, 0, self.latent)?)?;
        let k_pe = kv.narrow(1, self.latent, self.rope)?;
        let mut q = values(&q)?;
        let each = q.len() / factors.map_or(1, <[f32]>::len).max(1);
        for (row, factor) in q.chunks_exact_mut(each.max(1)).zip(factors.unwrap_or_default()) {
            row.iter_mut().for_each(|x| *x *= factor);
        }
        Ok(Rows { q, kv_c: values(&kv_c)?, k_pe: values(&k_pe)?, index })
    }

    /// `o_proj` of the attention's output `[T, H, V]`: `[T, hidden]`.
    pub fn back(&self, attended: Vec<f32>, tokens: usize) -> Result<Tensor> {
        tensor(self.out.apply(&attended, tokens)?, tokens)
    }
}

fn tensor(rows: Vec<f32>, tokens: usize) -> Result<Tensor> {
    let each = rows.len() / tokens.max(1);
    Ok(Tensor::from_vec(rows, (tokens, each), &candle_core::Device::Cpu)?)
}

/// A tensor's elements, row by row.
pub fn values(x: &Tensor) -> Result<Vec<f32>> {
    Ok(x.flatten_all()?.to_vec1()?)
}
