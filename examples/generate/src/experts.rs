//! Mixture of experts: the router, as in transformers' DeepseekV2, DeepseekV3 and Mistral4, and the weighted sum of the chosen experts.

use candle_core::{Device, Tensor};

use crate::config::ExpertsConfig;
use crate::layer::{Mlp, Norm, values};
use crate::matrix::Matrix;
use crate::weights::{Dim, Weights};
use crate::{Config, Result};

pub struct Experts {
    pub routing: Routing,
    pub router: Matrix,
    pub experts: Vec<Mlp>,
    pub shared: Option<Mlp>,
    /// The norm of the sum of all.
    pub norm: Option<Norm>,
}

/// What chooses experts by the router's logits.
#[derive(Debug, Clone)]
pub struct Routing {
    config: ExpertsConfig,
    /// `e_score_correction_bias`: 0 without one.
    bias: Vec<f32>,
}

/// An expert of a token, and its weight.
type Choice = (usize, f32);

impl Experts {
    pub fn take(weights: &mut Weights, name: &str, model: &Config, config: &ExpertsConfig) -> Result<Self> {
        let hidden = Dim(model.hidden_size, "hidden_size");
        let inner = Dim(config.intermediate_size, "moe_intermediate_size");
        let all = Dim(config.num_experts, "n_routed_experts");
        let experts = Mlp::take_experts(weights, &format!("{name}.experts"), all, hidden, inner)?;
        let bias = format!("{name}.gate.e_score_correction_bias");
        let bias = match config.gate.sigmoid {
            false => None,
            // A.X-K1 was released without.
            true if config.norm => weights.take_if_there(&bias, &[all])?,
            true => Some(weights.take(&bias, &[all])?),
        };
        let bias = bias.map(|bias| values(&bias)).transpose()?;
        let of_shared =
            Dim(config.intermediate_size * config.num_shared, "moe_intermediate_size * n_shared_experts");
        let shared = format!("{name}.shared_experts");
        Ok(Self {
            experts,
            router: weights.matrix(&format!("{name}.gate.weight"), all, hidden)?,
            norm: match (config.norm, name.strip_suffix(".mlp")) {
                (true, Some(layer)) => {
                    let norm = format!("{layer}.post_mlp_layernorm");
                    Some(Norm::take(weights, &norm, hidden, model.rms_norm_eps)?)
                }
                _ => None,
            },
            shared: match config.num_shared {
                0 => None,
                _ => Some(Mlp::take(weights, &shared, hidden, of_shared, model.mlp_bias)?),
            },
            routing: Routing {
                config: config.clone(),
                bias: bias.unwrap_or_else(|| vec![0.0; config.num_experts]),
            },
        })
    }

    /// `[T, hidden]` to the same.
    pub fn of(&self, x: &Tensor) -> Result<Tensor> {
        let asked = self.routing.route(&values(&self.router.of(x)?)?);
        let mut sum = x.zeros_like()?;
        for (expert, (tokens, weights)) in self.experts.iter().zip(asked) {
            if tokens.is_empty() {
                continue;
            }
            let weights = Tensor::from_vec(weights, (tokens.len(), 1), &Device::Cpu)?;
            let tokens = Tensor::new(tokens, &Device::Cpu)?;
            let part = expert.of(&x.index_select(&tokens, 0)?)?.broadcast_mul(&weights)?;
            sum = sum.index_add(&tokens, &part, 0)?;
        }
        if let Some(shared) = &self.shared {
            sum = (sum + shared.of(x)?)?;
        }
        match &self.norm {
            Some(norm) => norm.of(&sum),
            None => Ok(sum),
        }
    }
}

impl Routing {
    /// Tokens of each expert and their weights, from the router's logits, `[T, experts]`.
    pub fn route(&self, logits: &[f32]) -> Vec<(Vec<u32>, Vec<f32>)> {
        let mut asked: Vec<(Vec<u32>, Vec<f32>)> = vec![Default::default(); self.config.num_experts];
        for (token, logits) in logits.chunks_exact(self.config.num_experts).enumerate() {
            for (expert, weight) in self.choose(logits) {
                asked[expert].0.push(token as u32);
                asked[expert].1.push(weight);
            }
        }
        asked
    }

    fn choose(&self, logits: &[f32]) -> Vec<Choice> {
        let config = &self.config;
        let scores = match config.gate.sigmoid {
            false => softmax(logits),
            true => logits.iter().map(|&x| 1.0 / (1.0 + (-x).exp())).collect(),
        };
        let ranks: Vec<f32> = scores.iter().zip(&self.bias).map(|(score, bias)| score + bias).collect();
        let size = config.num_experts / config.groups;
        let of_group = |group: &[f32]| {
            let best = largest(group, config.gate.best_of_group);
            best.into_iter().map(|at| group[at]).sum::<f32>()
        };
        let groups: Vec<f32> = ranks.chunks_exact(size).map(of_group).collect();
        let mut allowed = vec![f32::NEG_INFINITY; config.num_experts];
        for group in largest(&groups, config.chosen_groups) {
            let range = group * size..(group + 1) * size;
            allowed[range.clone()].copy_from_slice(&ranks[range]);
        }
        let chosen = largest(&allowed, config.per_token);
        let sum: f32 = chosen.iter().map(|&expert| scores[expert]).sum();
        let divisor = if config.gate.normalise { sum + 1e-20 } else { 1.0 };
        chosen.into_iter().map(|expert| (expert, scores[expert] / divisor * config.scaling)).collect()
    }
}

fn softmax(logits: &[f32]) -> Vec<f32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = logits.iter().map(|x| (x - max).exp()).collect();
    let sum: f32 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

/// Indices of the `count` largest; of equal ones the first.
fn largest(xs: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..xs.len()).collect();
    order.sort_by(|&a, &b| xs[b].total_cmp(&xs[a]));
    order.truncate(count);
    order
}
